"""How one request uses tools: which ones, whether it must call one, its answer's grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...errors import InvalidRequestError, shown
from ..reasoning import ReasoningFormat, answer_prefix
from ..tokenizer import Tokenizer
from .format import ToolFormat, ToolParser
from .known import require_template
from .lark import Lark
from .schema import Toolbox

Choice = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and the choice that the model has.

    Attributes:
        shown: the tools in OpenAI's form, as chat templates get them.
        tools: the same, checked.
        format: how the model writes calls.
        must_call: the answer has to be a call, of the tool `only` if that is given.
        parallel: an answer may have several calls; otherwise the first one ends it.
    """

    shown: Sequence[Mapping[str, Any]]
    tools: Toolbox
    format: ToolFormat
    must_call: bool = False
    only: str | None = None
    parallel: bool = True

    @classmethod
    def plan(
        cls,
        tokenizer: Tokenizer,
        format: ToolFormat,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Choice | None = None,
        *,
        parallel: bool = True,
    ) -> "ToolUse | None":
        """Return how a request uses its tools; None where it has none, or the choice is "none".

        Args:
            tokenizer: of the model, which needs a chat template.
            format: found by `detect_tools`, or named by the user.
            tools: in OpenAI's form.
            choice: "auto" (also None), "none" (the tools are not even in the prompt), "required",
                or {"type": "function", "function": {"name": ...}}.
            parallel: several calls may be made.

        Raises:
            InvalidRequestError: a tool or the choice is invalid.
            TemplateError: the model has no template, or one that cannot ask for this format.
        """
        if not isinstance(tools, (Sequence, NoneType)):  # an iterator could be read only once
            raise InvalidRequestError(
                f"tools is {shown(tools)}; expected a list of tools.", param="tools"
            )
        if not tools and choice in (None, "auto", "none"):
            return None
        toolbox = Toolbox.of(tools or ())
        must_call, only = _read_choice(choice, toolbox)
        if choice == "none" or not tools:
            return None
        require_template(tokenizer.template, format)
        as_openai = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        return cls(as_openai, toolbox, format, must_call, only, parallel)

    @property
    def schemas(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The place in the request and the schema of each tool's parameters."""
        return [
            (f"tools[{place}].function.parameters", tool.parameters)
            for place, tool in enumerate(self.tools)
        ]

    def parser(self) -> ToolParser:
        """Return a parser that finds the calls of one answer."""
        return ToolParser(self.format, self.tools, must_call=self.must_call)

    def grammar(
        self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None, prompt_ids: Sequence[int]
    ) -> str | None:
        """Return the Lark grammar of the answer, None where it may be any text.

        A required call keeps to the schema of its tool. Optional calls do so if a tool is `strict`,
        as far as the model marks its calls by tokens.
        """
        if not self.must_call:
            if not any(tool.strict for tool in self.tools):
                return None
            return offered_grammar(
                tokenizer,
                self.format,
                self.tools,
                parallel=self.parallel,
                reasoning=reasoning,
                prompt_ids=prompt_ids,
            )
        return forced_grammar(
            tokenizer,
            self.format,
            self.tools,
            only=self.only,
            parallel=self.parallel,
            reasoning=reasoning,
            prompt_ids=prompt_ids,
        )


def _read_choice(choice: Choice | None, tools: Toolbox) -> tuple[bool, str | None]:
    """Return whether a call is required, and of which tool."""
    if choice is None or choice in ("auto", "none"):
        return False, None
    only = None
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        only = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(only, str):
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)}; expected 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    if not len(tools):
        raise InvalidRequestError(
            "tool_choice demands a call, but there are no tools.", param="tools"
        )
    if only is not None and only not in tools:
        raise InvalidRequestError(
            f"tool_choice names {shown(only)}, which is none of the tools.", param="tool_choice"
        )
    return True, only


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
    """Return a Lark grammar (llguidance) of answers that are calls, optionally after reasoning.

    Args:
        tokenizer: its control tokens mark the calls.
        format: how the model writes calls.
        tools: the tools, with their schemas.
        only: the one tool that must be called; None: any.
        parallel: more than one call may be made.
        reasoning: how the model reasons, which it may do before it calls.
        prompt_ids: the prompt, which may have opened the reasoning.

    Raises:
        InvalidRequestError: there is no tool called `only`, or no tool at all.
    """
    chosen = [tool for tool in tools if only in (None, tool.name)]
    if not chosen:
        what = "there are no tools" if only is None else f"no tool is called {only!r}"
        raise InvalidRequestError(f"tool_choice demands a call, but {what}.", param="tool_choice")
    lark = _lark_for(tokenizer, reasoning, format)
    before = _reasoning_rule(lark, reasoning, answer_prefix(tokenizer, reasoning, prompt_ids))
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

    None where the mark that begins a call is no token: a grammar cannot distinguish text from a
    call there. None too where the prompt has begun the answer in its own channel, which holds no
    calls.

    Args: those of forced_grammar.
    """
    lark = _lark_for(tokenizer, reasoning, format)
    if format.bare or not lark.is_token(format.begins[0]):
        return None
    prefix = answer_prefix(tokenizer, reasoning, prompt_ids)
    if reasoning is not None and reasoning.is_over(prefix):
        return None
    before = _reasoning_rule(lark, reasoning, prefix)
    calls = format.grammar(lark, tools, parallel=parallel)
    text = lark.rule("/(?s:.+)/")
    if reasoning is not None and reasoning.harmony:
        said = f"{lark.text('<|channel|>commentary<|message|>')} {lark.free_text('<|end|>')}"
        preamble = f"({said} {lark.text('<|start|>assistant')})?"
        answer = f"{lark.text('<|channel|>final<|message|>')} ({text})?"
        return lark.grammar(f"{before} {preamble} ({calls} | {answer})")
    return lark.grammar(f"{before} ({text})? ({calls} ({text})?)?".strip())


def _lark_for(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, format: ToolFormat | None = None
) -> Lark:
    """Return a grammar that knows control tokens, and added tokens that are parts of marks."""
    marks = [mark for each in (format, reasoning) if each is not None for mark in each.marks]
    control = {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens.items()
        if token.special or any(token.content in mark for mark in marks)
    }
    return Lark(control)


def _reasoning_rule(lark: Lark, reasoning: ReasoningFormat | None, prefix: str) -> str:
    """Return what matches the reasoning of an answer with this prefix."""
    if reasoning is None or reasoning.is_over(prefix) or reasoning.is_closed(prefix):
        return ""
    if reasoning.harmony:
        head = lark.text("<|channel|>analysis<|message|>")
        rest = f"{lark.free_text('<|end|>')} {lark.text('<|start|>assistant')}"
    else:
        head = lark.text(reasoning.start)
        space = lark.rule(r"/\s*/")
        rest = f"{lark.free_text(reasoning.end)} {space}"
    return rest if reasoning.is_open(prefix) else f"({head} {rest})?"


def after_reasoning(
    tokenizer: Tokenizer, reasoning: ReasoningFormat, prompt_ids: Sequence[int]
) -> str:
    """Return a Lark grammar (llguidance) of what @main allows, optionally after reasoning.

    Args:
        tokenizer: its control tokens mark the reasoning.
        reasoning: how the model reasons.
        prompt_ids: the prompt, which may have opened the reasoning.
    """
    lark = _lark_for(tokenizer, reasoning)
    prefix = answer_prefix(tokenizer, reasoning, prompt_ids)
    before = f"{_reasoning_rule(lark, reasoning, prefix)} {_answer_header(lark, reasoning, prefix)}"
    return lark.grammar(f"{before} @main".strip())


def calls_or_answer(
    tokenizer: Tokenizer,
    use: ToolUse,
    reasoning: ReasoningFormat | None,
    prompt_ids: Sequence[int],
) -> str:
    """Return a Lark grammar (llguidance) of answers that call tools, or that @main allows.

    Args:
        tokenizer: its control tokens mark the calls.
        use: the tools.
        reasoning: how the model reasons, which it may do first.
        prompt_ids: the prompt, which may have opened the reasoning.
    """
    lark = _lark_for(tokenizer, reasoning, use.format)
    calls = use.format.grammar(lark, use.tools, parallel=use.parallel)
    if reasoning is None:
        return lark.grammar(f"{calls} | @main")
    prefix = answer_prefix(tokenizer, reasoning, prompt_ids)
    answer = f"{_answer_header(lark, reasoning, prefix)} @main"
    return lark.grammar(f"{_reasoning_rule(lark, reasoning, prefix)} ({calls} | {answer})")


def _answer_header(lark: Lark, reasoning: ReasoningFormat, prefix: str) -> str:
    """Return what matches the header of the answer after the reasoning."""
    if not reasoning.harmony or reasoning.is_over(prefix):
        return ""
    return lark.text("<|channel|>final<|message|>")
