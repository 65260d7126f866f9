"""`import mlxinfer` and `mlxinfer --help` load nothing that a reader of help has to wait for."""

import json
import subprocess
import sys

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


def test_the_vocabulary_loads_nothing_heavy() -> None:
    code = (
        "import mlxinfer.hub; from mlxinfer import SamplingParams, Result, ModelError;"
        "from mlxinfer import core, config, errors, backend, outputs"
    )
    assert loaded_after(code) & (HEAVY | {"click"}) == set()


def test_convert_is_called_with_or_without_an_import_of_its_package() -> None:
    for before in ("", "from mlxinfer.convert.recipes import make_recipe; import mlxinfer.convert"):
        code = f"{before}\nimport mlxinfer; convert = mlxinfer.convert; assert callable(convert)"
        assert loaded_after(code) & {"mlx", "mlx_lm", "click"} == set() or before
        call = (
            "\ntry: convert('demo', 'out', progress=5)\nexcept mlxinfer.InvalidRequestError: pass"
        )
        assert "mlxinfer" in loaded_after(code + call)


def test_help_loads_click_and_nothing_heavy() -> None:
    code = (
        "import mlxinfer.cli\n"
        "try: mlxinfer.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code"
    )
    assert loaded_after(code) & HEAVY == set()
