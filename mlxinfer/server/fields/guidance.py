"""The grammar of one answer: what a request asks for, with reasoning before it and tools in it."""

from collections.abc import Sequence
from dataclasses import replace

from ...core import Grammar
from ...grammar import GrammarSpec, spec
from ...grammar.guidance import calls_or
from ...text import ToolUse
from ...text.tools.reasoned import after_reasoning
from ..registry.served import ServedModel


def start_grammars(
    model: ServedModel,
    asked: GrammarSpec | None,
    use: ToolUse | None,
    prompt_ids: Sequence[int],
    count: int,
    *,
    reasons: bool,
) -> list[Grammar | None]:
    """The state of each of `count` answers; None where nothing rules them. Takes a while.

    Args:
        model: that answers.
        asked: what the request says of the form.
        use: of tools.
        prompt_ids: to see whether the prompt has opened the reasoning already.
        count: answers, each of which gets its own.
        reasons: whether the model may reason before.

    Raises:
        InvalidRequestError: the grammar cannot be compiled.
        OverloadedError: too many grammars at once.
    """
    ruling = _with_tools(model, asked, use, prompt_ids)
    if ruling is None and asked is not None:
        ruling = asked
        if reasons and model.reasoning is not None:
            before = after_reasoning(model.tokenizer, model.reasoning, prompt_ids)
            ruling = replace(asked, before=before)
    if ruling is None:
        return [None] * count
    return [model.grammars.start(ruling) for _ in range(count)]


def _with_tools(
    model: ServedModel,
    asked: GrammarSpec | None,
    use: ToolUse | None,
    prompt_ids: Sequence[int],
) -> GrammarSpec | None:
    if use is None:
        return None
    if asked is not None and not use.must_call:
        return calls_or(asked, use, model.tokenizer, model.reasoning, prompt_ids)
    lark = use.grammar(model.tokenizer, model.reasoning, prompt_ids)
    return None if lark is None else spec.tool_calls(lark, use.schemas)
