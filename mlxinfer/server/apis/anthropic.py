"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import FinishReason
from ...errors import InvalidRequestError, MlxinferError, PromptTooLongError
from ...outputs import (
    CallStatus,
    Part,
    ReasoningPart,
    Result,
    TextPart,
    ToolCall,
    ToolCallDelta,
    merged,
)
from ...session.answers import Answer, Answers, AnswerStep
from ...session.inputs import ChatInput
from ..call import Call
from ..http import ErrorForm, Events, Plain, clipped_message, encode, named
from ..slots import ServedModel
from .anthropic_blocks import (
    AnthropicMessage,
    AnthropicTool,
    ContentBlock,
    conversation,
    openai_tools,
    pdfs,
)
from .documents import read_pdfs
from .sampling import (
    MAX_STOPS,
    REFUSED_ELSEWHERE,
    SamplerFields,
    StopString,
    read_form,
    sampling_params,
)
from .tools import begun_object, check_tools, skip
from .usage import reuse_details

PING = named("ping", {"type": "ping"})


# -- the request --------------------------------------------------------------------------------


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool is used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether the model may reason before it answers.

    The switch has no effect on templates without one. The budget holds for every template: the
    reasoning is closed after that number of tokens.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None


class CountRequest(SamplerFields, kw_only=True):
    """A conversation, for its tokens to be counted."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED_ELSEWHERE,
        "mcp_servers": ([],),
        "container": (),
    }

    messages: Annotated[list[AnthropicMessage], Meta(max_length=100_000)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Any = None  # of older clients: output_config.format
    context_management: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountRequest.refused,
        "speed": ("standard",),
        "diagnostics": (),
        "stop": ([],),
        "n": (1,),
        "logprobs": (False,),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
    }

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are shown; otherwise their blocks are empty."""
        return self.thinking is None or self.thinking.display != "omitted"

    def resolve(self) -> None:
        """Raise InvalidRequestError for a budget of thinking that leaves the answer nothing."""
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            if budget is not None and budget >= self.max_tokens:  # some clients send none
                raise InvalidRequestError.of(
                    "thinking.budget_tokens",
                    f"is {budget}; expected a number below max_tokens, {self.max_tokens}.",
                )


def _keeps_all(management: Any) -> bool:
    edits = management.get("edits", []) if isinstance(management, dict) else None
    return management is None or (
        isinstance(edits, list)
        and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
    )


def read(body: CountRequest, skipped: list[str], **fields: Any) -> ChatInput:
    """The conversation of a request. Takes a while."""
    effort = body.output_config.effort if body.output_config else None
    variables: Plain = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    choice = body.tool_choice
    tools = openai_tools(body.tools, skipped)
    check_tools(tools)
    if not _keeps_all(body.context_management):
        skip(skipped, "context_management", "edits")
    return ChatInput(
        messages=conversation(body.system, body.messages, skipped),
        tools=tools,
        tool_choice=_openai_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        template_variables=variables,
        ignores_unread=True,
        reasoning_effort=effort,
        continues=_continues_last(body.messages),
        cache_salt=body.cache_salt,
        id_slot=body.id_slot,
        **fields,
    )


def read_messages(body: MessagesRequest, model: ServedModel, skipped: list[str]) -> ChatInput:
    form, where = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        form, where = body.output_config.format, "output_config.format"
    return read(
        body,
        skipped,
        constraint=None if form is None else read_form(form, where),
        params=sampling_params(
            body,
            model,
            max_tokens=body.max_tokens,
            max_reasoning_tokens=body.thinking.budget_tokens if body.thinking else None,
            stop=tuple(body.stop_sequences or ()),
        ),
    )


def _continues_last(messages: Sequence[AnthropicMessage]) -> bool:
    """Whether the answer continues the last message, the assistant's (a prefill)."""
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    if isinstance(last.content, list) and any(b.type == "tool_use" for b in last.content):
        raise InvalidRequestError(
            "The last message calls a tool; its tool_result has to follow.", param="messages"
        )
    return True


def _openai_choice(choice: ToolChoice | None) -> str | Plain:
    if choice is None:
        return "auto"
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise InvalidRequestError.of("tool_choice.name", "is missing.")
    return {"type": "function", "function": {"name": choice.name}}


# -- the answer ---------------------------------------------------------------------------------


async def messages(call: Call, body: MessagesRequest) -> Plain | Events:
    """Answer a conversation (Anthropic's API)."""
    model = await call.model(body.model)
    call.require_place()
    skipped = await read_pdfs(call, pdfs(body.system, body.messages))
    answers = await call.start(model, lambda: [read_messages(body, model, skipped)])
    call.report_skipped(skipped)
    writer = MessageWriter(call, body, model, answers)
    return Events(writer.frames()) if body.stream else await writer.whole()


