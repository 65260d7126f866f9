"""How one request uses tools: which, whether it must, how they are found. Knows no engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...errors import InvalidRequestError, shown
from ..reasoning import ReasoningFormat
from ..tokenizer import Tokenizer
from .detect import require_tools
from .forced import forced_grammar, offered_grammar
from .format import ToolFormat
from .parser import ToolParser
from .schema import Toolbox

Choice = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and the choice that it leaves to the model.

    Attributes:
        shown: the tools as chat templates get them.
        tools: the same, checked.
        format: how the model writes calls.
        must_call: the answer has to be a call; `only`, if given, names the tool.
        parallel: whether an answer may have several calls; otherwise the first one ends it.
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
        format: ToolFormat | None,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Choice | None = None,
        *,
        parallel: bool = True,
    ) -> "ToolUse | None":
        """From what a request says; None where nothing is to be called.

        Args:
            tokenizer: of the model; its chat template must know tools.
            format: as `detect_tools` has found, or as somebody has said.
            tools: in OpenAI's form.
            choice: "auto" (also None), "none" (the model does not even see the tools), "required",
                or {"type": "function", "function": {"name": ...}}.
            parallel: whether several calls may be made.

        Raises:
            InvalidRequestError: a tool or the choice is wrong.
            TemplateError: the model's template knows no tools.
        """
        if not isinstance(tools, (Sequence, NoneType)):  # an iterator could be read only once
            raise InvalidRequestError(
                f"tools is {shown(tools)}; expected a list of tools.", param="tools"
            )
        toolbox = Toolbox.of(tools or ())
        must_call, only = _read_choice(choice, toolbox)
        if choice == "none" or not tools:
            return None
        known = require_tools(tokenizer, format)
        as_openai = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        return cls(as_openai, toolbox, known, must_call, only, parallel)

    @property
    def schemas(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Where in a request the schemas of its tools stand, and these."""
        return [
            (f"tools[{place}].function.parameters", tool.parameters)
            for place, tool in enumerate(self.tools)
        ]

    def parser(self) -> ToolParser:
        """Return what finds the calls of one answer."""
        return ToolParser(self.format, self.tools)

    def grammar(
        self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None, prompt_ids: Sequence[int]
    ) -> str | None:
        """Return the Lark grammar of the answer, None where it may be any.

        A call that has to be made keeps to the schema of its tool. So do others if a tool is
        `strict`, as far as the model marks its calls by tokens of their own.
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
    """Return whether a call must be made, and of which tool."""
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
