"""Reads the hand-written texts. Knows their file formats; knows nothing of how they are used.

Blocks are separated by an empty line; `|` separates alternatives, and a backslash and an n stand
for a new line. An entry has heads and answers. A head is `# subject | subject` or
`> do this | do that` (both asked in many ways), or `? question | question` (asked as it stands).
Every further line is one answer. A table has questions (`?`), follow-ups (`&`) and an answer (`!`)
in which {0} is a field of a row, {0.} the same with a capital letter, then rows of fields.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TEXT_DIR = Path(__file__).parent / "text"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to know: ways to ask for it, and answers that say the same."""

    subjects: tuple[str, ...]
    actions: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Facts of one kind."""

    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]
    answer: str
    rows: tuple[tuple[str, ...], ...]


@cache
def entries(name: str) -> tuple[Entry, ...]:
    """Return the entries of `text/<name>.txt`, in their order."""
    return tuple(_entry(block) for block in _blocks(name))


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables of `text/tables.txt`."""
    tables = []
    for block in _blocks("tables"):
        rows = [line for line in block if line[0] not in "?&!%"]
        pairs = [tuple(field.strip() for field in row.split("=")) for row in rows]
        pairs += [row for line in block if line[0] == "%" for row in _translations(line[1:])]
        answer = _alternatives(block, "!")[0]
        tables.append(
            Table(_alternatives(block, "?"), _alternatives(block, "&"), answer, tuple(pairs))
        )
    return tuple(tables)


@cache
def sections(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (title, lines) for each block of `text/<name>.txt`."""
    return tuple((block[0].removeprefix("# "), tuple(block[1:])) for block in _blocks(name))


@cache
def templates(name: str) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the first lines of a file and, by name, the lists that follow them.

    A list is one line of alternatives, or several lines.
    """
    head, *slots = (TEXT_DIR / f"{name}.txt").read_text(encoding="utf-8").strip().split("\n# ")
    words = dict(slot.split("\n", 1) for slot in slots)
    return tuple(head.splitlines()), {
        slot: tuple(re.split(r"[|\n]", w)) for slot, w in words.items()
    }


def fill(template: str, fields: tuple[str, ...]) -> str:
    """Return the template with the fields of a row in its places."""
    for index, field in enumerate(fields):
        template = template.replace(f"{{{index}.}}", field[0].upper() + field[1:])
        template = template.replace(f"{{{index}}}", field)
    return template[0].upper() + template[1:] if template[0].islower() else template


def _entry(block: list[str]) -> Entry:
    answers = tuple(line for line in block if line[0] not in "#>?")
    return Entry(
        _alternatives(block, "#"), _alternatives(block, ">"), _alternatives(block, "?"), answers
    )


def _alternatives(block: list[str], mark: str) -> tuple[str, ...]:
    lines = [line[1:] for line in block if line[0] == mark]
    return tuple(part.strip() for line in lines for part in line.split("|"))


def _translations(name: str) -> list[tuple[str, ...]]:
    """Return (word, its translation, language) for each field of a table with a header."""
    header, *lines = (TEXT_DIR / f"{name}.txt").read_text(encoding="utf-8").strip().splitlines()
    languages = [language.strip() for language in header.split("=")[1:]]
    rows = [[field.strip() for field in line.split("=")] for line in lines]
    return [(row[0], row[i], languages[i - 1]) for row in rows for i in range(1, len(row))]


def _blocks(name: str) -> list[list[str]]:
    text = (TEXT_DIR / f"{name}.txt").read_text(encoding="utf-8")
    return [
        [line.replace("\\n", "\n") for line in block.splitlines()]
        for block in text.strip().split("\n\n")
    ]
