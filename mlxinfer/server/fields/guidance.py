"""The grammar of one answer: what a request asks for, with reasoning before it and tools in it."""

from collections.abc import Sequence

from ...core import Grammar
from ...grammar import GrammarSpec
from ...text import ToolUse
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
    guidance = model.asking.guidance
    ruling = guidance.rule(prompt_ids, asked, use, reasons=reasons)
    return [None if ruling is None else guidance.start(ruling) for _ in range(count)]
