"""What the answers of one model must look like: requests to grammars. Knows text; no engine."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from ..text import ReasoningFormat, Tokenizer, ToolUse
from ..text.tools.reasoned import after_reasoning
from .compiler import GrammarCompiler
from .formats import response_format
from .spec import GrammarSpec, tool_calls

if TYPE_CHECKING:
    from .compiled import TokenGrammar


class Guidance:
    """Makes grammars for requests to one model. Cheap until the first one comes; safe in threads.

    Args:
        tokenizer: of the model.
        reasoning: how it reasons, which a grammar leaves it before the answer proper.
        vocab_size: of the model.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self.compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, end_ids=end_ids)

    def plan(
        self, prompt_ids: Sequence[int], format: Any = None, use: ToolUse | None = None
    ) -> GrammarSpec | None:
        """What rules the answer to a prompt, None where any text will do. Compiles nothing.

        Args:
            prompt_ids: to see whether the prompt has opened the reasoning already.
            format: a request's response_format.
            use: its tools.

        Raises:
            InvalidRequestError: no such response_format, a schema is too large, or a request wants
                both a form and tools.
        """
        spec = response_format(format)
        if spec is not None and use is not None:
            raise InvalidRequestError(
                "response_format and tools do not go together here: leave one out, or set "
                "tool_choice to 'none'.",
                param="response_format",
            )
        if spec is not None:
            return self.after_reasoning(spec, prompt_ids)
        return None if use is None else self.forced(use, prompt_ids)

    def forced(self, use: ToolUse, prompt_ids: Sequence[int]) -> GrammarSpec | None:
        """The grammar of calls that must be made, None where the model has the choice."""
        lark = use.grammar(self._tokenizer, self._reasoning, prompt_ids)
        if lark is None:
            return None
        schemas = (
            (f"tools[{number}].function.parameters", tool.parameters)
            for number, tool in enumerate(use.tools)
        )
        return tool_calls(lark, schemas)

    def after_reasoning(self, spec: GrammarSpec, prompt_ids: Sequence[int]) -> GrammarSpec:
        """The same, where the model may reason first, if it does at all."""
        if self._reasoning is None:
            return spec
        before = after_reasoning(self._tokenizer, self._reasoning, prompt_ids)
        return replace(spec, before=before)

    def start(self, spec: GrammarSpec) -> "TokenGrammar":
        """The grammar of one request. New ones take milliseconds to seconds: not for event loops.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or not within the limits.
            UnsupportedModelError: the model's tokenizer has no end token.
            OverloadedError: too many grammars at once.
        """
        return self.compiler.start(spec)

    def close(self) -> None:
        """End the process that tries grammars out."""
        self.compiler.close()
