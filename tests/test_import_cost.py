"""`import mlxinfer` and `mlxinfer --help` load nothing that a reader of help has to wait for."""

import json
import resource
import subprocess
import sys

import pytest

HEAVY = {
    "mlx",
    "mlx_lm",
    "numpy",
    "jinja2",
    "tokenizers",
    "huggingface_hub",
    "rich",
    "prompt_toolkit",
    "uvicorn",
}


def loaded_after(code: str) -> set[str]:
    """Top-level names in sys.modules after `code` ran in a fresh interpreter."""
    report = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import mlxinfer; mlxinfer.__version__",
        "import mlxinfer; mlxinfer.SamplingParams; mlxinfer.Result; mlxinfer.ModelError",
        "import mlxinfer.hub",
        "from mlxinfer import core, config, errors, backend; import mlxinfer.outputs",
    ],
)
def test_the_vocabulary_loads_nothing_heavy(code: str) -> None:
    assert loaded_after(code) & (HEAVY | {"click"}) == set()


def test_importing_the_package_alone_does_not_even_load_its_own_modules() -> None:
    code = (
        "import sys, mlxinfer; print(sorted(m for m in sys.modules if m.startswith('mlxinfer.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_click_and_nothing_heavy() -> None:
    code = (
        "import mlxinfer.cli\n"
        "try: mlxinfer.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code"
    )
    assert loaded_after(code) & HEAVY == set()


def cpu_s(*arguments: str, runs: int = 3) -> float:
    """The least CPU time of a fresh interpreter; wall time would measure other processes too."""
    times = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_and_help_are_quick() -> None:
    """Measured by an interpreter that does nothing: machines differ, and so do their moments."""
    bare_s = cpu_s("-c", "pass")
    assert cpu_s("-c", "import mlxinfer") < 3 * bare_s
    assert cpu_s("-m", "mlxinfer.cli", "--help") < 10 * bare_s
