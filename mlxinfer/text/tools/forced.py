"""The grammar under which a model must call tools. Knows formats; compiles nothing."""

from collections.abc import Sequence

from ...errors import InvalidRequestError
from ..reasoning import ReasoningFormat
from ..tokenizer import Tokenizer
from .format import ToolFormat
from .lark import Lark
from .schema import Toolbox


def forced_grammar(
    tokenizer: Tokenizer,
    format: ToolFormat,
    tools: Toolbox,
    *,
    only: str | None = None,
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    prompt_ids: Sequence[int] = (),
) -> str:
    """Return a Lark grammar (llguidance) of answers that are calls, perhaps after reasoning.

    Args:
        tokenizer: whose control tokens the calls are written with.
        format: how the model writes calls.
        tools: what may be called, with their schemas.
        only: the one tool that must be called; None: any.
        parallel: more than one call may be made.
        reasoning: how the model reasons; it may do so before it calls.
        prompt_ids: to see whether the prompt has opened the reasoning already.

    Raises:
        InvalidRequestError: there is no tool called `only`, or no tool at all.
    """
    chosen = [tool for tool in tools if only in (None, tool.name)]
    if not chosen:
        what = "there are no tools" if only is None else f"no tool is called {only!r}"
        raise InvalidRequestError(f"tool_choice demands a call, but {what}.", param="tool_choice")
    marks = (*format.marks, *(reasoning.marks if reasoning else ()))
    lark = Lark(_tokens_of(tokenizer, marks))
    thought = ""
    if reasoning is not None:
        tail = tokenizer.decode(prompt_ids[-64:], skip_special_tokens=False)
        thought = _thought(lark, reasoning, tail)
    calls = format.grammar(lark, Toolbox(chosen), parallel=parallel and only is None)
    return lark.grammar(f"{thought} {calls}".strip())


def _tokens_of(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Return the control tokens, and others that were added for (parts of) these marks."""
    return {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens.items()
        if token.special or any(token.content in mark for mark in marks)
    }


def _thought(lark: Lark, reasoning: ReasoningFormat, tail: str) -> str:
    """Return what matches the reasoning before the calls."""
    space = lark.rule(r"/\s*/")
    if reasoning.harmony:
        body = lark.free_text("<|end|>")
        head = lark.text("<|channel|>analysis<|message|>")
        return f"({head} {body} {lark.text('<|start|>assistant')})?"
    body = lark.free_text(reasoning.end)
    if tail.rstrip().endswith(reasoning.start):
        return f"{body} {space}"
    return f"({lark.text(reasoning.start)} {body} {space})?"
