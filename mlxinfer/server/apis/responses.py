"""/v1/responses: OpenAI's responses API, and the responses that are stored."""

import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import MAX_LOGPROBS, FinishReason, SamplingParams
from ...errors import (
    InvalidRequestError,
    MlxinferError,
    OverloadedError,
    PromptTooLongError,
    UnsupportedFieldError,
)
from ...session.answers import Answers, Step
from ...session.inputs import ChatInput
from ..call import Call
from ..errors import NotStoredError, PreviousResponseError, StoreError
from ..http import (
    Body,
    ErrorForm,
    Events,
    encode,
    logged,
    named,
    openai_error,
    public,
    refuse,
    same_field,
)
from ..served import ServedModel
from ..store import ResponseStore, StoredResponse
from .chat import Effort
from .constraint import read_form
from .responses_items import InputItem, OutputItems, Status, conversation
from .sampling import REFUSED_ELSEWHERE, SamplerFields, sampling_params
from .tools import DeclaredTools, Plain, check_tools, read_tools
from .usage import logprob_of

LOGPROBS = "message.output_text.logprobs"  # of `include`
WRAPPED = "reasoning.encrypted_content"  # the same
MAX_PAGE = 100
DEFAULT_PAGE = 20
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
        "background": (False,),
        "moderation": (),
        "context_management": ([],),
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
    store: bool | None = None  # `store` of the answer says whether it is
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest turns may go
    previous_response_id: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def resolve(self) -> None:
        """Resolve fields of other APIs.

        Raises:
            InvalidRequestError: two names of one field with different values.
            UnsupportedFieldError: an unknown entry of `include`.
        """
        own = self.reasoning.effort if self.reasoning else None
        names = {"reasoning.effort": own, "reasoning_effort": self.reasoning_effort}
        self.reasoning_effort = same_field(names)
        for name in self.include or ():
            if name != LOGPROBS:
                refuse("include", name, (WRAPPED,))

    @property
    def items(self) -> list[InputItem]:
        """The items of the request; a text is a user's message."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    @property
    def form(self) -> dict[str, Any] | None:
        """The form of the visible text."""
        return self.text.format if self.text else None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are named beside each; None: none are scored."""
        asked = LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else self.top_logprobs or None


def read(
    body: ResponsesRequest, model: ServedModel, messages: Sequence[Plain], tools: DeclaredTools
) -> ChatInput:
    """The conversation of a request. Takes a while.

    Args:
        body: of the request.
        model: gives values that the request leaves out.
        messages: instructions and items, as templates read them.
        tools: of the body.
    """
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
    kept = {key: shown[key] for key in ("code", "message", "param")}
    return named("error", {"type": "error", "sequence_number": 0, **kept})


RESPONSES = ErrorForm(body=lambda error: encode(openai_error(error)), event=_error_event)


async def responses(call: Call, body: ResponsesRequest) -> Plain | Events:
    """Answer a conversation (the responses API)."""
    messages, tools = await call.in_worker(_conversation, call, body)
    model = await call.model(body.model)
    answers = await _start(call, body, model, messages, tools)
    tools.skipped.report(call)
    items = OutputItems(call.id, wrap=WRAPPED in (body.include or ()), declared=tools.declared)
    begun = _begun(call, body, model, answers.answers[0].request.params)
    writer = ResponseWriter(call, body, model, answers, items, begun)
    return Events(writer.frames()) if body.stream else await writer.whole()


async def input_tokens(call: Call, body: ResponsesRequest) -> Plain:
    """Count the tokens of a conversation with its tools (the responses API)."""
    messages, tools = await call.in_worker(_conversation, call, body)
    model = await call.model(body.model)

    def count() -> int:
        return len(model.generator.encode(read(body, model, messages, tools)).ids)

    return {"object": "response.input_tokens", "input_tokens": await call.in_worker(count)}


def _conversation(call: Call, body: ResponsesRequest) -> tuple[list[Plain], DeclaredTools]:
    """The messages of a request, after those of the responses that it follows; its tools.

    Reads the disk, and takes a while.
    """
    before: list[InputItem] = []
    if body.previous_response_id is not None:
        try:
            chain = _chain_of(call, body.previous_response_id)
        except NotStoredError as error:
            raise PreviousResponseError(str(error), param="previous_response_id") from None
        items = [item for stored in chain for item in _items_of(stored)]
        before = msgspec.convert(items, list[InputItem])
    tools = read_tools(body.tools)
    return conversation(body.instructions, before, body.items, tools.skipped), tools


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


