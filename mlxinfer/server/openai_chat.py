"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..core import MAX_LOGPROBS
from ..errors import InvalidRequestError
from ..results import Result
from . import sse
from .call import Call
from .chat_messages import Message
from .chat_prompt import encode_conversation
from .chat_template import Effort
from .constraints import constraint
from .context import check_room
from .endpoint import Endpoint
from .generation import Generation, Step
from .guidance import start_grammars
from .openai_logprobs import ChoiceLogprobs, chat_logprobs, chat_logprobs_of
from .openai_types import Usage, usage_log, usage_of
from .refused import refuse
from .replies import Events, Reply, json_body
from .sampling import sampling_params
from .served import ServedModel
from .tool_calls import (
    ChatToolCall,
    ToolCallPiece,
    ToolFields,
    chat_finish_reason,
    chat_tool_calls,
    chat_tool_pieces,
    refuse_old_tools,
    tool_use,
)

Positive = Annotated[int, Meta(ge=1)]


class ChatRequest(ToolFields, kw_only=True):
    """A conversation to go on with."""

    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
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


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer."""

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


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The choice that a chunk goes on with."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


async def chat(call: Call, body: ChatRequest) -> Reply:
    """Answer a conversation."""
    _refuse(body)
    model = await call.model(body.model)
    params = sampling_params(
        body,
        model.defaults,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=_num_logprobs(body),
    )
    asked = constraint(body)
    use = tool_use(model, body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    prompt_ids = await call.in_worker(
        encode_conversation,
        model,
        body.messages,
        body,
        allowed=call.service.config.template_kwargs,
        tools=None if use is None else use.shown,
    )
    check_room(model, len(prompt_ids), params[0].max_tokens, param="messages")
    grammars = await call.in_worker(
        start_grammars, model, asked, use, prompt_ids, len(params), reasons=True
    )
    answers = [
        model.answer(prompt_ids, choice, continues=False, use=use, grammar=grammar)
        for choice, grammar in zip(params, grammars, strict=True)
    ]
    generation = call.generate(model, answers)
    if body.stream:
        return Events(_events(call, body, generation))
    results = await generation.results()
    return json_body(_completion(call, generation, results))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat,
        summary="Answer a conversation.",
        body=ChatRequest,
        answer=ChatCompletion,
    ),
)


def _refuse(body: ChatRequest) -> None:
    body.refuse()
    refuse_old_tools(body)
    refuse("modalities", body.modalities, (["text"],))
    refuse("audio", body.audio)
    refuse("web_search_options", body.web_search_options)
    refuse("echo", body.echo, (False,))


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs goes with logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _completion(call: Call, generation: Generation, results: list[Result]) -> ChatCompletion:
    usage = usage_of(generation, choices_a_prompt=len(results))
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(
                content=None if result.tool_calls and not result.text else result.text,
                reasoning_content=UNSET if result.reasoning is None else result.reasoning,
                tool_calls=chat_tool_calls(result.tool_calls) or UNSET,
            ),
            logprobs=chat_logprobs_of(generation.model, generation.answers[index]),
            finish_reason=chat_finish_reason(result),
        )
        for index, result in enumerate(results)
    ]
    call.log.update(usage_log(usage, [choice.finish_reason for choice in choices]))
    return ChatCompletion(
        id=f"chatcmpl-{call.id}",
        created=call.created_s,
        model=generation.model.name,
        choices=choices,
        usage=usage,
    )


async def _events(call: Call, body: ChatRequest, generation: Generation) -> AsyncIterator[bytes]:
    """Role first, then what comes, then the counts where asked for, then [DONE]."""
    model = generation.model
    usage = None if body.wants_usage else UNSET

    def frame(index: int, delta: ChatDelta, **rest: Any) -> bytes:
        choice = ChunkChoice(index=index, delta=delta, **rest)
        return sse.data(chunk(choices=[choice], usage=usage))

    def chunk(**rest: Any) -> ChatChunk:
        return ChatChunk(id=f"chatcmpl-{call.id}", created=call.created_s, model=model.name, **rest)

    count = len(generation.answers)
    yield b"".join(frame(i, ChatDelta(role="assistant", content="")) for i in range(count))
    async for steps in generation.steps():
        frames = [frame(step.index, **fields) for step in steps for fields in _deltas(model, step)]
        if frames or not steps:
            yield b"".join(frames) or sse.KEEP_ALIVE
    counts = usage_of(generation, choices_a_prompt=count)
    reasons = [chat_finish_reason(a.result) for a in generation.answers if a.result is not None]
    call.log.update(usage_log(counts, reasons), stream=True)
    if body.wants_usage:
        yield sse.data(chunk(choices=[], usage=counts))
    yield sse.DONE


def _deltas(model: ServedModel, step: Step) -> list[dict[str, Any]]:
    """What a step becomes: nothing where its text is held back, two chunks where it ends."""
    delta = step.delta
    logprobs = chat_logprobs(model, step.event)
    calls = chat_tool_pieces(delta.tool_calls)
    found: list[dict[str, Any]] = []
    if delta.text or delta.reasoning or calls or logprobs is not None:
        fields = ChatDelta()
        if delta.reasoning:
            fields.reasoning_content = delta.reasoning
        if calls:
            fields.tool_calls = calls
        if delta.text or not (delta.reasoning or calls):
            fields.content = delta.text
        found.append({"delta": fields, "logprobs": logprobs})
    if delta.result is not None:
        reason = chat_finish_reason(delta.result)
        found.append({"delta": ChatDelta(), "finish_reason": reason})
    return found
