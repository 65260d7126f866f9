"""Tools for chat templates without tools: signatures in the system text, calls in tags.

The instructions ask for Hermes's form, the one that models without training in tools have most
often seen. Calls and results of the history become text, so that any template can write them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..template import around, joined
from .format import WrittenCall
from .known import GENERIC

Messages = list[dict[str, Any]]

_INSTRUCTIONS = """\
# Tools

You can call these functions. Each line is the signature of one, as JSON:
{signatures}

To call a function, answer with its name and its arguments as JSON between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
For several calls write one after the other. The results come between <tool_response> and \
</tool_response>. Call a function only if its result is needed; otherwise answer in plain text."""


def generic_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> Messages:
    """Return messages in which tools, calls and results are text.

    The tools stand in the system message, which `Forms.apply` moves where a template writes none.
    Results are messages of the user; messages of the user that follow each other become one, since
    many templates demand that user and assistant take turns.

    Args:
        messages: as text, with "tool_calls" and messages of the role "tool".
        tools: in OpenAI's form; None: none are shown.
    """
    chat: Messages = []
    merges = False  # the last message is a result, or follows one
    for message in messages:
        plain = _plain(message)
        merges = plain["role"] == "user" and (merges or message.get("role") == "tool")
        if merges and chat and chat[-1]["role"] == "user":
            content = joined(chat[-1]["content"], plain["content"])
            chat[-1] = {**chat[-1], "content": content}
        else:
            chat.append(plain)
    return _instructed(chat, tools) if tools else chat


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        wrapped = around(content, "<tool_response>\n", "\n</tool_response>")
        return {"role": "user", "content": wrapped}
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)) or not calls:
        return dict(message)
    written = [WrittenCall.of(call) for call in calls if isinstance(call, Mapping)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls_text = GENERIC.write(written)
    return {**rest, "content": joined(content, calls_text) if content else calls_text}


def _instructed(chat: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    signatures = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = _INSTRUCTIONS.format(signatures="\n".join(signatures))
    if chat[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *chat]
    content = around(chat[0].get("content"), after=f"\n\n{text}")
    return [{**chat[0], "content": content}, *chat[1:]]
