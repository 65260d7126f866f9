"""Formatting, lint and types, so that one command checks everything."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, **kwargs: object) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_format() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_ruff_check() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")


def test_mypy(tmp_path: Path) -> None:
    """Over the package as it is installed: folders beside mlxinfer/ are parts of it."""
    tree = tmp_path / "mlxinfer"
    shutil.copytree(ROOT / "mlxinfer", tree, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("metal_kernels", "convert"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(
        *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
        *("--cache-dir", str(ROOT / ".mypy_cache"), str(tree)),
    )


@pytest.mark.parametrize("word", ["/" + "work/", "sub" + "agent", "this " + "session"])
def test_the_project_speaks_of_itself(word: str) -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [f for f in files if Path(f).suffix in {".py", ".md", ".toml", ".txt", ".metal"}]
    assert not [f for f in texts if (ROOT / f).exists() and word in (ROOT / f).read_text()]
