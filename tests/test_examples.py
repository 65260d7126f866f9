"""Every example runs as it stands and prints something."""

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

SLOW = ("few_shot",)
EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.usefixtures("small_demo")
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
            else [pytest.mark.ci] * (path.stem in SLOW),
        )
        for path in EXAMPLES
    ],
)
def test_example(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, which has all that they import; in one of its own runs the README's."""
    runpy.run_path(str(example), run_name="__main__")
    out, err = capfd.readouterr()
    assert out.strip()
    assert not err or "ray" in example.stem  # which tells there what it starts
    assert len(example.read_text().splitlines()) <= 40