async def count_tokens(call: Call, body: CountRequest) -> Plain:
    """Count the tokens of a conversation (Anthropic's API)."""
    model = await call.model(body.model)
    await read_pdfs(call, pdfs(body.system, body.messages))
    return {"input_tokens": len(await call.encode(model, lambda: read(body, [])))}


@dataclass(slots=True)
class MessageWriter:
    """Writes the answer to one request: whole, or as events of blocks, one block open at a time."""

    _call: Call
    _body: MessagesRequest
    _model: ServedModel
    _answers: Answers
    _index: int = -1
    _open: str | None = None  # the type of the open block

    async def whole(self) -> Plain:
        parts: list[Part] = []
        async for steps in self._answers:
            for step in steps:
                parts += step.delta.parts
        content = self.blocks(merged(parts), self._result.tool_calls)
        return self._message(content, self._usage, **self._ending())

    def _message(
        self,
        content: list[Plain],
        usage: Plain,
        *,
        stop_reason: str | None = None,
        stop_sequence: str | None = None,
    ) -> Plain:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def blocks(self, parts: Sequence[Part], calls: Sequence[ToolCall]) -> list[Plain]:
        """The content of a complete answer, in the order in which it came; the rest is text."""
        complete = {call.id: call for call in calls}
        blocks: list[Plain] = []
        for part in parts:
            if isinstance(part, TextPart):
                blocks.append({"type": "text", "text": part.text})
            elif isinstance(part, ReasoningPart):
                shown = part.text if self._body.shows_thinking else ""
                signature = self._call.id  # never checked
                blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
            elif part.id in complete:
                call = complete[part.id]
                named_call = {"type": "tool_use", "id": call.id, "name": call.name}
                blocks.append({**named_call, "input": begun_object(call.arguments)})
        return blocks

    async def frames(self) -> AsyncIterator[bytes]:
        begun = self._message([], usage_of(len(self._answer.request.prompt_ids)))
        yield named("message_start", {"type": "message_start", "message": begun}) + PING
        async for frames in self._call.frames(self._answers, self.step_frames, lambda: PING):
            yield frames
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage}
        stop = named("message_stop", {"type": "message_stop"})
        yield b"".join(self.close()) + named("message_delta", last) + stop

    def step_frames(self, step: AnswerStep) -> Iterator[bytes]:
        for part in step.delta.parts:
            if isinstance(part, TextPart):
                yield from self._within("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})
            elif isinstance(part, ReasoningPart):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._within("thinking", empty)
                if self._body.shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._tool_use(part)

    def close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._call.id})
        self._open = None
        yield named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _tool_use(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None:
            yield from self.close()
            block: Plain = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._within("tool_use", block)
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.status is not CallStatus.OPEN:
            yield from self.close()

    def _within(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """The events that lead into a block of this kind."""
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named("content_block_delta", event)

    @property
    def _answer(self) -> Answer:
        return self._answers.answers[0]

    @property
    def _result(self) -> Result:
        assert self._answer.result is not None
        return self._answer.result

    @property
    def _usage(self) -> Plain:
        result = self._result
        return {
            **usage_of(result.prompt_tokens, result.cached_tokens, len(result.token_ids)),
            **reuse_details(self._call.reuse, self._body.return_cached_tokens_details),
        }

    def _ending(self) -> dict[str, Any]:
        clipped = (self._answer.request.params.max_tokens or 0) < self._body.max_tokens
        match = self._answer.stop_match
        reason = stop_reason(self._result, stopped=match is not None, clipped=clipped)
        return {"stop_reason": reason, "stop_sequence": match}


def usage_of(prompt: int, cached: int = 0, answer: int = 0) -> Plain:
    """Token counts; input_tokens are those not read from the cache."""
    return {
        "input_tokens": prompt - cached,
        "output_tokens": answer,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def stop_reason(result: Result, *, stopped: bool, clipped: bool) -> str:
    """Why an answer ended: by a stop string; or the context had less room than max_tokens, ...."""
    if result.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if stopped:
        return "stop_sequence"
    return "tool_use" if result.tool_calls else "end_turn"


# -- errors -------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: MlxinferError) -> dict[str, object]:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, fallback)
    message = clipped_message(error)
    if isinstance(error, PromptTooLongError):  # agents read both numbers from these words
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = ErrorForm(
    body=lambda error: encode(anthropic_error(error)),
    event=lambda error: named("error", anthropic_error(error)),
    id_headers=(b"request-id",),
)
