"""Asks a model the held-out conversations with tools and grades what it says.

A call is right if its name and all of its arguments are; upper and lower case of words do not
count. An answer is right if it is no call and holds the words of its grade.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from mlxinfer import LLM, SamplingParams
from mlxinfer.outputs import Result

from ..grade import holds
from .held_out import ToolQuestion


def tool_answers(llm: LLM, questions: Sequence[ToolQuestion]) -> list[Result]:
    """Return the most probable continuation of each conversation; all are asked at once."""
    params = SamplingParams(max_tokens=200, temperature=0)

    async def ask(question: ToolQuestion) -> Result:
        tools = [tool.schema for tool in question.tools]
        return await llm.achat(list(question.messages), params, tools=tools)

    async def ask_all() -> list[Result]:
        return await asyncio.gather(*map(ask, questions))

    return asyncio.run(ask_all())


def is_right(question: ToolQuestion, said: Result) -> bool:
    """Return whether the wanted call was made, or the wanted answer given without one."""
    if question.call is None:
        return not said.tool_calls and holds(said.text, question.wanted.removeprefix("~ "))
    made = [(call.name, _plain(call.arguments)) for call in said.tool_calls or ()]
    name, arguments = question.call
    return made == [(name, _plain(json.dumps(arguments)))]


def tool_report(questions: Sequence[ToolQuestion], said: Sequence[Result]) -> str:
    """Return how many are right, then each that is wrong with what was said."""
    right = [is_right(*result) for result in zip(questions, said, strict=True)]
    lines = [f"{sum(right)} of {len(right)} conversations with tools go on as they should"]
    for good, question, result in zip(right, questions, said, strict=True):
        if not good:
            calls = "".join(f"{call.name} {call.arguments}" for call in result.tool_calls or ())
            lines += [f"[bad] {question.asked}", f"    {calls or result.text}"]
    return "\n".join(lines)


def _plain(arguments: str) -> Any:
    try:
        return json.loads(arguments.lower())
    except ValueError:
        return None
