"""The grammar under which a model must call tools. Knows formats; compiles nothing."""

from collections.abc import Sequence

from ...errors import InvalidRequestError
from ..begun import begun_in
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
    lark = _lark_for(tokenizer, format, reasoning)
    before = thought(lark, reasoning, begun_in(tokenizer, reasoning, prompt_ids))
    calls = format.grammar(lark, Toolbox(chosen), parallel=parallel and only is None)
    return lark.grammar(f"{before} {calls}".strip())


def offered_grammar(
    tokenizer: Tokenizer,
    format: ToolFormat,
    tools: Toolbox,
    *,
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    prompt_ids: Sequence[int] = (),
) -> str | None:
    """Return a Lark grammar of any text, in which calls, if there are any, keep to the schemas.

    None where the mark that begins a call is no token of its own: then a grammar cannot tell where
    text ends and a call begins. Neither is there one within an answer that the prompt has begun in
    its own channel, where no call can be.

    Args: as of forced_grammar.
    """
    lark = _lark_for(tokenizer, format, reasoning)
    if format.bare or not lark.is_token(format.begins[0]):
        return None
    begun = begun_in(tokenizer, reasoning, prompt_ids)
    if reasoning is not None and reasoning.is_over(begun):
        return None
    before = thought(lark, reasoning, begun)
    calls = format.grammar(lark, tools, parallel=parallel)
    text = lark.rule("/(?s:.+)/")
    if reasoning is not None and reasoning.harmony:
        said = f"{lark.text('<|channel|>commentary<|message|>')} {lark.free_text('<|end|>')}"
        preamble = f"({said} {lark.text('<|start|>assistant')})?"
        answer = f"{lark.text('<|channel|>final<|message|>')} ({text})?"
        return lark.grammar(f"{before} {preamble} ({calls} | {answer})")
    return lark.grammar(f"{before} ({text})? ({calls} ({text})?)?".strip())


def _lark_for(tokenizer: Tokenizer, format: ToolFormat, reasoning: ReasoningFormat | None) -> Lark:
    return Lark(tokens_of(tokenizer, (*format.marks, *(reasoning.marks if reasoning else ()))))


def tokens_of(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Return the control tokens, and others that were added for (parts of) these marks."""
    return {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens.items()
        if token.special or any(token.content in mark for mark in marks)
    }


def thought(lark: Lark, reasoning: ReasoningFormat | None, begun: str) -> str:
    """Return what matches the reasoning of an answer that the prompt has begun so, see begun_in."""
    if reasoning is None or reasoning.is_over(begun):
        return ""
    if reasoning.harmony:
        head = lark.text("<|channel|>analysis<|message|>")
        rest = f"{lark.free_text('<|end|>')} {lark.text('<|start|>assistant')}"
    else:
        head = lark.text(reasoning.start)
        space = lark.rule(r"/\s*/")
        rest = f"{lark.free_text(reasoning.end)} {space}"
    return rest if reasoning.is_open(begun) else f"({head} {rest})?"
