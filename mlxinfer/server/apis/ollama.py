"""Ollama's API, for clients that speak nothing else. Source: its docs/api.md and library 0.6."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import MAX_LOGPROBS, SamplingParams
from ...errors import InvalidRequestError, MlxinferError, UnsupportedFieldError
from ...outputs import CallStatus, Delta, Result, ToolCall, ToolCallDelta, joined_calls
from ...session.answers import Answers, AnswerStep
from ...session.inputs import ChatInput, EmbedInput, Input, TextInput
from ...text import Content
from ..call import Call
from ..errors import HttpError
from ..http import ErrorForm, Events, Plain, RequestBody, clipped_message, decode, encode
from ..slots import ModelSlot, ServedModel
from ..workers import apart
from .chat import Effort
from .sampling import REFUSED, SamplingFields, ollama_format, read_form, sampling_params
from .tools import (
    base64_part,
    begun_object,
    check_tools,
    content_of,
    function_call,
    newest_turn,
    part_or_note,
    text_part,
)
from .usage import logprob_of, logprobs_of, reuse_details

API_VERSION = "0.13.4"  # of Ollama: these paths follow its API; clients check for the oldest
LATEST = ":latest"  # a tag that clients add to names without one
MAX_INPUTS = 2048
NDJSON = b"application/x-ndjson"
POLL_S = 0.2  # between two lines of progress
_NONE = msgspec.Raw(b"null")


# -- requests -----------------------------------------------------------------------------------


class Options(SamplingFields, kw_only=True):
    """Sampling options; those of the machine (num_ctx, num_gpu, …) are the server's own here."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "n": (1,)}

    max_tokens: Annotated[int, Meta(ge=-2)] | None = None  # -1 and -2: until the context is full


