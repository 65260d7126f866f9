"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypedDict

import msgspec

from ...core import FinishReason
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
from ...session.output_processor import OutputProcessor
from ...text import ToolUse
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.grammar import format_constraint, start_answers
from ..fields.prompt import check_messages, fitted, text_check
from ..fields.sampling import sampler_params
from ..fields.tools import Skipped, begun_object, tool_use
from ..http import sse
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .input import continues_last, conversation, openai_choice, openai_tools
from .types import (
    ANTHROPIC,
    AnthropicAnswer,
    AnthropicUsage,
    CountRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

PING = sse.named("ping", {"type": "ping"})


class Shown(TypedDict):
    """What is shown of an answer."""

    clipped: bool  # the context had less room than max_tokens
    thoughts: bool  # blocks of thinking show the reasoning


class TokenCount(msgspec.Struct, kw_only=True):
    """Length of a prompt."""

    input_tokens: int


async def messages(call: Call, body: MessagesRequest) -> Reply:
    """Answer a conversation."""
    body.prepare()
    model = await call.model(body.model)
    skipped = Skipped()
    answer = await call.in_worker(_start, model, body, skipped)
    if skipped:
        call.log["skipped"] = str(skipped)
    generation = call.generate(model, [answer])
    clipped = (answer.request.params.max_tokens or 0) < body.max_tokens
    shown: Shown = {"clipped": clipped, "thoughts": body.shows_thinking}
    if body.stream:
        return Events(_events(call, generation, **shown), headers=skipped.headers)
    reply = json_body(await _answer(call, generation, **shown))
    reply.headers += skipped.headers
    return reply


async def count_tokens(call: Call, body: CountRequest) -> Reply:
    """The number of tokens of a conversation with its tools and system prompt."""
    body.prepare()
    model = await call.model(body.model)
    return json_body(TokenCount(input_tokens=await call.in_worker(_num_tokens, model, body)))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=messages,
        summary="Answer a conversation (Anthropic's API).",
        body=MessagesRequest,
        answer=AnthropicAnswer,
        style=ANTHROPIC,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="Count the tokens of a conversation (Anthropic's API).",
        body=CountRequest,
        answer=TokenCount,
        style=ANTHROPIC,
    ),
)


def _start(model: ServedModel, body: MessagesRequest, skipped: Skipped) -> OutputProcessor:
    """The answer to be generated. Takes a while."""
    form = body.output_config.format if body.output_config else None
    asked = format_constraint(form, place="output_config.format")
    use = _tools(model, body, skipped)
    params = sampler_params(
        body,
        model,
        max_tokens=body.max_tokens,
        max_reasoning_tokens=body.thinking.budget_tokens if body.thinking else None,
        stop=tuple(body.stop_sequences or ()),
    )
    ids = _encode(model, body, use, skipped, bounded=True)
    fitting = fitted(model, [params], len(ids), param="messages")
    continues = continues_last(body.messages)
    (answer,) = start_answers(model, body, ids, fitting, asked, use, continues=continues)
    return answer


def _num_tokens(model: ServedModel, body: CountRequest) -> int:
    skipped = Skipped()
    return len(_encode(model, body, _tools(model, body, skipped), skipped, bounded=False))


def _tools(model: ServedModel, body: CountRequest, skipped: Skipped) -> ToolUse | None:
    choice = body.tool_choice
    parallel = not (choice and choice.disable_parallel_tool_use)
    return tool_use(
        model, openai_tools(body.tools, skipped), openai_choice(choice), parallel=parallel
    )


def _encode(
    model: ServedModel,
    body: CountRequest,
    use: ToolUse | None,
    skipped: Skipped,
    *,
    bounded: bool,
) -> list[int]:
    prefilled = continues_last(body.messages)
    plain = conversation(body, skipped)
    if bounded:
        check_messages(model, plain, param="messages")
    return model.builder.encode_chat(
        plain,
        text_check(model, param="messages") if bounded else None,
        tools=None if use is None else use.shown,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        **_template_kwargs(model, body),
    )


def _template_kwargs(model: ServedModel, body: CountRequest) -> dict[str, Any]:
    """Thinking and effort as variables of the template, if it reads them."""
    kwargs: dict[str, Any] = {}
    template = model.tokenizer.template
    if template is None:
        return kwargs
    if body.thinking is not None and template.reads("enable_thinking"):
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config else None
    if effort is not None and template.reads("reasoning_effort"):
        kwargs["reasoning_effort"] = effort
    return kwargs


