"""POST /api/chat and /api/generate."""

import time
from collections.abc import AsyncIterator
from typing import Any

from msgspec import UNSET

from ...core import SamplingParams
from ...errors import InvalidRequestError, TemplateError
from ...grammar import GrammarSpec
from ...outputs import CallStatus, Delta, Result, ToolCall, ToolCallDelta, joined_calls
from ...session.output_processor import OutputProcessor
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.grammar import ollama_format, start_answers
from ..fields.prompt import (
    check_messages,
    check_texts,
    effort_variables,
    fitted,
    infill_prompt,
    text_check,
)
from ..fields.sampling import UNLIMITED, sampling_params
from ..fields.tools import begun_object
from ..fields.tools import tool_use as plan_tools
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .models import slot_of
from .types import (
    NDJSON,
    OLLAMA,
    AskFields,
    Called,
    CallFunction,
    ChatAsk,
    ChatTurn,
    GenerateAsk,
    Options,
    Said,
    SaidMessage,
    line,
    no_images,
    now,
)

Plain = dict[str, Any]


async def ollama_chat(call: Call, body: ChatAsk) -> Reply:
    """Answer a conversation."""
    options = body.prepare()
    if not body.messages:
        return await _load_or_unload(call, body, chats=True)
    began_s = time.monotonic()
    model = await call.model(slot_of(call, body.model).entry.name)
    load_s = time.monotonic() - began_s
    answer = await call.in_worker(_read_chat, model, body, options)
    run = _Run(call, body.model, call.generate(model, [answer]), load_s, chats=True)
    return await run.reply(streams=body.stream is not False)


async def ollama_generate(call: Call, body: GenerateAsk) -> Reply:
    """Answer a text, or continue it."""
    options = body.prepare()
    if not body.prompt and not body.suffix:
        return await _load_or_unload(call, body, chats=False)
    began_s = time.monotonic()
    model = await call.model(slot_of(call, body.model).entry.name)
    load_s = time.monotonic() - began_s
    answer = await call.in_worker(_read_text, model, body, options)
    run = _Run(call, body.model, call.generate(model, [answer]), load_s, chats=False)
    return await run.reply(streams=body.stream is not False)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/chat",
        handler=ollama_chat,
        summary="Answer a conversation (Ollama's API).",
        body=ChatAsk,
        answer=Said,
        style=OLLAMA,
    ),
    Endpoint(
        method="POST",
        path="/api/generate",
        handler=ollama_generate,
        summary="Answer or continue a text (Ollama's API).",
        body=GenerateAsk,
        answer=Said,
        style=OLLAMA,
    ),
)


async def _load_or_unload(call: Call, body: AskFields, *, chats: bool) -> Reply:
    """What Ollama's clients do with a request without a prompt."""
    name = slot_of(call, body.model).entry.name
    if body.unloads:
        await call.service.models.unload(name)
    else:
        await call.model(name)
    said = Said(model=body.model, created_at=now(), done=True)
    said.done_reason = "unload" if body.unloads else "load"
    if chats:
        said.message = SaidMessage()
    else:
        said.response = ""
    return json_body(said)


def _read_chat(model: ServedModel, body: ChatAsk, options: Options) -> OutputProcessor:
    """The answer to be generated to a conversation. Takes a while."""
    use = plan_tools(model, body.tools, None)
    messages = [_message(turn, f"messages[{i}]") for i, turn in enumerate(body.messages)]
    ids = _encode(model, messages, body, tools=None if use is None else use.shown)
    (answer,) = start_answers(
        model, options, ids, _params(model, options, len(ids)), _form(body), use
    )
    return answer


def _read_text(model: ServedModel, body: GenerateAsk, options: Options) -> OutputProcessor:
    """The answer to be generated to a text. Takes a while."""
    ids, ends = _text_prompt(model, body)
    plain = bool(body.raw or body.suffix)
    params = _params(model, options, len(ids))
    (answer,) = start_answers(
        model, options, ids, params, _form(body), continues=plain, reasons=not plain
    )
    answer.request.stop_ids |= ends
    return answer


def _text_prompt(model: ServedModel, body: GenerateAsk) -> tuple[list[int], frozenset[int]]:
    """The prompt ids, and tokens that end the answer."""
    if body.suffix:
        prompt = infill_prompt(model, body.prompt, body.suffix)
        return prompt.ids, prompt.end_ids
    if body.raw:
        check_texts(model, [body.prompt], param="prompt")
        return model.tokenizer.encode(body.prompt, parse_special=True), frozenset()
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    return _encode(model, messages, body), frozenset()


def _form(body: AskFields) -> GrammarSpec | None:
    return None if body.format is None else ollama_format(body.format, place="format")