class CallFunction(msgspec.Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class Called(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call of a tool."""

    function: CallFunction
    id: str | None = None


class ChatTurn(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # in base64
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AskFields(RequestBody, kw_only=True):
    """Fields that chats and plain texts share."""

    model: str
    stream: bool | None = None  # true unless it is false
    format: Any = None
    options: msgspec.Raw = msgspec.field(default_factory=lambda: _NONE)
    think: bool | Effort | None = None
    keep_alive: Any = None  # 0 without a prompt unloads; otherwise the server's own times hold
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_cached_tokens_details: bool | None = None  # also in `options`

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model."""
        return self.keep_alive in (0, "0", "0s", "0m")

    @property
    def order(self) -> int:
        return self.sampling().order

    def sampling(self) -> Options:
        given = bytes(self.options)
        options = Options() if given == bytes(_NONE) else decode(given, Options, "options")
        if self.return_cached_tokens_details is not None:
            options.return_cached_tokens_details = self.return_cached_tokens_details
        return options

    def input_fields(self, model: ServedModel, options: Options) -> dict[str, Any]:
        """Fields of the session's input: how tokens are chosen, and the form of the answer."""
        limit = options.max_tokens
        params: SamplingParams = sampling_params(
            options,
            model,
            max_tokens=None if limit is None or limit < 0 else max(limit, 1),
            stop=options.stops,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        form = None if self.format is None else read_form(self.format, "format", ollama_format)
        return {
            "params": params,
            "constraint": form,
            "cache_salt": options.cache_salt,
            "id_slot": options.id_slot,
        }


class ChatAsk(AskFields, kw_only=True):
    """A conversation to be answered; without messages the model is loaded, or unloaded."""

    messages: list[ChatTurn] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class GenerateAsk(AskFields, kw_only=True):
    """A text to be answered, or continued as it is (`raw`)."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"template": ("",), "context": ([],)}

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None  # in base64

    def resolve(self) -> None:
        """Raise UnsupportedFieldError for pictures beside a text that is continued as it is."""
        if self.images and (self.raw or self.suffix):
            raise UnsupportedFieldError.of(
                "images",
                "go with a prompt that the chat template renders; leave out raw and suffix.",
            )


def read_chat(body: ChatAsk, options: Options, skipped: list[str], model: ServedModel) -> Input:
    """The conversation of a request. Takes a while. `skipped` gets what cannot be read in it."""
    check_tools(body.tools)
    newest = newest_turn([turn.role for turn in body.messages])
    return ChatInput(
        messages=[
            _message(turn, f"messages[{i}]", skipped if i < newest else None)
            for i, turn in enumerate(body.messages)
        ],
        tools=body.tools,
        reasoning_effort=body.think,
        **body.input_fields(model, options),
    )


def read_text(body: GenerateAsk, options: Options, model: ServedModel) -> Input:
    fields = body.input_fields(model, options)
    if body.raw or body.suffix:
        suffix = body.suffix or None
        return TextInput(prompt=body.prompt, suffix=suffix, reasons=False, **fields)
    content = _content(body.prompt, body.images, "images", None)
    messages: list[Plain] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": content})
    return ChatInput(messages=messages, reasoning_effort=body.think, **fields)


def _content(
    text: str, images: Sequence[str] | None, path: str, notes: list[str] | None
) -> Content:
    parts = [
        part_or_note(partial(base64_part, image), f"{path}[{i}]", "image", notes)
        for i, image in enumerate(images or ())
    ]
    return content_of([*parts, *([text_part(text)] if text else [])])


def _message(turn: ChatTurn, path: str, notes: list[str] | None) -> Plain:
    if turn.content is None and turn.role != "assistant" and not turn.images:
        raise InvalidRequestError.of(f"{path}.content", "is missing.")
    content = _content(turn.content or "", turn.images, f"{path}.images", notes)
    plain: Plain = {"role": turn.role, "content": content}
    if turn.thinking:
        plain["reasoning_content"] = turn.thinking
    if turn.role == "tool":
        plain |= {"name": turn.tool_name} if turn.tool_name else {}
        plain |= {"tool_call_id": turn.tool_call_id} if turn.tool_call_id else {}
    if turn.tool_calls:
        plain["tool_calls"] = [
            function_call(call.id or f"call_{place}", call.function.name, call.function.arguments)
            for place, call in enumerate(turn.tool_calls)
        ]
    return plain


# -- answers ------------------------------------------------------------------------------------


async def ollama_chat(call: Call, body: ChatAsk) -> Plain | Events:
    """Answer a conversation (Ollama's API)."""
    options = body.sampling()
    if not body.messages:
        return await _load_or_unload(call, body, chats=True)
    skipped: list[str] = []
    read = partial(read_chat, body, options, skipped)
    answer = await _answer(call, body, options, read, chats=True)
    call.report_skipped(skipped)
    return answer


async def ollama_generate(call: Call, body: GenerateAsk) -> Plain | Events:
    """Answer or continue a text (Ollama's API)."""
    options = body.sampling()
    if not body.prompt and not body.suffix and not body.images:
        return await _load_or_unload(call, body, chats=False)
    read = partial(read_text, body, options)
    return await _answer(call, body, options, read, chats=False)


async def _load_or_unload(call: Call, body: AskFields, *, chats: bool) -> Plain:
    name = without_tag(call, body.model)
    if body.unloads:
        call.require_admin()
        await call.service.models.unload(name)
    else:
        await call.model(name)
    reason = "unload" if body.unloads else "load"
    empty = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
    said = {"model": body.model, "created_at": _now(), **empty}
    return said | {"done": True, "done_reason": reason}


async def _answer(
    call: Call,
    body: AskFields,
    options: Options,
    read: Callable[[ServedModel], Input],
    *,
    chats: bool,
) -> Plain | Events:
    began_s = time.monotonic()
    model = await call.model(without_tag(call, body.model))
    load_s = time.monotonic() - began_s
    answers = await call.start(model, lambda: [read(model)])
    explains = bool(options.return_cached_tokens_details)
    writer = SaidWriter(call, body.model, model, answers, load_s, chats, explains)
    if body.stream is not False:
        return Events(call.frames(answers, writer.lines, writer.idle), media_type=NDJSON)
    (result,) = await answers.aresults()
    return writer.whole(result)


@dataclass(slots=True)
class SaidWriter:
    """Writes one answer: whole, or as lines."""

    _call: Call
    _name: str  # of the model, as the request has it
    _model: ServedModel
    _answers: Answers
    _load_s: float  # seconds until the model was loaded
    _chats: bool  # the answer is a message, not a text
    _explains: bool  # the end says why no more of the prompt was reused
    _pieces: list[ToolCallDelta] = field(default_factory=list)  # of the call that has begun

    def whole(self, result: Result) -> Plain:
        said = self._said(result.text, result.reasoning or "", result.tool_calls)
        scored = logprobs_of(self._model.tokenizer, self._answers.answers[0])
        return {**said, **({"logprobs": scored} if scored else {}), **self._ending(result)}

    def lines(self, step: AnswerStep) -> Iterator[bytes]:
        delta, result = step.delta, step.delta.result
        calls = self._complete_calls(delta)
        scored = logprob_of(self._model.tokenizer, self._answers.answers[0], step)
        if delta.text or delta.reasoning or calls or scored:
            said = self._said(delta.text, delta.reasoning, calls)
            yield _line({**said, "logprobs": scored} if scored else said)
        if result is not None:
            yield _line({**self._said("", "", []), **self._ending(result)})

    def idle(self) -> bytes:
        """A line without text, after a silence."""
        return _line(self._said("", "", []))

    def _complete_calls(self, delta: Delta) -> list[ToolCall]:
        """The calls that end with this delta: clients expect each in one piece."""
        calls: list[ToolCall] = []
        for piece in delta.tool_calls:
            self._pieces.append(piece)
            if piece.status is not CallStatus.OPEN:
                calls += joined_calls(self._pieces)
                self._pieces = []
        return calls

    def _said(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> Plain:
        said: Plain = {"model": self._name, "created_at": _now(), "done": False}
        thoughts = {"thinking": thinking} if thinking else {}
        if not self._chats:
            return {**said, "response": text, **thoughts}
        message: Plain = {"role": "assistant", "content": text, **thoughts}
        if calls:
            message["tool_calls"] = [
                {
                    "function": {"name": call.name, "arguments": begun_object(call.arguments)},
                    "id": call.id,
                }
                for call in calls
            ]
        return {**said, "message": message}

    def _ending(self, result: Result) -> Plain:
        """Fields of the last piece: counts, and durations in nanoseconds."""
        timing, load = result.timing, int(1e9 * self._load_s)
        return {
            "done": True,
            "done_reason": str(result.finish_reason),
            "total_duration": int(1e9 * timing.total_s) + load,
            "load_duration": load,
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": int(1e9 * timing.prefill_s),
            "eval_count": len(result.token_ids),
            "eval_duration": int(1e9 * timing.decode_s),
            **reuse_details(self._call.reuse, self._explains),
        }


# -- vectors ------------------------------------------------------------------------------------


class EmbedAsk(RequestBody, kw_only=True):
    """Texts; one that is too long is cut unless `truncate` is false."""

    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = ""
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class OldEmbedAsk(RequestBody, kw_only=True):
    """One text, at the older path."""

    model: str
    prompt: str = ""


async def embed_texts(call: Call, body: EmbedAsk) -> Plain:
    """The vectors of texts; without texts the model is loaded (Ollama's API)."""
    began_s = time.monotonic()
    model = await call.model(without_tag(call, body.model))
    loaded_s = time.monotonic()
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    num_tokens, vectors = await _vectors(
        call, model, texts, body.truncate is not False, body.dimensions
    )
    return {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": int((time.monotonic() - began_s) * 1e9),
        "load_duration": int((loaded_s - began_s) * 1e9),
        "prompt_eval_count": num_tokens,
    }


async def embed_text(call: Call, body: OldEmbedAsk) -> Plain:
    """The vector of a text, as the model gives it (Ollama's API)."""
    model = await call.model(without_tag(call, body.model))
    texts = [body.prompt] if body.prompt else []
    _, vectors = await _vectors(call, model, texts, True, None, normalize=None)
    return {"embedding": vectors[0] if vectors else []}


async def _vectors(
    call: Call,
    model: ServedModel,
    texts: list[str],
    truncate: bool,
    dimensions: int | None,
    *,
    normalize: bool | None = True,
) -> tuple[int, list[list[float]]]:
    model.pooler.require_vectors()
    if not texts:
        return 0, []
    given = EmbedInput(texts=texts, dimensions=dimensions, normalize=normalize, truncate=truncate)
    num_tokens, vectors = await call.pool(model, lambda: model.pooler.read_texts(given))
    return num_tokens, vectors.tolist()


# -- models -------------------------------------------------------------------------------------


class NamedModel(RequestBody, kw_only=True):
    """A request about one model; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: Annotated[Any, Meta(description="not supported")] = None

    @property
    def called(self) -> str:
        return self.model or self.name or ""


def without_tag(call: Call, name: str) -> str:
    """The name of a model or adapter, which clients send with Ollama's tag or without."""
    return name if call.service.models.knows(name) else name.removesuffix(LATEST)


async def tags(call: Call) -> Plain:
    """The models and adapters that requests may name (Ollama's API)."""
    slots = call.service.models.slots()
    return {"models": [_tag(slot, name) for slot in slots for name in (None, *slot.adapters)]}


async def running(call: Call) -> Plain:
    """The models that are loaded (Ollama's API)."""
    models = call.service.models
    stats = await call.service.engine_stats.all(models)
    cards = []
    for slot in models.slots():
        if not slot.loaded:
            continue
        used = slot.weights_bytes + stats.get(slot.entry.name, {}).get("kv_bytes_allocated", 0)
        left_s = slot.ttl_left_s
        expires = datetime.fromtimestamp(call.created_s + (left_s or 0), UTC)
        if left_s is None:  # it stays
            expires = expires.replace(year=expires.year + 100, day=1)
        cards.append(
            {
                **_tag(slot),
                "size": used,  # weights, and pages of the KV cache so far
                "size_vram": used,  # unified memory
                "expires_at": _written(expires),
                "context_length": slot.max_context or 0,
            }
        )
    return {"models": cards}


async def ollama_version(call: Call) -> dict[str, str]:
    """The version of the API (Ollama's API)."""
    return {"version": API_VERSION}


async def show_details(call: Call, body: NamedModel) -> Plain:
    """Describe a model; loads it (Ollama's API)."""
    name = without_tag(call, body.called)
    model, slot = await call.model(name), call.service.models.find(name)
    info = model.session.info
    able, template = model.capabilities, model.tokenizer.template
    named = {"completion": "completion", "tools": "tools", "thinking": "reasoning"}
    named |= {"embedding": "embeddings", "insert": "infill", "vision": "vision"}
    architecture, dim = info.architecture, info.embedding_dim
    return {
        "modelfile": "",
        "parameters": "",
        "template": "" if template is None else template.source_for(None),
        "details": _details(slot),
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": model.session.limits.max_context,
            f"{architecture}.block_count": info.num_layers,
            f"{architecture}.vocab_size": info.vocab_size,
            **({} if dim is None else {f"{architecture}.embedding_length": dim}),
        },
        "capabilities": [name for name, key in named.items() if able[key]],
        "modified_at": _tag(slot)["modified_at"],
    }


async def pull(call: Call, body: NamedModel) -> Any:
    """Download a model from the hub and serve it, if that is allowed (Ollama's API)."""
    service = call.service
    if service.fetch is None:
        raise HttpError(
            "forbidden", "Downloads are off here; the server is started with --allow-pull."
        )
    name = body.called
    if not name:
        raise InvalidRequestError.of("model", "is missing, and is required.")
    lines = _pulling(call, name)
    if body.stream is not False:
        return Events(lines, media_type=NDJSON)
    last = b""
    async for text in lines:
        last = text
    return msgspec.json.decode(last)


async def _pulling(call: Call, name: str) -> AsyncIterator[bytes]:
    """Yield lines of progress until the model is served; a client that leaves stops watching."""
    fetch = call.service.fetch
    assert fetch is not None
    seen = [(0, 0)]
    yield _line({"status": "pulling manifest"})
    pending = apart(lambda: fetch(name, seen.append), "mlxinfer-pull")
    digest = _digest(name)
    while not pending.done():
        await asyncio.wait({pending}, timeout=POLL_S)
        done, total = seen[-1]
        state = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
        yield _line({**state, "total": total, "completed": done})
    entry = await pending
    if name not in call.service.models.names():
        call.service.add_model(entry)
    yield _line({"status": "success"})


def _tag(slot: ModelSlot, adapter: str | None = None) -> Plain:
    entry = slot.entry
    called = entry.name if adapter is None else f"{entry.name}:{adapter}"
    name = called if ":" in called else f"{called}{LATEST}"
    return {
        "name": name,
        "model": name,
        "modified_at": _written(datetime.fromtimestamp(entry.created_s, UTC)),
        "size": slot.weights_bytes,
        "digest": _digest(called),  # of the name: the files are not hashed
        "details": _details(slot),
    }


def _details(slot: ModelSlot) -> Plain:
    info = None if slot.served is None else slot.served.session.info
    family = "" if info is None else info.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "" if info is None else info.quantization or "",
    }


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _now() -> str:
    return _written(datetime.now(UTC))


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


def _error(error: MlxinferError) -> bytes:
    return encode({"error": clipped_message(error)})


OLLAMA = ErrorForm(body=_error, event=lambda error: _error(error) + b"\n")
