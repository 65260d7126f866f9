"""/v1/responses: OpenAI's responses API, and the responses that are stored."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import MAX_LOGPROBS, FinishReason, SamplingParams
from ...errors import (
    InvalidRequestError,
    MlxinferError,
    OverloadedError,
    PromptTooLongError,
    StorageFullError,
    UnsupportedFieldError,
)
from ...session.answers import Answers, AnswerStep
from ...session.inputs import ChatInput
from ..call import Call
from ..errors import HttpError, StoreError
from ..http import (
    Body,
    ErrorForm,
    Events,
    Plain,
    encode,
    named,
    openai_error,
    page_of,
    refuse,
    same_field,
)
from ..slots import ServedModel
from ..store import ResponseStore, RunningResponse, StoredResponse
from .chat import Effort
from .documents import read_pdfs
from .responses_items import InputItem, OutputItems, Status, conversation, pdfs_of
from .sampling import REFUSED_ELSEWHERE, SamplerFields, read_form, sampling_params
from .tools import DeclaredTools, check_tools, read_tools, skip
from .usage import logprob_of, reuse_details

LOGPROBS = "message.output_text.logprobs"  # of `include`
WRAPPED = "reasoning.encrypted_content"  # the same
MAX_PAGE = 100
_SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty")  # that are echoed
_TEXT_TYPES = {"assistant": "output_text"}  # of a part, by role
log = logging.getLogger("mlxinfer.server")


# -- the request --------------------------------------------------------------------------------


class TextConfig(msgspec.Struct, kw_only=True):
    """Form of the visible text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish; no template reads it


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model shall reason. The answer carries the reasoning itself, not a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplerFields, kw_only=True):
    """A conversation to be answered. Its response is stored unless `store` is false."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED_ELSEWHERE,
        "conversation": (),
        "prompt": (),
        "moderation": (),
        "stop": ([],),
        "stop_sequences": ([],),
        "n": (1,),
        "logprobs": (False,),
        "messages": (),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": ({"type": "text"},),
    }

    input: str | list[InputItem] = msgspec.field(default_factory=list)
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None  # of hosted tools: there are none
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    reasoning_effort: Effort | None = None  # chat's name of `reasoning.effort`
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    context_management: Any = None  # nothing here compacts a conversation
    store: bool | None = None  # `store` of the answer says whether it is
    background: bool | None = None  # the answer goes on without its client; it needs a store
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest turns may go
    previous_response_id: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def resolve(self) -> None:
        effort = self.reasoning.effort if self.reasoning else None
        names = {"reasoning.effort": effort, "reasoning_effort": self.reasoning_effort}
        self.reasoning_effort = same_field(names)
        for name in self.include or ():
            if name != LOGPROBS:
                refuse("include", name, (WRAPPED,))
        if self.background and self.store is False:
            raise InvalidRequestError.of("background", "goes with store: true.")

    @property
    def order(self) -> int:
        order = self.priority or 0
        return max(order, 1) if self.background else order

    @property
    def items(self) -> list[InputItem]:
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    @property
    def form(self) -> dict[str, Any] | None:
        return self.text.format if self.text else None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are named beside each; None: none are scored."""
        asked = LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else self.top_logprobs or None


def read(
    body: ResponsesRequest, model: ServedModel, messages: Sequence[Plain], tools: DeclaredTools
) -> ChatInput:
    check_tools(None, body.tool_choice)
    choice = tools.choose(body.tool_choice)
    return ChatInput(
        messages=messages,
        tools=tools.functions,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        constraint=None if body.form is None else read_form(body.form, "text.format"),
        params=sampling_params(
            body, model, max_tokens=body.max_output_tokens, logprobs=body.num_logprobs
        ),
        cache_salt=body.cache_salt,
        id_slot=body.id_slot,
        place="input",
    )


def truncated(messages: Sequence[Plain], count: int) -> list[Plain]:
    """Messages without the `count` oldest ones behind the system message.

    The rest begins with a user's message. Nothing: no such message is left.
    """
    num_head = int(messages[0]["role"] in ("system", "developer"))
    rest = list(messages[num_head + count :])
    while rest and rest[0]["role"] != "user":
        del rest[0]
    return [*messages[:num_head], *rest] if rest else []