async def _answer(
    call: Call, generation: Generation, *, clipped: bool, thoughts: bool
) -> AnthropicAnswer:
    parts: list[Part] = []
    async for steps in generation.steps():
        for step in steps:
            parts += step.delta.parts
    (answer,) = generation.answers
    result = answer.result
    assert result is not None
    found = _ending(call, generation, clipped=clipped)
    return AnthropicAnswer(
        id=f"msg_{call.id}",
        model=generation.model.name,
        content=blocks_of(merged(parts), result.tool_calls, signature=call.id, thoughts=thoughts),
        stop_reason=found["stop_reason"],
        stop_sequence=found["stop_sequence"],
        usage=usage_of_result(result),
    )


async def _events(
    call: Call, generation: Generation, *, clipped: bool, thoughts: bool
) -> AsyncIterator[bytes]:
    """Yield the events of the message: its start, its blocks, its end."""
    (answer,) = generation.answers
    begun = AnthropicAnswer(
        id=f"msg_{call.id}",
        model=generation.model.name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=AnthropicUsage(input_tokens=len(answer.request.prompt_ids), output_tokens=0),
    )
    start = {"type": "message_start", "message": begun}
    yield sse.named("message_start", start) + PING
    blocks = BlockEvents(signature=call.id, thoughts=thoughts)
    async for steps in generation.steps():
        frames = [frame for step in steps for frame in blocks.push(step.delta.parts)]
        if frames or not steps:
            yield b"".join(frames) or PING
    ending = _ending(call, generation, clipped=clipped)
    call.log["stream"] = True
    assert answer.result is not None
    usage = usage_of_result(answer.result)
    last = {"type": "message_delta", "delta": ending, "usage": usage}
    stop = sse.named("message_stop", {"type": "message_stop"})
    yield b"".join(blocks.close()) + sse.named("message_delta", last) + stop


def _ending(call: Call, generation: Generation, *, clipped: bool) -> dict[str, Any]:
    """Why the answer ended, which is logged too."""
    (answer,) = generation.answers
    result = answer.result
    assert result is not None
    reason = stop_reason(answer, result, clipped=clipped)
    call.log.update(
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        answer_tokens=len(result.token_ids),
        finish_reason=reason,
    )
    return {"stop_reason": reason, "stop_sequence": answer.stop_match}


def blocks_of(
    parts: Iterable[Part], calls: Iterable[ToolCall], *, signature: str, thoughts: bool
) -> list[Any]:
    """The content of a complete answer, in the order in which it came; what is no call is text.

    Args:
        parts: of the answer, neighbours joined.
        calls: of the answer; the last one may be cut off.
        signature: of blocks of thinking.
        thoughts: whether these show the reasoning.
    """
    whole = {call.id: call for call in calls}
    found: list[Any] = []
    for part in parts:
        if isinstance(part, TextPart):
            found.append(TextBlock(text=part.text))
        elif isinstance(part, ReasoningPart):
            shown = part.text if thoughts else ""
            found.append(ThinkingBlock(thinking=shown, signature=signature))
        elif part.id in whole:
            call = whole[part.id]
            given = begun_object(call.arguments)
            found.append(ToolUseBlock(id=call.id, name=call.name, input=given))
    return found


def usage_of_result(result: Result) -> AnthropicUsage:
    """The token counts of a finished answer."""
    return AnthropicUsage(
        input_tokens=result.prompt_tokens - result.cached_tokens,
        output_tokens=len(result.token_ids),
        cache_read_input_tokens=result.cached_tokens,
    )


def stop_reason(answer: OutputProcessor, result: Result, *, clipped: bool) -> str:
    """Why an answer ended; `clipped`: the context had less room than max_tokens."""
    if result.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if answer.stop_match is not None:
        return "stop_sequence"
    return "tool_use" if result.tool_calls else "end_turn"


class BlockEvents:
    """Converts parts to events of content blocks, one block open at a time.

    Args: as of blocks_of.
    """

    def __init__(self, *, signature: str, thoughts: bool) -> None:
        self._signature, self._thoughts = signature, thoughts
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def push(self, parts: Iterable[Part]) -> Iterator[bytes]:
        """The events of these parts."""
        for part in parts:
            if isinstance(part, TextPart):
                yield from self._within("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})
            elif isinstance(part, ReasoningPart):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._within("thinking", empty)
                if self._thoughts:
                    yield self._delta({"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._call(part)

    def close(self) -> Iterator[bytes]:
        """The events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        yield sse.named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _call(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None:
            yield from self.close()
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": piece.id,
                "name": piece.name,
                "input": {},
            }
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
        yield sse.named("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse.named("content_block_delta", event)
