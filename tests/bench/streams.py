"""`bench streams`: answers of a few requests at once, the table that `mlxinfer bench` makes.

A random model of 55M float32 weights and OpenBLAS under both sides.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxinfer import LLM
from mlxinfer.bench import speed
from mlxinfer.bench.report import Report
from tests.bench.checkpoints import LAPTOP, SMALL
from tests.bench.serve import write_served


def run(*, runs: int = 3, small: bool = False, peer: bool = True) -> Report:
    """1, 4 and 8 requests at once, of 32 prompt tokens each; beside mlx-lm."""
    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", SMALL if small else LAPTOP)
        report = speed.run(
            partial(LLM, folder, prefix_cache=False),
            contexts=[32],
            batches=(1, 4, 8),
            tokens=16 if small else 64,
            runs=runs,
            peer=peer,
        )
    report.benchmark = "streams"
    report.data["model"] = "random"
    return report
