"""The project speaks of itself alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".toml", ".txt", ".metal", ".h", ".yml"}


def texts() -> Iterator[Path]:
    """Every text of the checkout or of an unpacked sdist, but for what tools leave there."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = parts[0].startswith(".") or "node_modules" in parts
        if path.suffix in SUFFIXES and path.is_file() and not hidden:
            yield path


@pytest.mark.parametrize("word", ["/" + "work/", "sub" + "agent", "this " + "session"])
def test_the_project_speaks_of_itself(word: str) -> None:
    found = list(texts())
    assert len(found) > 300
    assert not [str(path) for path in found if word in path.read_text()]
