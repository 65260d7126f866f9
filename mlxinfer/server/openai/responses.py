"""POST /v1/responses and …/input_tokens: OpenAI's responses API."""

import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ...core import FinishReason, SamplingParams
from ...errors import MlxinferError, OverloadedError, TemplateError
from ...grammar import GrammarSpec
from ...session.engine_client import Step
from ...session.output_processor import OutputProcessor
from ...text import ToolUse
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.grammar import format_constraint, start_answers
from ..fields.prompt import check_messages, effort_variables, fitted, text_check
from ..fields.sampling import sampler_params
from ..fields.tools import tool_use
from ..http import sse
from ..http.replies import (
    ErrorStyle,
    Events,
    Reply,
    encode,
    json_body,
    logged,
    openai_error,
    public,
)
from ..registry.served import ServedModel
from ..store import StoredResponse
from .declared_tools import DeclaredTools, read_tools
from .logprobs import chat_logprobs
from .responses_input import conversation, items_of
from .responses_output import OutputItems
from .responses_types import (
    InputDetails,
    InputItem,
    OutputDetails,
    Response,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from .stored_responses import chain_of, listed_items, owner_of
from .stored_responses import items_of as stored_items
from .types import Usage, usage_log, usage_of

log = logging.getLogger("mlxinfer.server")


async def responses(call: Call, body: ResponsesRequest) -> Reply:
    """Answer a conversation."""
    body.prepare()
    before = await call.in_worker(_items_before, call, body)
    model = await call.model(body.model)
    tools, answer = await call.in_worker(_start, model, body, before)
    if tools.skipped:
        call.log["skipped"] = str(tools.skipped)
    generation = call.generate(model, [answer])
    items = OutputItems(call.id, wrap=_wraps(body), declared=tools.declared)
    begun = _begun(call, body, model, answer.request.params)
    run = _ResponseRun(call, generation, begun, items, body)
    if body.stream:
        return Events(run.events(), headers=tools.skipped.headers)
    reply = json_body(await run.response())
    reply.headers += tools.skipped.headers
    return reply


def _error_event(error: MlxinferError) -> bytes:
    shown = openai_error(error)["error"]
    assert isinstance(shown, dict)
    kept = {key: shown[key] for key in ("code", "message", "param")}
    return sse.named("error", {"type": "error", "sequence_number": 0, **kept})


RESPONSES = ErrorStyle(body=lambda error: encode(openai_error(error)), event=_error_event)


class _ResponseRun:
    """One generation from its first token to its Response."""

    def __init__(
        self,
        call: Call,
        generation: Generation,
        begun: Response,
        items: OutputItems,
        body: ResponsesRequest,
    ) -> None:
        self._call, self._generation, self._begun, self._body = call, generation, begun, body
        self._items, self._frame = items, items.frame

    async def response(self) -> Response:
        """The complete answer."""
        async for steps in self._generation.steps():
            for step in steps:
                for _ in self._push(step):
                    pass  # the events are not sent
        for _ in self._end():
            pass
        return await self._stored(self._ended())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events from `response.created` to the last one; there is no [DONE]."""
        self._call.log["stream"] = True
        yield self._frame("response.created", response=self._begun)
        yield self._frame("response.in_progress", response=self._begun)
        try:
            async for steps in self._generation.steps():
                frames = [frame for step in steps for frame in self._push(step)]
                if frames or not steps:
                    yield b"".join(frames) or sse.KEEP_ALIVE
            last = b"".join(self._end())
            ended = await self._stored(self._ended())
            yield last + self._frame(f"response.{ended.status}", response=ended)
        except MlxinferError as error:  # as an event of this API
            yield self._failed(error)

    def _push(self, step: Step) -> Iterator[bytes]:
        """The events of a step."""
        scored = chat_logprobs(self._generation.model, step.event)
        content = scored.content if scored is not None else None
        return self._items.push(step.delta.parts, content or ())

    async def _stored(self, ended: Response) -> Response:
        """The same response, after it was stored; one that the disk refuses says that it is not."""
        store = self._call.service.store
        if store is None or not ended.store:
            return ended
        listed = listed_items(items_of(self._body), ended.id)
        stored = StoredResponse(
            id=ended.id,
            previous=ended.previous_response_id,
            input=encode(listed),
            response=encode(ended),
        )
        try:
            await self._call.in_worker(store.put, owner_of(self._call), stored)
        except (sqlite3.Error, OverloadedError) as error:  # the answer is not lost with its copy
            log.error("response not stored", exc_info=error)
            return replace(ended, store=False)
        return ended

    def _end(self) -> Iterator[bytes]:
        status: Status = "incomplete" if self._cut_off else "completed"
        yield from self._items.close(status)

    @property
    def _cut_off(self) -> bool:
        result = self._generation.answers[0].result
        assert result is not None
        return result.finish_reason is FinishReason.LENGTH

    def _ended(self) -> Response:
        counts = usage_of(self._generation)
        status = "incomplete" if self._cut_off else "completed"
        self._call.log.update(usage_log(counts, [status]))
        return replace(
            self._begun,
            status=status,
            completed_at=None if self._cut_off else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if self._cut_off else None,
            output=self._items.done,
            usage=_usage(counts),
        )

    def _failed(self, error: MlxinferError) -> bytes:
        self._call.log.update(logged(error))
        shown = public(error)
        if shown is not error:
            log.error("stream failed", exc_info=error, extra={"request_id": self._call.request_id})
        shown_error = {"code": "server_error", "message": str(shown)}
        failed = replace(self._begun, status="failed", error=shown_error, output=self._items.done)
        return self._frame("response.failed", response=failed)


async def input_tokens(call: Call, body: ResponsesRequest) -> Reply:
    """The number of tokens of a conversation with its tools."""
    body.prepare()
    before = await call.in_worker(_items_before, call, body)
    model = await call.model(body.model)
    *_, prompt_ids = await call.in_worker(_read, model, body, before)
    return json_body(InputTokens(input_tokens=len(prompt_ids)))


def _usage(counts: Usage) -> ResponseUsage:
    prompt, answer = counts.prompt_tokens_details, counts.completion_tokens_details
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=prompt.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=answer.reasoning_tokens),
        total_tokens=counts.total_tokens,
    )


class InputTokens(msgspec.Struct, kw_only=True):
    """Length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def _items_before(call: Call, body: ResponsesRequest) -> list[InputItem]:
    """The items of the responses that a request follows; reads the disk."""
    if body.previous_response_id is None:
        return []
    chain = chain_of(call, body.previous_response_id)
    return msgspec.convert([i for stored in chain for i in stored_items(stored)], list[InputItem])


def _read(
    model: ServedModel, body: ResponsesRequest, before: list[InputItem]
) -> tuple[DeclaredTools, GrammarSpec | None, ToolUse | None, list[int]]:
    """The tools, the constraint, the use of the tools and the prompt ids. Takes a while."""
    tools = read_tools(body.tools)
    asked = format_constraint(body.text.format if body.text else None, place="text.format")
    use = tool_use(
        model,
        tools.functions,
        tools.choice(body.tool_choice),
        parallel=body.parallel_tool_calls,
    )
    return tools, asked, use, _encode(model, body, before, tools, use)


def _start(
    model: ServedModel, body: ResponsesRequest, before: list[InputItem]
) -> tuple[DeclaredTools, OutputProcessor]:
    """The tools, and the answer to be generated. Takes a while."""
    tools, asked, use, ids = _read(model, body, before)
    limits = {"max_tokens": body.max_output_tokens, "logprobs": body.num_logprobs}
    params = fitted(model, [sampler_params(body, model, **limits)], len(ids), param="input")
    (answer,) = start_answers(model, body, ids, params, asked, use)
    return tools, answer


def _encode(
    model: ServedModel,
    body: ResponsesRequest,
    before: list[InputItem],
    declared: DeclaredTools,
    use: ToolUse | None,
) -> list[int]:
    template = model.tokenizer.template
    if template is None:
        raise TemplateError(f"The model {model.name!r} has no chat template; use /v1/completions.")
    tools = None if use is None else use.shown
    source = template.source_for(tools)
    messages = conversation(body, before, declared, source=source)
    check_messages(model, messages, param="input")
    check = text_check(model, param="input")
    variables = effort_variables(body.reasoning_effort, source)
    return model.builder.encode_chat(messages, check, tools=tools, **variables)


def _begun(
    call: Call, body: ResponsesRequest, model: ServedModel, params: SamplingParams
) -> Response:
    """The Response before its first token: mostly an echo of the request."""
    form: dict[str, Any] = (body.text and body.text.format) or {"type": "text"}
    return Response(
        id=f"resp_{call.id}",
        created_at=call.created_s,
        frequency_penalty=params.frequency_penalty,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=params.presence_penalty,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.reasoning_effort, "summary": None},
        safety_identifier=body.safety_identifier,
        store=call.service.store is not None and body.store is not False,
        temperature=params.temperature,
        text={"format": form},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[_echoed(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=UNSET if body.user is None else body.user,
    )


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that the specification requires of a function."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


def _wraps(body: ResponsesRequest) -> bool:
    return "reasoning.encrypted_content" in (body.include or ())


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=responses,
        summary="Answer a conversation (the responses API).",
        body=ResponsesRequest,
        answer=Response,
        style=RESPONSES,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=input_tokens,
        summary="Count the tokens of a conversation (the responses API).",
        body=ResponsesRequest,
        answer=InputTokens,
    ),
)