def _encode(model: ServedModel, messages: list[Plain], body: AskFields, tools: Any = None) -> Any:
    template = model.tokenizer.template
    if template is None:
        raise TemplateError(f"The model {model.name!r} has no chat template; send raw: true.")
    source = template.source_for(tools)
    variables: Plain = {}
    if isinstance(body.think, bool):
        variables = {"enable_thinking": body.think} if "enable_thinking" in source else {}
    else:
        variables = effort_variables(body.think, source)
    check_messages(model, messages, param="messages")
    check = text_check(model, param="messages")
    return model.builder.encode_chat(messages, check, tools=tools, **variables)


def _message(turn: ChatTurn, path: str) -> Plain:
    """A message as templates read it."""
    if turn.images:
        raise no_images(f"{path}.images")
    if turn.content is None and turn.role != "assistant":
        raise InvalidRequestError(f"{path}.content is missing.", param=f"{path}.content")
    plain: Plain = {"role": turn.role, "content": turn.content or ""}
    if turn.thinking:
        plain["reasoning_content"] = turn.thinking
    if turn.role == "tool":
        plain |= {"name": turn.tool_name} if turn.tool_name else {}
        plain |= {"tool_call_id": turn.tool_call_id} if turn.tool_call_id else {}
    if turn.tool_calls:
        plain["tool_calls"] = [
            {
                "id": each.id or f"call_{place}",
                "type": "function",
                "function": {"name": each.function.name, "arguments": each.function.arguments},
            }
            for place, each in enumerate(turn.tool_calls)
        ]
    return plain


def _params(model: ServedModel, options: Options, num_prompt: int) -> list[SamplingParams]:
    limit = options.max_tokens
    max_tokens = None if limit is None or limit == UNLIMITED else max(limit, 1)
    params = sampling_params(options, model, max_tokens=max_tokens, logprobs=None)
    return fitted(model, params, num_prompt, param="prompt")


class _Run:
    """One generation on its way into an answer or a stream of lines."""

    def __init__(
        self, call: Call, name: str, generation: Generation, load_s: float, *, chats: bool
    ) -> None:
        self._call, self._name, self._generation = call, name, generation
        self._load_s, self._chats = load_s, chats
        self._pieces: list[ToolCallDelta] = []  # of the call that has begun

    async def reply(self, *, streams: bool) -> Reply:
        """The answer, whole or as lines."""
        if streams:
            return Events(self._lines(), media_type=NDJSON)
        (result,) = await self._generation.results()
        said = self._said(result.text, result.reasoning or "", list(result.tool_calls))
        return json_body(self._ended(said, result))

    async def _lines(self) -> AsyncIterator[bytes]:
        self._call.log["stream"] = True
        async for steps in self._generation.steps():
            for step in steps:
                delta, result = step.delta, step.delta.result
                calls = self._whole_calls(delta)
                if delta.text or delta.reasoning or calls:
                    yield line(self._said(delta.text, delta.reasoning, calls))
                if result is not None:
                    yield line(self._ended(self._said("", "", []), result))

    def _whole_calls(self, delta: Delta) -> list[ToolCall]:
        """The calls that end with this delta: clients expect each in one piece."""
        found: list[ToolCall] = []
        for piece in delta.tool_calls:
            self._pieces.append(piece)
            if piece.status is not CallStatus.OPEN:
                found += joined_calls(self._pieces)
                self._pieces = []
        return found

    def _said(self, text: str, thinking: str, calls: list[ToolCall]) -> Said:
        called = [
            Called(
                id=each.id,
                function=CallFunction(name=each.name, arguments=begun_object(each.arguments)),
            )
            for each in calls
        ]
        said = Said(model=self._name, created_at=now())
        if self._chats:
            said.message = SaidMessage(content=text, tool_calls=called or UNSET)
            said.message.thinking = thinking or UNSET
        else:
            said.response, said.thinking = text, thinking or UNSET
        return said

    def _ended(self, said: Said, result: Result) -> Said:
        """The last piece, with counts and durations."""
        timing = result.timing
        self._call.log.update(
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            answer_tokens=len(result.token_ids),
            finish_reason=str(result.finish_reason),
        )
        said.done, said.done_reason = True, str(result.finish_reason)
        said.load_duration = int(1e9 * self._load_s)
        said.prompt_eval_count = result.prompt_tokens
        said.prompt_eval_duration = int(1e9 * timing.prefill_s)
        said.eval_count = len(result.token_ids)
        said.eval_duration = int(1e9 * timing.decode_s)
        said.total_duration = int(1e9 * timing.total_s) + said.load_duration
        return said
