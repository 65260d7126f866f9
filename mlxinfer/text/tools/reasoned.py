"""Leaves a model its reasoning before an answer that a grammar rules. Knows marks; no grammar."""

from collections.abc import Sequence

from ..begun import begun_in
from ..reasoning import ReasoningFormat
from ..tokenizer import Tokenizer
from .forced import thought, tokens_of
from .lark import Lark
from .use import ToolUse


def after_reasoning(
    tokenizer: Tokenizer, reasoning: ReasoningFormat, prompt_ids: Sequence[int]
) -> str:
    """Return a Lark grammar (llguidance) of what the grammar @main allows, perhaps after reasoning.

    Args:
        tokenizer: whose control tokens mark the reasoning.
        reasoning: how the model reasons.
        prompt_ids: to see whether the prompt has opened the reasoning already.
    """
    lark = Lark(tokens_of(tokenizer, reasoning.marks))
    begun = begun_in(tokenizer, reasoning, prompt_ids)
    before = f"{thought(lark, reasoning, begun)} {_head(lark, reasoning, begun)}"
    return lark.grammar(f"{before} @main".strip())


def calls_or_answer(
    tokenizer: Tokenizer,
    use: ToolUse,
    reasoning: ReasoningFormat | None,
    prompt_ids: Sequence[int],
) -> str:
    """Return a Lark grammar (llguidance) of answers that call tools, or that @main allows.

    Args:
        tokenizer: whose control tokens the calls are written with.
        use: of the tools.
        reasoning: how the model reasons, which it may do first.
        prompt_ids: to see whether the prompt has opened the reasoning already.
    """
    marks = (*use.format.marks, *(reasoning.marks if reasoning else ()))
    lark = Lark(tokens_of(tokenizer, marks))
    calls = use.format.grammar(lark, use.tools, parallel=use.parallel)
    if reasoning is None:
        return lark.grammar(f"{calls} | @main")
    begun = begun_in(tokenizer, reasoning, prompt_ids)
    answer = f"{_head(lark, reasoning, begun)} @main"
    return lark.grammar(f"{thought(lark, reasoning, begun)} ({calls} | {answer})")


def _head(lark: Lark, reasoning: ReasoningFormat, begun: str) -> str:
    """Return what matches the header of the answer after the reasoning."""
    if not reasoning.harmony or reasoning.is_over(begun):
        return ""
    return lark.text("<|channel|>final<|message|>")