# -- the answer ---------------------------------------------------------------------------------


def _error_event(error: MlxinferError) -> bytes:
    shown = openai_error(error)["error"]
    fields = {key: shown[key] for key in ("code", "message", "param")}
    return named("error", {"type": "error", "sequence_number": 0, **fields})


RESPONSES = ErrorForm(body=lambda error: encode(openai_error(error)), event=_error_event)


async def responses(call: Call, body: ResponsesRequest) -> Plain | Events:
    """Answer a conversation (the responses API)."""
    if body.background:
        return await _in_background(call, body)
    writer = await _begin(call, body)
    return Events(writer.frames()) if body.stream else await writer.whole()


async def _begin(call: Call, body: ResponsesRequest) -> "ResponseWriter":
    model = await call.model(body.model)
    call.require_place()
    messages, tools = await _conversation(call, body)
    answers = await _start(call, body, model, messages, tools)
    if body.context_management:
        skip(tools.skipped, "context_management", "edits")
    call.report_skipped(tools.skipped)
    items = OutputItems(call.id, wrap=WRAPPED in (body.include or ()), declared=tools.declared)
    begun = _begun(call, body, model, answers.answers[0].request.params)
    return ResponseWriter(call, body, model, answers, items, begun)


async def _in_background(call: Call, body: ResponsesRequest) -> Plain | Events:
    """Begin an answer that goes on when its client has left. Errors until then are its client's."""
    store, background = _store_of(call, "background"), call.again(body.order)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background)
        writer = await _begin(background, body)
        running = RunningResponse(writer.response)
        work = _run(writer, running, store, stack.pop_all())
        running.task = asyncio.create_task(work)
    store.running[_owner(call), writer.response["id"]] = running
    call.headers += background.headers
    return Events(running.follow(0)) if body.stream else writer.response


async def _run(
    writer: "ResponseWriter", running: RunningResponse, store: ResponseStore, held: AsyncExitStack
) -> None:
    call, response = writer.call, writer.response
    try:
        async with held:
            try:
                async for frames in writer.frames():
                    running.add(frames)
            except asyncio.CancelledError:  # by RunningResponse.cancel
                running.add(writer.cut())
            await writer.store(b"".join(running.events))
    finally:
        del store.running[_owner(call), response["id"]]
        running.end()
    log.info("response %s in the background", response["status"], extra=call.log)


async def input_tokens(call: Call, body: ResponsesRequest) -> Plain:
    """Count the tokens of a conversation with its tools (the responses API)."""
    messages, tools = await _conversation(call, body)
    model = await call.model(body.model)
    ids = await call.encode(model, lambda: read(body, model, messages, tools))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _conversation(call: Call, body: ResponsesRequest) -> tuple[list[Plain], DeclaredTools]:
    """The messages of a request, after those of the responses that it follows; its tools."""
    skipped = await read_pdfs(call, pdfs_of(body.items))
    messages, tools = await call.in_worker(_messages, call, body)
    tools.skipped += skipped
    return messages, tools


def _messages(call: Call, body: ResponsesRequest) -> tuple[list[Plain], DeclaredTools]:
    before: list[InputItem] = []
    if body.previous_response_id is not None:
        chain = _chain_of(call, body.previous_response_id, "previous_response_not_found")
        items = [item for stored in chain for item in _items_of(stored)]
        before = msgspec.convert(items, list[InputItem])
    tools = read_tools(body.tools)
    body.input = [_referred(call, item) for item in body.items]
    return conversation(body.instructions, before, body.input, tools.skipped), tools


def _referred(call: Call, item: InputItem) -> InputItem:
    """The stored item that a reference names; a reference to none stays as it is."""
    parts = (item.id or "").split("_")  # a kind, the id of its response, its place
    store = call.service.store
    if item.type != "item_reference" or len(parts) < 3 or store is None:
        return item
    chain = store.chain(_owner(call), f"resp_{parts[-2]}") or []
    known = {stored["id"]: stored for response in chain[-1:] for stored in _items_of(response)}
    return msgspec.convert(known[item.id], InputItem) if item.id in known else item


