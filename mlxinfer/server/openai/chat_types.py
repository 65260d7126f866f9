"""Requests, answers and stream events of chat completions, as OpenAI writes them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import MAX_LOGPROBS, FinishReason
from ...errors import InvalidRequestError
from ...outputs import Result
from ..fields.checks import agreed, refuse
from ..fields.grammar import ConstraintFields
from ..fields.prompt import Effort
from ..fields.sampling import UNLIMITED, ReasoningLimit, TokenLimit
from .chat_calls import ChatToolCall, ToolCallPiece
from .chat_prompt import Message
from .logprobs import ChoiceLogprobs
from .types import PromptProgress, Timings, Usage, finish_reason


class ToolFields(ConstraintFields, kw_only=True):
    """Tool fields of chat requests.

    A call that tool_choice demands always conforms to its tool's schema. So does a call that the
    model chooses to make, if a tool is `strict` and the model marks calls by special tokens, as
    nearly all do; for calls in plain text (Llama 3) `strict` has no effect. An answer has at most
    32 calls under such a grammar (`text/tools/lark.py`), or one if parallel_tool_calls is false, so
    that it ends whatever the model does.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None


def refuse_old_tools(fields: ToolFields) -> None:
    """Raise UnsupportedFieldError for `functions`, which tools have replaced."""
    refuse("functions", fields.functions, ([],))
    refuse("function_call", fields.function_call, ("none", "auto"))


def chat_finish_reason(result: Result) -> str:
    """OpenAI's finish reason: `tool_calls` for an answer that ended with calls."""
    if result.tool_calls and result.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return finish_reason(result.finish_reason)


_BUDGETS = ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """The switch of DeepSeek's and GLM's APIs, and Anthropic's budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ReasoningLimit | None = None


class ReasoningSwitch(msgspec.Struct, kw_only=True):
    """The switch of OpenRouter's API."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: ReasoningLimit | None = None
    exclude: Any = None


class ChatRequest(ToolFields, kw_only=True):
    """A conversation to be answered."""

    messages: list[Message]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    echo: Any = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningSwitch | None = None
    reasoning_budget: Annotated[int, Meta(ge=-1)] | None = None  # of llama.cpp; -1: no limit
    thinking_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None  # llama.cpp's too
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None  # of vLLM

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer; None: until the context is full.

        Raises:
            InvalidRequestError: it is 0.
        """
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        given: int | None = getattr(self, name)
        if given == 0:
            raise InvalidRequestError(f"{name} is 0; expected 1 or more.", param=name)
        return None if given == UNLIMITED else given

    @property
    def reasoning_limit(self) -> int | None:
        """The most tokens of reasoning, under whichever name; None: no limit.

        Raises:
            InvalidRequestError: two names with different limits.
        """
        given = {name: getattr(self, name) for name in _BUDGETS}
        if isinstance(self.thinking, ThinkingSwitch):
            given["thinking.budget_tokens"] = self.thinking.budget_tokens
        if self.reasoning is not None:
            given["reasoning.max_tokens"] = self.reasoning.max_tokens
        return agreed({name: limit for name, limit in given.items() if limit and limit > 0})

    def prepare(self) -> None:
        """Resolve fields of other servers; raise UnsupportedFieldError for unsupported ones."""
        super().prepare()
        self._resolve_thinking()

    def _resolve_thinking(self) -> None:
        """Give other servers' switches of reasoning to the chat template.

        Raises:
            InvalidRequestError: two fields that contradict each other.
        """
        wishes: list[tuple[str, bool | None]] = [("enable_thinking", self.enable_thinking)]
        thinking = self.thinking
        if isinstance(thinking, ThinkingSwitch):
            thinking = thinking.type != "disabled"
        wishes.append(("thinking", thinking))
        efforts = {"reasoning_effort": self.reasoning_effort}
        efforts["think"] = None if isinstance(self.think, bool) else self.think
        wishes.append(("think", self.think if isinstance(self.think, bool) else None))
        if self.reasoning is not None:
            refuse("reasoning.exclude", self.reasoning.exclude, (False,))
            efforts["reasoning.effort"] = self.reasoning.effort
            wishes.append(("reasoning.enabled", self.reasoning.enabled))
        wishes += [(name, False) for name in _BUDGETS if getattr(self, name) == 0]
        self.reasoning_effort = agreed(efforts)
        for name, enabled in wishes:
            if enabled is None:
                continue
            kwargs = self.chat_template_kwargs = dict(self.chat_template_kwargs or {})
            if kwargs.setdefault("enable_thinking", enabled) is not enabled:
                raise InvalidRequestError(
                    f"{name} contradicts another field that switches reasoning.", param=name
                )


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str
    timings: Timings | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # of the answer, its end token included


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET  # of the first choice, where llama.cpp has them


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The choice that a chunk continues."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    timings: Timings | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET  # of the choice that ends with this event
