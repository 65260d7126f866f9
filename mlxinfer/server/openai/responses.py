"""POST /v1/responses: OpenAI's responses API. Nothing is stored between requests."""

import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ...core import FinishReason, SamplingParams
from ...errors import MlxinferError, TemplateError
from ...grammar import GrammarSpec
from ...text import ToolUse
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.grammar import format_constraint, start_grammars
from ..fields.prompt import check_messages, effort_variables, fitted, text_check, tool_use
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
from .declared_tools import DeclaredTools, read_tools
from .responses_input import conversation
from .responses_output import OutputItems
from .responses_types import (
    InputDetails,
    OutputDetails,
    Response,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from .types import usage_log, usage_of

log = logging.getLogger("mlxinfer.server")


async def responses(call: Call, body: ResponsesRequest) -> Reply:
    """Answer a conversation."""
    body.refuse()
    model = await call.model(body.model)
    tools, asked, use, prompt_ids = await call.in_worker(_read, model, body)
    if tools.skipped:
        call.log["skipped"] = str(tools.skipped)
    (params,) = fitted(model, [_params(body, model)], len(prompt_ids), param="input")
    (grammar,) = await call.in_worker(
        start_grammars, model, asked, use, prompt_ids, 1, reasons=True
    )
    answer = model.builder.output(prompt_ids, params, continues=False, use=use, grammar=grammar)
    answer.request.cache_salt = body.cache_salt
    generation = call.generate(model, [answer])
    items = OutputItems(call.id, wrap=_wraps(body), declared=tools.declared)
    run = _ResponseRun(call, generation, _begun(call, body, model, params), items)
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
ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=responses,
        summary="Answer a conversation (the responses API), without storing it.",
        body=ResponsesRequest,
        answer=Response,
        style=RESPONSES,
    ),
)


class _ResponseRun:
    """One generation from its first token to its Response."""

    def __init__(
        self, call: Call, generation: Generation, begun: Response, items: OutputItems
    ) -> None:
        self._call, self._generation, self._begun = call, generation, begun
        self._items, self._frame = items, items.frame

    async def response(self) -> Response:
        """The complete answer."""
        async for steps in self._generation.steps():
            for step in steps:
                for _ in self._items.push(step.delta.parts):
                    pass  # the events are not sent
        for _ in self._end():
            pass
        return self._ended()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events from `response.created` to the last one; there is no [DONE]."""
        self._call.log["stream"] = True
        yield self._frame("response.created", response=self._begun)
        yield self._frame("response.in_progress", response=self._begun)
        try:
            async for steps in self._generation.steps():
                frames = [f for step in steps for f in self._items.push(step.delta.parts)]
                if frames or not steps:
                    yield b"".join(frames) or sse.KEEP_ALIVE
            last = b"".join(self._end())
            ended = self._ended()
            yield last + self._frame(f"response.{ended.status}", response=ended)
        except MlxinferError as error:  # as an event of this API
            yield self._failed(error)

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
        prompt, answer = counts.prompt_tokens_details, counts.completion_tokens_details
        return replace(
            self._begun,
            status=status,
            completed_at=None if self._cut_off else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if self._cut_off else None,
            output=self._items.done,
            usage=ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=prompt.cached_tokens),
                output_tokens=counts.completion_tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=answer.reasoning_tokens),
                total_tokens=counts.total_tokens,
            ),
        )

    def _failed(self, error: MlxinferError) -> bytes:
        self._call.log.update(logged(error))
        shown = public(error)
        if shown is not error:
            log.error("stream failed", exc_info=error, extra={"request_id": self._call.request_id})
        shown_error = {"code": "server_error", "message": str(shown)}
        failed = replace(self._begun, status="failed", error=shown_error, output=self._items.done)
        return self._frame("response.failed", response=failed)


def _read(
    model: ServedModel, body: ResponsesRequest
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
    return tools, asked, use, _encode(model, body, tools, use)


def _encode(
    model: ServedModel, body: ResponsesRequest, declared: DeclaredTools, use: ToolUse | None
) -> list[int]:
    template = model.tokenizer.template
    if template is None:
        raise TemplateError(f"The model {model.name!r} has no chat template; use /v1/completions.")
    tools = None if use is None else use.shown
    source = template.source_for(tools)
    effort = body.reasoning.effort if body.reasoning else None
    messages = conversation(body, declared, source=source)
    check_messages(model, messages, param="input")
    check = text_check(model, param="input")
    variables = effort_variables(effort, source)
    return model.builder.encode_chat(messages, check, tools=tools, **variables)


def _params(body: ResponsesRequest, model: ServedModel) -> SamplingParams:
    defaults = model.defaults
    return SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=max(defaults.top_k if body.top_k is None else body.top_k, 0),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
    )


def _begun(
    call: Call, body: ResponsesRequest, model: ServedModel, params: SamplingParams
) -> Response:
    """The Response before its first token: mostly an echo of the request."""
    form: dict[str, Any] = (body.text and body.text.format) or {"type": "text"}
    effort = body.reasoning.effort if body.reasoning else None
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
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": effort, "summary": None},
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        text={"format": form},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[_echoed(tool) for tool in body.tools or ()],
        top_p=params.top_p,
        user=UNSET if body.user is None else body.user,
    )


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that the specification requires of a function."""
    if tool.get("type") != "function":
        return tool
    return {"parameters": None, "strict": False, **tool}


def _wraps(body: ResponsesRequest) -> bool:
    return "reasoning.encrypted_content" in (body.include or ())