async def _start(
    call: Call,
    body: ResponsesRequest,
    model: ServedModel,
    messages: list[Plain],
    tools: DeclaredTools,
) -> Answers:
    """Begin the answer; with `truncation: "auto"` without the oldest messages, if it has to be."""
    dropped, kept = 0, messages
    while True:
        try:
            return await call.start(model, lambda: [read(body, model, kept, tools)])  # noqa: B023
        except PromptTooLongError:
            dropped = 2 * dropped or 1
            kept = truncated(messages, dropped)
            if body.truncation != "auto" or not kept:
                raise


@dataclass(slots=True)
class ResponseWriter:
    """Writes the answer to one request: whole, or as events."""

    call: Call
    body: ResponsesRequest
    model: ServedModel
    answers: Answers
    items: OutputItems
    response: Plain

    async def whole(self) -> Plain:
        async for steps in self.answers:
            for step in steps:
                for _ in self.step_frames(step):
                    pass  # the events are not sent
        for _ in self.items.close(self._status):
            pass
        self._end()
        await self.store()
        return self.response

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events from `response.created` to the last one; there is no [DONE]."""
        for name in ("created", self.response["status"]):
            yield self._frame(name)
        try:
            async for frames in self.call.frames(
                self.answers, self.step_frames, lambda: self._frame(self.response["status"])
            ):
                yield frames
            last = b"".join(self.items.close(self._status))
            self._end()
            await self.store()
            yield last + self._frame(self.response["status"])
        except (
            Exception
        ) as error:  # the fault boundary of a stream: it ends by an event of this API
            yield self._failed(error)

    def step_frames(self, step: AnswerStep) -> Iterator[bytes]:
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            yield self._frame("in_progress")
        scored = logprob_of(self.model.tokenizer, self.answers.answers[0], step)
        yield from self.items.push(step.delta.parts, scored)

    def cut(self) -> bytes:
        """End an answer that was cancelled; returns its last events."""
        last = b"".join(self.items.close("incomplete"))
        self.response |= {"status": "cancelled", "output": self.items.done}
        return last

    def _frame(self, name: str) -> bytes:
        return self.items.frame(f"response.{name}", response=self.response)

    @property
    def _status(self) -> Status:
        result = self.answers.answers[0].result
        assert result is not None
        return "incomplete" if result.finish_reason is FinishReason.LENGTH else "completed"

    def _end(self) -> None:
        status, counts = self._status, self.answers.usage
        cut_off = status == "incomplete"
        usage: Plain = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": 0,
                **reuse_details(self.call.reuse, self.body.return_cached_tokens_details),
            },
            "output_tokens": counts.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.answer_tokens,
        }
        self.response |= {
            "status": status,
            "completed_at": None if cut_off else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self.items.done,
            "usage": usage,
        }

    async def store(self, events: bytes = b"") -> None:
        """Store the response; one that the disk refuses says that it is not stored."""
        store, response = self.call.service.store, self.response
        if store is None or not response["store"]:
            return
        stored = StoredResponse(
            id=response["id"],
            previous=response["previous_response_id"],
            input=encode(_listed_items(self.body.items, response["id"])),
            response=encode(response),
            events=events,
        )
        try:
            await self.call.in_worker(store.put, _owner(self.call), stored)
        except (StoreError, StorageFullError, OverloadedError) as error:  # the answer is not lost
            log.warning("response not stored: %s", error)
            response["store"] = False

    def _failed(self, error: Exception) -> bytes:
        shown_error = {"code": "server_error", "message": str(self.call.failure(error))}
        self.response |= {"status": "failed", "error": shown_error, "output": self.items.done}
        return self._frame("failed")


def _begun(call: Call, body: ResponsesRequest, model: ServedModel, params: SamplingParams) -> Plain:
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created_s,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        **{name: getattr(params, name) for name in _SAMPLING},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning_effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": call.service.store is not None and body.store is not False,
        "text": {"format": body.form or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_echoed(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "usage": None,
        **({} if body.user is None else {"user": body.user}),
    }


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


# -- stored responses ---------------------------------------------------------------------------


async def show_response(call: Call) -> Body | Events | Plain:
    """A stored response, or one that runs in the background; `stream=true`: its events."""
    response_id, streams = call.path_params["id"], call.query.get("stream") == "true"
    after = call.query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise InvalidRequestError.of("starting_after", "is the number of an event.")
    running = _running(call, response_id)
    if running is not None:
        return Events(running.follow(int(after) + 1)) if streams else running.response
    chain = await call.in_worker(_chain_of, call, response_id)
    if not streams:
        return Body(chain[-1].response)
    ended = RunningResponse({})
    ended.end()
    ended.events = await call.in_worker(_store_of(call).events, response_id)
    if not ended.events:
        raise UnsupportedFieldError.of("stream", "goes with background: true.")
    return Events(ended.follow(int(after) + 1))


async def cancel_response(call: Call) -> Body | Plain:
    """End a response that runs in the background; its text so far is kept."""
    response_id = call.path_params["id"]
    running = _running(call, response_id)
    if running is not None:
        await running.cancel()
        return running.response
    stored = (await call.in_worker(_chain_of, call, response_id))[-1]
    if not msgspec.json.decode(stored.response)["background"]:
        raise InvalidRequestError("Only a response with background: true can be cancelled.")
    return Body(stored.response)


async def delete_response(call: Call) -> Plain:
    """Forget a stored response; one that runs in the background ends."""
    store, response_id = _store_of(call), call.path_params["id"]
    running = _running(call, response_id)
    if running is not None:
        await running.cancel()
    if not await call.in_worker(store.delete, _owner(call), response_id):
        raise HttpError("not_found", f"There is no stored response {response_id[:100]!r}.")
    return {"id": response_id, "object": "response", "deleted": True}


async def input_items(call: Call) -> Plain:
    """The items that a stored response answered, those of the responses before it included."""
    chain = await call.in_worker(_chain_of, call, call.path_params["id"])
    items = [item for stored in chain[:-1] for item in _items_of(stored)]
    items += msgspec.json.decode(chain[-1].input)
    if (order := call.query.get("order", "desc")) not in ("asc", "desc"):
        raise InvalidRequestError.of("order", "is asc or desc.")
    items = items[::-1] if order == "desc" else items
    return {"object": "list", **page_of(items, call.query, MAX_PAGE)}


def _owner(call: Call) -> str:
    return call.owner or ""


def _store_of(call: Call, param: str = "previous_response_id") -> ResponseStore:
    store = call.service.store
    if store is None:
        raise UnsupportedFieldError(
            "This server stores no responses (store = false); send the whole conversation instead.",
            param=param,
        )
    return store


def _running(call: Call, response_id: str) -> RunningResponse | None:
    return _store_of(call).running.get((_owner(call), response_id))


def _chain_of(call: Call, response_id: str, missing: str = "not_found") -> list[StoredResponse]:
    """A stored response and all before it, the first one first."""
    chain = _store_of(call).chain(_owner(call), response_id)
    if chain is None:
        raise HttpError(
            missing,
            f"There is no stored response {response_id[:100]!r}, or one before it is gone: it was "
            "not stored, was deleted, or was the oldest.",
            param="previous_response_id",
        )
    return chain


def _items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """The items that a stored response adds to a conversation: its input and its output."""
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input)
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    return [*items, *response["output"]]


def _listed_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Items of a request as they are stored and listed: each with an id, contents as parts."""
    number = response_id.partition("_")[2]
    listed = []
    for place, item in enumerate(items):
        plain: dict[str, Any] = {"type": item.type, **msgspec.to_builtins(item)}
        plain["id"] = f"{'msg' if item.type == 'message' else 'item'}_in_{number}_{place}"
        if item.type == "message" and isinstance(item.content, str):
            kind = _TEXT_TYPES.get(item.role or "", "input_text")
            plain["content"] = [{"type": kind, "text": item.content}]
            plain["status"] = "completed"
        listed.append(plain)
    return listed
