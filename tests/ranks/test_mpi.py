"""The matrix of ranks and its heads over Open MPI in place of the ring, and how programs end.

Needs `mpirun` and `libmpi.so` (Debian: openmpi-bin, libopenmpi-dev). pytest -m slow tests/ranks
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.ranks.hosts import free_ports

FOLLOW = """
from mlxinfer.ranks.follower import follow
from mlxinfer.ranks.hosts import launched, shared_secret

follow(launched(), shared_secret(), None)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("mpirun") is None or not mx.distributed.is_available("mpi"),
        reason="mpirun or libmpi.so is not installed",
    ),
]


def mpirun(*programs: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run each of `programs`, after its number of processes, as one job of MPI."""
    parts = [word for program in programs for word in (":", "-n", *program)]
    command = ["mpirun", "--oversubscribe", *parts[1:]]
    environ = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MLXINFER_RANKS_SECRET": "of this test alone",
        "MLXINFER_RANKS_CONTROL": f"127.0.0.1:{free_ports(1)[0]}",
        **variables,
    }
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("what", ["matrix", "heads"])
def test_answers_over_mpi_are_those_of_one_rank(what: str, size: int) -> None:
    tests = str(Path(__file__).with_name(f"test_rank_{what}.py"))
    rank_0 = ["1", sys.executable, "-m", "pytest", "-n0", tests]
    others = [str(size - 1), sys.executable, "-c", FOLLOW]
    done = mpirun(
        rank_0,
        others,
        MLXINFER_RANKS=str(size),
        MLXINFER_RANK_PROGRAMS=os.environ.get("MLXINFER_RANK_PROGRAMS", "12"),
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "passed" in done.stdout, done.stdout


def test_a_program_that_went_well_ends_with_status_0() -> None:
    """MPI is finalised on every rank: else `mpirun` calls the end of a good run an error."""
    run = ["2", sys.executable, "-m", "mlxinfer.cli", "run", "-m", "demo", "--max-tokens", "8"]
    done = mpirun([*run, "Hi"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finalize" not in done.stderr, done.stderr[-3000:]
