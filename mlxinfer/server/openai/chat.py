"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from msgspec import UNSET

from ...errors import InvalidRequestError
from ...outputs import Result
from ...session.engine_client import Step
from ...session.output_processor import OutputProcessor
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.checks import refuse
from ..fields.grammar import constraint, start_answers
from ..fields.prompt import fitted
from ..fields.sampling import sampling_params
from ..fields.tools import tool_use
from ..http import sse
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .chat_calls import ToolCallPieces, chat_tool_calls
from .chat_prompt import encode_conversation
from .chat_types import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    chat_finish_reason,
    refuse_old_tools,
)
from .declared_tools import DeclaredTools, read_chat_tools
from .logprobs import chat_logprobs, chat_logprobs_of
from .types import progress_of, timings_of, usage_log, usage_of


async def chat(call: Call, body: ChatRequest) -> Reply:
    """Answer a conversation."""
    _refuse(body)
    model = await call.model(body.model)
    allowed = call.service.config.template_kwargs
    tools, answers = await call.in_worker(_read, model, body, allowed)
    if tools.skipped:
        call.log["skipped"] = str(tools.skipped)
    for answer in answers:
        answer.request.reports_prompt = body.wants_progress
    generation = call.generate(model, answers)
    if body.stream:
        return Events(_events(call, body, generation, tools), headers=tools.skipped.headers)
    reply = json_body(_completion(call, body, generation, await generation.results(), tools))
    reply.headers += tools.skipped.headers
    return reply


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
    body.prepare()
    refuse_old_tools(body)
    refuse("modalities", body.modalities, (["text"],))
    refuse("audio", body.audio)
    refuse("web_search_options", body.web_search_options)
    refuse("echo", body.echo, (False,))


def _read(
    model: ServedModel, body: ChatRequest, allowed: frozenset[str]
) -> tuple[DeclaredTools, list[OutputProcessor]]:
    """The tools, and the answers to be generated. Takes a while."""
    asked = constraint(body)
    tools = read_chat_tools(body.tools)
    choice = tools.choice(body.tool_choice) if tools.declared else body.tool_choice
    use = tool_use(model, tools.functions, choice, parallel=body.parallel_tool_calls)
    params = sampling_params(
        body,
        model,
        max_tokens=body.token_limit,
        logprobs=_num_logprobs(body),
        max_reasoning_tokens=body.reasoning_limit,
    )
    shown = None if use is None else use.shown
    ids = encode_conversation(model, body.messages, body, allowed=allowed, tools=shown)
    params = fitted(model, params, len(ids), param="messages")
    continues = bool(body.continue_final_message)
    return tools, start_answers(model, body, ids, params, asked, use, continues=continues)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs goes with logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _completion(
    call: Call,
    body: ChatRequest,
    generation: Generation,
    results: list[Result],
    tools: DeclaredTools,
) -> ChatCompletion:
    usage = usage_of(generation, choices_a_prompt=len(results))
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(
                content=None if result.tool_calls and not result.text else result.text,
                reasoning_content=UNSET if result.reasoning is None else result.reasoning,
                tool_calls=chat_tool_calls(result.tool_calls, tools.declared) or UNSET,
            ),
            logprobs=chat_logprobs_of(generation.model, generation.answers[index]),
            finish_reason=chat_finish_reason(result),
            timings=timings_of(result) if body.wants_timings else UNSET,
            token_ids=list(result.token_ids) if body.return_token_ids else UNSET,
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
        timings=choices[0].timings,
    )


async def _events(
    call: Call, body: ChatRequest, generation: Generation, tools: DeclaredTools
) -> AsyncIterator[bytes]:
    """Yield the role, the deltas, the token counts if they were asked for, and [DONE]."""
    model = generation.model
    usage = None if body.wants_usage else UNSET
    count = len(generation.answers)
    pieces = [ToolCallPieces(tools.declared) for _ in range(count)]

    def frame(index: int, delta: ChatDelta, **rest: Any) -> bytes:
        choice = ChunkChoice(index=index, delta=delta, **rest)
        running = body.wants_running_usage
        counts = usage_of(generation, choices_a_prompt=count) if running else usage
        return sse.data(chunk(choices=[choice], usage=counts, timings=choice.timings))

    def chunk(**rest: Any) -> ChatChunk:
        return ChatChunk(id=f"chatcmpl-{call.id}", created=call.created_s, model=model.name, **rest)

    def frames_of(step: Step) -> list[bytes]:
        if step.event.prompt_tokens:
            nothing, progress = ChatDelta(), progress_of(generation, step)
            choice = ChunkChoice(index=step.index, delta=nothing)
            return [sse.data(chunk(choices=[choice], prompt_progress=progress))]
        deltas = _deltas(model, step, pieces[step.index], body)
        return [frame(step.index, **fields) for fields in deltas]

    yield b"".join(frame(i, ChatDelta(role="assistant", content="")) for i in range(count))
    async for steps in generation.steps():
        frames = [each for step in steps for each in frames_of(step)]
        if frames or not steps:
            yield b"".join(frames) or sse.KEEP_ALIVE
    counts = usage_of(generation, choices_a_prompt=count)
    reasons = [chat_finish_reason(a.result) for a in generation.answers if a.result is not None]
    call.log.update(usage_log(counts, reasons), stream=True)
    if body.wants_usage:
        yield sse.data(chunk(choices=[], usage=counts))
    yield sse.DONE


def _deltas(
    model: ServedModel, step: Step, pieces: ToolCallPieces, body: ChatRequest
) -> list[dict[str, Any]]:
    """The chunks of a step: none while its text is held back, two where the answer ends."""
    delta = step.delta
    logprobs = chat_logprobs(model, step.event)
    calls = pieces.take(delta.tool_calls)
    ids = list(delta.token_ids) if body.return_token_ids else []
    found: list[dict[str, Any]] = []
    if delta.text or delta.reasoning or calls or logprobs is not None or ids:
        fields = ChatDelta()
        if delta.reasoning:
            fields.reasoning_content = delta.reasoning
        if calls:
            fields.tool_calls = calls
        if delta.text or not (delta.reasoning or calls):
            fields.content = delta.text
        found.append({"delta": fields, "logprobs": logprobs, "token_ids": ids or UNSET})
    if delta.result is not None:
        reason = chat_finish_reason(delta.result)
        last: dict[str, Any] = {"delta": ChatDelta(), "finish_reason": reason}
        if body.wants_timings:
            last["timings"] = timings_of(delta.result)
        found.append(last)
    return found
