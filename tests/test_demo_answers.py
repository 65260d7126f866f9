"""The demo's answers to the held-out questions, graded, and what a first user asks."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxinfer import LLM

pytestmark = pytest.mark.demo

sys.path.insert(0, str(Path(__file__).parents[1]))
grade = importlib.import_module("examples.demo_model.grade")
questions = importlib.import_module("examples.demo_model.questions")
tools = importlib.import_module("examples.demo_model.tools.grade")
held_out = importlib.import_module("examples.demo_model.tools.held_out")

EMBARRASSED = (  # by an earlier demo
    "2+2?",
    "How do I install a bigger model?",
    "How much memory does a 7B need?",
    "Name three colours",
    "List three colours.",
    "Could you give me an example of JSON?",
)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", max_batch=32) as llm:
        yield llm


def test_what_embarrassed_an_earlier_demo_is_right(demo: LLM) -> None:
    asked = [question for question in questions.questions() if question.turns[0] in EMBARRASSED]
    assert len(asked) == len(EMBARRASSED)
    said = grade.answers(demo, asked)
    assert [grade.grade(*item) for item in zip(asked, said, strict=True)] == ["good"] * len(asked)


@pytest.mark.slow
def test_nearly_all_held_out_questions_are_answered_or_refused(demo: LLM) -> None:
    asked = list(questions.questions())
    said = grade.answers(demo, asked)
    report = grade.report(asked, said)
    counts = Counter(grade.grade(*sum) for sum in zip(asked, said, strict=True))
    assert counts[grade.BAD] <= 5, report
    sums = [sum for sum in zip(asked, said, strict=True) if sum[0].grade.startswith("= ")]
    assert all(grade.grade(*sum) == grade.GOOD for sum in sums), report


@pytest.mark.slow
def test_three_quarters_of_the_held_out_tool_conversations_go_on_well(demo: LLM) -> None:
    asked = held_out.tool_questions()
    said = tools.tool_answers(demo, asked)
    right = [tools.is_right(*item) for item in zip(asked, said, strict=True)]
    assert sum(right) >= 30, tools.tool_report(asked, said)
