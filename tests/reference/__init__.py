"""Pages of docs/ that the code itself gives: `python -m tests.reference` writes them."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "server")]  # as pytest finds helpers
DOCS = TESTS.parent / "docs"
MARK = "<!-- python -m tests.reference writes what follows -->\n\n"
END = "\n<!-- the end of what it writes -->\n"


def generated(name: str) -> str:
    """The part of a page that the code gives."""
    return (DOCS / name).read_text().partition(MARK)[2].partition(END)[0]


def rewrite(name: str, text: str) -> None:
    """Write that part anew, and leave the beginning of the page as it is."""
    path = DOCS / name
    begin, _, rest = path.read_text().partition(MARK)
    _, end, after = rest.partition(END)
    path.write_text(begin + MARK + text + end + after)
