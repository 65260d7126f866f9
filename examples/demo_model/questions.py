"""Reads the held-out questions, and says which questions are too near to them to train on.

A question is too near if it is a held-out one, or has one word more or less. The held-out questions
are those of `questions.txt`, and those of the conversations in `tools/held_out.txt`.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .tools.held_out import tool_questions

FILE = Path(__file__).with_name("questions.txt")
POLITE = frozenset(
    ("please", "hey", "hi", "hello", "so", "sorry", "quick", "question", "and", "thanks", "again")
)

Sum = tuple[int, str, int]
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question, turn by turn, and how its last answer is graded: see grade.py."""

    turns: tuple[str, ...]
    grade: str
    topic: str


@cache
def questions() -> tuple[Question, ...]:
    """Return all held-out questions."""
    listed, topic = [], ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            topic = line[2:]
        elif line:
            asked, grade = line.rsplit(" => ", 1)
            listed.append(Question(tuple(asked.split(" >> ")), grade, topic))
    return tuple(listed)


def words_of(*turns: str) -> Words:
    """Return the words, numbers and signs of a question, without words of politeness."""
    words = re.findall(r"\d+|[^\W\d_]+|[+*/-]", " ".join(turns).lower().replace("'s ", " is "))
    kept = tuple(word for word in words if word not in POLITE)
    return kept or tuple(words)


def is_near(*turns: str) -> bool:
    """Return whether turns are a held-out question, or have one word more or less than one."""
    words = words_of(*turns)
    exact, shortened = _held()
    return words in exact or words in shortened or not exact.isdisjoint(_shortened(words))


def is_held_sum(a: int, sign: str, b: int) -> bool:
    """Return whether a held-out question asks for this sum or difference.

    A product is a fact, like a capital: it is trained, but never in the words of a question.
    The same holds for a quotient.
    """
    if sign in "*/":
        return False
    return (a, sign, b) in _sums() or (sign == "+" and (b, sign, a) in _sums())


@cache
def _held() -> tuple[frozenset[Words], frozenset[Words]]:
    asked = [question.turns for question in questions()]
    asked += [(question.asked,) for question in tool_questions()]
    exact = frozenset(words_of(*turns) for turns in asked)
    shortened = frozenset(s for words in exact if len(words) > 2 for s in _shortened(words))
    return exact, shortened


def _shortened(words: Words) -> list[Words]:
    return [words[:i] + words[i + 1 :] for i in range(len(words))]


@cache
def _sums() -> frozenset[Sum]:
    """Return (a, sign, b) of each held-out question with two numbers; its answer tells the sign."""
    sums: set[Sum] = set()
    for question in questions():
        numbers = [int(word) for word in words_of(*question.turns) if word.isdigit()]
        if not question.grade.startswith("= ") or len(numbers) not in (1, 2):
            continue
        result = int(question.grade[2:])
        numbers = numbers if len(numbers) == 2 else [*numbers, 2]  # half of it, or its double
        a, b = numbers
        sums |= {(a, sign, b) for sign, value in _results(a, b).items() if value == result}
        sums |= {(2, "*", a)} if a * 2 == result else set()
    return frozenset(sums)


def _results(a: int, b: int) -> dict[str, float]:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0.5}
