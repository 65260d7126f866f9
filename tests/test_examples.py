"""Every example runs as it stands and prints something."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install ray"),
            ]
            if path.stem.startswith("ray")
            else [],
        )
        for path in EXAMPLES
    ],
)
def test_example(example: Path) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr or "ray" in example.stem  # which tells there what it starts
    assert len(example.read_text().splitlines()) <= 40
