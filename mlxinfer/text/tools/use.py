"""How one request uses tools: which ones, whether it must call one, its answer's grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...errors import InvalidRequestError, shown, wrong_value
from ..reasoning import ReasoningFormat, answer_begun
from ..tokenizer import Tokenizer
from .format import ToolFormat, ToolParser
from .known import require_template
from .lark import Lark
from .schema import Toolbox

Choice = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and the choice that the model has."""

    shown: Sequence[Mapping[str, Any]]  # the tools in OpenAI's form, as chat templates get them
    tools: Toolbox  # the same, checked
    format: ToolFormat  # how the model writes calls
    must_call: bool = False  # the answer has to be a call, of the tool `only` if that is given
    only: str | None = None
    parallel: bool = True  # an answer may have several calls; otherwise the first one ends it

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
            format: found by `detect_tools`, or named by the user.
            choice: "auto" (also None), "none" (the tools are not even in the prompt), "required",
                or {"type": "function", "function": {"name": ...}}.
        """
        if not isinstance(tools, (Sequence, NoneType)):  # an iterator could be read only once
            raise wrong_value("tools", tools, "a list of tools")
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
        return [
            (f"tools[{place}].function.parameters", tool.parameters)
            for place, tool in enumerate(self.tools)
        ]

    def parser(self) -> ToolParser:
        return ToolParser(self.format, self.tools, must_call=self.must_call)

    def grammar(
        self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None, prompt_ids: Sequence[int]
    ) -> str | None:
        """Return the Lark grammar of the answer, None where it may be any text.

        A required call keeps to the schema of its tool. Optional calls do so if a tool is `strict`,
        if the model marks its calls by tokens.
        """
        grammar = AnswerGrammar(tokenizer, reasoning, prompt_ids, self)
        if self.must_call:
            return grammar.forced()
        return grammar.offered() if any(tool.strict for tool in self.tools) else None


def _read_choice(choice: Choice | None, tools: Toolbox) -> tuple[bool, str | None]:
    if choice is None or choice in ("auto", "none"):
        return False, None
    only = None
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        only = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(only, str):
        known = """'auto', 'none', 'required' or {"type": "function", "function": {"name": ...}}"""
        raise wrong_value("tool_choice", choice, known)
    if not len(tools):
        raise InvalidRequestError(
            "tool_choice demands a call, but there are no tools.", param="tools"
        )
    if only is not None and only not in tools:
        raise InvalidRequestError(
            f"tool_choice names {shown(only)}, which is none of the tools.", param="tool_choice"
        )
    return True, only


class AnswerGrammar:
    """Writes the Lark grammar (llguidance) of one answer, by one of its public methods.

    Args:
        tokenizer: its control tokens mark calls and reasoning.
        reasoning: how the model reasons, which it may do before it answers; None: it does not.
        use: the tools of the request; None: it has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        prompt_ids: Sequence[int],
        use: ToolUse | None = None,
    ) -> None:
        self._reasoning, self._use, self._prefix = reasoning, use, ""
        if reasoning:
            self._reasoning, self._prefix = answer_begun(tokenizer, reasoning, prompt_ids)
        marks = [*(use.format.marks if use else ()), *(reasoning.marks if reasoning else ())]
        # control tokens, and added tokens that are parts of marks
        self._lark = Lark(
            {
                token.content: token_id
                for token_id, token in tokenizer.added_tokens.items()
                if token.special or any(token.content in mark for mark in marks)
            }
        )

    def forced(self) -> str:
        return self._lark.grammar(f"{self._thought()} {self._calls()}".strip())

    def offered(self) -> str | None:
        """Return the grammar of any text, in which calls, if there are any, keep to the schemas.

        None where the mark that begins a call is no token: a grammar cannot distinguish text from
        a call there. None too where the prompt has begun the answer in its own channel, which holds
        no calls.
        """
        assert self._use is not None
        lark, format = self._lark, self._use.format
        if not format.begins or not lark.is_token(format.begins[0]) or self._is_over:
            return None
        before, calls = self._thought(), self._calls()
        text = lark.rule("/(?s:.+)/")
        if self._reasoning is not None and self._reasoning.harmony:
            channels = self._reasoning.channels
            said = f"{lark.text(channels.preamble)} {lark.free_text(channels.ends[0])}"
            preamble = f"({said} {lark.text('<|start|>assistant')})?"
            return lark.grammar(f"{before} {preamble} ({calls} | {self._header()} ({text})?)")
        return lark.grammar(f"{before} ({text})? ({calls} ({text})?)?".strip())

    def main(self) -> str:
        return self._lark.grammar(f"{self._thought()} {self._header()} @main".strip())

    def calls_or_main(self) -> str:
        """Return the grammar of calls, or of what @main allows, optionally after reasoning."""
        calls, before = self._calls(), self._thought()
        return self._lark.grammar(f"{before} ({calls} | {self._header()} @main)".strip())

    @property
    def _is_over(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_over(self._prefix)

    def _calls(self) -> str:
        assert self._use is not None
        use, only = self._use, self._use.only
        tools = Toolbox([tool for tool in use.tools if only in (None, tool.name)])
        return use.format.grammar(self._lark, tools, parallel=use.parallel and only is None)

    def _thought(self) -> str:
        """Return what matches the reasoning of the answer, as far as it is still to come."""
        lark, reasoning = self._lark, self._reasoning
        if reasoning is None or reasoning.recipient or self._is_over:
            return ""
        if reasoning.is_closed(self._prefix):
            return ""
        if reasoning.harmony:
            head = lark.text(reasoning.channels.thought)
            end = reasoning.channels.ends[0]
            rest = f"{lark.free_text(end)} {lark.text('<|start|>assistant')}"
        else:
            head = lark.text(reasoning.start)
            space = lark.rule(r"/\s*/")
            rest = f"{lark.free_text(reasoning.end)} {space}"
        return rest if reasoning.is_open(self._prefix) else f"({head} {rest})?"

    def _header(self) -> str:
        if self._reasoning is None or self._is_over:
            return ""
        final = self._reasoning.channels.final if self._reasoning.harmony else ""
        final = self._reasoning.answer[0] if self._reasoning.blocks else final
        header = self._reasoning.recipient or final
        return self._lark.text(header) if header else ""
