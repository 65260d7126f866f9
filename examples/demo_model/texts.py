"""Reads the hand-written texts. Knows their file format; knows nothing of how they are used.

An entry is a block of lines. Its first line names what is asked, `# subject | subject` (asked in
many ways) or `? question | question` (asked as it stands); every further line is one answer, in
which a backslash and an n stand for a new line.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TEXT_DIR = Path(__file__).parent / "text"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to know: ways to ask for it, and answers that say the same."""

    subjects: tuple[str, ...]  # empty where `questions` holds whole questions
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@cache
def entries(name: str) -> tuple[Entry, ...]:
    """Return the entries of `text/<name>.txt`, in their order."""
    return tuple(_entry(block) for block in _blocks(name))


def _entry(block: list[str]) -> Entry:
    head, answers = block[0], tuple(block[1:])
    asked = tuple(part.strip() for part in head[1:].split("|"))
    return Entry(asked, (), answers) if head[0] == "#" else Entry((), asked, answers)


@cache
def sections(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (title, lines) for each block of `text/<name>.txt`."""
    return tuple((block[0].removeprefix("# "), tuple(block[1:])) for block in _blocks(name))


@cache
def templates(name: str) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the question templates of a file and the words for each of their slots."""
    head, *slots = (TEXT_DIR / f"{name}.txt").read_text(encoding="utf-8").strip().split("\n# ")
    words = dict(slot.split("\n", 1) for slot in slots)
    return tuple(head.splitlines()), {slot: tuple(w.split("|")) for slot, w in words.items()}


def _blocks(name: str) -> list[list[str]]:
    text = (TEXT_DIR / f"{name}.txt").read_text(encoding="utf-8")
    return [
        [line.replace("\\n", "\n") for line in block.splitlines()]
        for block in text.strip().split("\n\n")
    ]
