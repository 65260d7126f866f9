"""Asks a model the held-out questions and grades its answers.

A grade of `questions.txt` is one of

    = 85              a sum: the last number behind an equals sign
    ~ pages & key|q   the answer holds each of these, of those between bars any one
    refusal           an honest refusal that says what to do
    list 3 colours    so many members of a category, one a line, none twice
    json name, age    JSON with these keys; a number: a list of so many; *: any object
    summary a & b     one paragraph shorter than the question that holds these
    haiku             three lines
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence

from mlxinfer import LLM, SamplingParams

from .corpus import UNKNOWN_ANSWERS
from .questions import Question
from .sums import TOO_LARGE
from .words import CATEGORIES

GOOD, REFUSED, BAD = "good", "refused", "bad"


def answers(llm: LLM, questions: Sequence[Question]) -> list[str]:
    """Return the most probable answer to each question's last turn; all are asked at once."""
    params = SamplingParams(max_tokens=200, temperature=0)

    async def ask(question: Question) -> str:
        messages: list[dict[str, str]] = []
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            said = (await llm.achat(messages, params)).text
            messages.append({"role": "assistant", "content": said})
        return messages[-1]["content"]

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, questions))

    return asyncio.run(ask_all())


def grade(question: Question, answer: str) -> str:
    """Return GOOD, REFUSED (honestly, where an answer was wanted) or BAD."""
    kind, _, wanted = question.grade.partition(" ")
    if _refuses(answer):
        return GOOD if kind == "refusal" else REFUSED
    asked = question.turns[-1]
    passed = {
        "=": lambda: re.findall(r"= (-?\d+)", answer)[-1:] == [wanted],
        "~": lambda: holds(answer, wanted),
        "refusal": lambda: False,
        "list": lambda: _lists(answer, *wanted.split(" ", 1)),
        "json": lambda: _parses(answer, wanted),
        "summary": lambda: (
            "\n" not in answer and len(answer) < len(asked) and holds(answer, wanted)
        ),
        "haiku": lambda: len(answer.splitlines()) == 3,
    }[kind]()
    return GOOD if passed else BAD


def report(questions: Sequence[Question], answers: Sequence[str]) -> str:
    """Return the counts of the grades, then each question with its answer."""
    graded = [(grade(q, a), q, a) for q, a in zip(questions, answers, strict=True)]
    counts = Counter(mark for mark, _, _ in graded)
    lines = [f"{counts[GOOD]} good, {counts[REFUSED]} refused, {counts[BAD]} bad of {len(graded)}"]
    for mark, question, answer in sorted(graded, key=lambda item: item[0]):  # "bad" comes first
        lines.append(f"[{mark}] {' >> '.join(question.turns)}")
        lines += [f"    {line}" for line in answer.splitlines()]
    return "\n".join(lines)


def holds(answer: str, wanted: str) -> bool:
    """Return whether an answer holds a word of each of the groups that & separates."""
    groups = [group.split("|") for group in wanted.lower().split("&")]
    return all(any(word.strip() in answer.lower() for word in group) for group in groups)


def _refuses(answer: str) -> bool:
    return answer in (*UNKNOWN_ANSWERS, TOO_LARGE)


def _lists(answer: str, count: str, what: str) -> bool:
    members = [re.sub(r"^\d+\. ", "", line) for line in answer.splitlines()]
    known = all(member in CATEGORIES[what] for member in members)
    return known and len(members) == len(set(members)) == int(count)


def _parses(answer: str, wanted: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    if wanted.isdigit():
        return isinstance(value, list) and len(value) == int(wanted)
    return isinstance(value, dict) and wanted in ("*", ", ".join(value))