class ResponseWriter:
    """Writes the answer to one request: whole, or as events."""

    def __init__(
        self,
        call: Call,
        body: ResponsesRequest,
        model: ServedModel,
        answers: Answers,
        items: OutputItems,
        begun: Plain,
    ) -> None:
        self._call, self._body, self._model, self._answers = call, body, model, answers
        self._items, self._begun = items, begun

    async def whole(self) -> Plain:
        """The complete answer."""
        async for steps in self._answers:
            for step in steps:
                for _ in self.step_frames(step):
                    pass  # the events are not sent
        for _ in self._items.close(self._status):
            pass
        return await self._stored(self._ended())

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events from `response.created` to the last one; there is no [DONE]."""
        yield self._items.frame("response.created", response=self._begun)
        yield self._items.frame("response.in_progress", response=self._begun)
        try:
            async for frames in self._call.frames(self._answers, self.step_frames):
                yield frames
            last = b"".join(self._items.close(self._status))
            ended = await self._stored(self._ended())
            yield last + self._items.frame(f"response.{ended['status']}", response=ended)
        except MlxinferError as error:  # as an event of this API
            yield self._failed(error)

    def step_frames(self, step: Step) -> Iterator[bytes]:
        """The events of a step."""
        scored = logprob_of(self._model.tokenizer, self._answers.answers[0], step)
        return self._items.push(step.delta.parts, scored)

    @property
    def _status(self) -> Status:
        result = self._answers.answers[0].result
        assert result is not None
        return "incomplete" if result.finish_reason is FinishReason.LENGTH else "completed"

    def _ended(self) -> Plain:
        status, counts = self._status, self._answers.usage
        self._call.note_usage(self._answers, status)
        cut_off = status == "incomplete"
        usage: Plain = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.answer_tokens,
        }
        return {
            **self._begun,
            "status": status,
            "completed_at": None if cut_off else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._items.done,
            "usage": usage,
        }

    async def _stored(self, ended: Plain) -> Plain:
        """The same response, after it was stored; one that the disk refuses says that it is not."""
        store = self._call.service.store
        if store is None or not ended["store"]:
            return ended
        stored = StoredResponse(
            id=ended["id"],
            previous=ended["previous_response_id"],
            input=encode(_listed_items(self._body.items, ended["id"])),
            response=encode(ended),
        )
        try:
            await self._call.in_worker(store.put, _owner(self._call), stored)
        except (StoreError, OverloadedError) as error:  # the answer is not lost
            log.error("response not stored", exc_info=error)
            return {**ended, "store": False}
        return ended

    def _failed(self, error: MlxinferError) -> bytes:
        self._call.log.update(logged(error))
        shown = public(error)
        if shown is not error:
            log.error("stream failed", exc_info=error, extra={"request_id": self._call.request_id})
        shown_error = {"code": "server_error", "message": str(shown)}
        done = {"status": "failed", "error": shown_error, "output": self._items.done}
        return self._items.frame("response.failed", response={**self._begun, **done})


def _begun(call: Call, body: ResponsesRequest, model: ServedModel, params: SamplingParams) -> Plain:
    """The response before its first token: mostly an echo of the request."""
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
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
    """A tool with the fields that the specification requires of a function."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


# -- stored responses ---------------------------------------------------------------------------


async def show_response(call: Call) -> Body:
    """A stored response."""
    if call.query.get("stream") == "true":
        raise UnsupportedFieldError(
            "stream is not supported here: no response is generated in the background.",
            param="stream",
        )
    chain = await call.in_worker(_chain_of, call, call.path_params["id"])
    return Body(chain[-1].response)


async def delete_response(call: Call) -> Plain:
    """Forget a stored response."""
    response_id = call.path_params["id"]
    if not await call.in_worker(_store_of(call).delete, _owner(call), response_id):
        raise NotStoredError(f"There is no stored response {response_id[:100]!r}.")
    return {"id": response_id, "object": "response", "deleted": True}


async def input_items(call: Call) -> Plain:
    """The items that a stored response answered, those of the responses before it included."""
    chain = await call.in_worker(_chain_of, call, call.path_params["id"])
    items = [item for stored in chain[:-1] for item in _items_of(stored)]
    items += msgspec.json.decode(chain[-1].input)
    return _page(items, call.query)


def _owner(call: Call) -> str:
    """The name of the key that a request came with; "" without keys."""
    return call.key or ""


def _store_of(call: Call) -> ResponseStore:
    """The store of this server; raises UnsupportedFieldError without one."""
    store = call.service.store
    if store is None:
        raise UnsupportedFieldError(
            "This server stores no responses (store = false); send the whole conversation instead.",
            param="previous_response_id",
        )
    return store


def _chain_of(call: Call, response_id: str) -> list[StoredResponse]:
    """A stored response and all before it, the first one first.

    Raises:
        NotStoredError: it, or one before it, is not there.
        UnsupportedFieldError: this server stores nothing.
    """
    found = _store_of(call).chain(_owner(call), response_id)
    if found is None:
        raise NotStoredError(
            f"There is no stored response {response_id[:100]!r}, or one before it is gone: it was "
            "not stored, was deleted, or was the oldest.",
            param="previous_response_id",
        )
    return found


def _items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """The items that a stored response adds to a conversation: its input and its output."""
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input)
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    return [*items, *response["output"]]


def _listed_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Items of a request as they are stored and listed: each with an id, contents as parts."""
    number = response_id.partition("_")[2]
    found = []
    for place, item in enumerate(items):
        plain: dict[str, Any] = {"type": item.type, **msgspec.to_builtins(item)}
        plain["id"] = f"{'msg' if item.type == 'message' else 'item'}_in_{number}_{place}"
        if item.type == "message" and isinstance(item.content, str):
            kind = _TEXT_TYPES.get(item.role or "", "input_text")
            plain["content"] = [{"type": kind, "text": item.content}]
            plain["status"] = "completed"
        found.append(plain)
    return found


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> Plain:
    limit, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequestError(f"limit is a number from 1 to {MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order is asc or desc.", param="order")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item.get("id") for item in items]
        if after not in ids:
            raise InvalidRequestError("after names no item of this response.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
