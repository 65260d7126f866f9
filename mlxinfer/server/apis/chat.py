"""POST /v1/chat/completions: OpenAI's chat."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import MAX_LOGPROBS, FinishReason
from ...errors import InvalidRequestError, UnsupportedFieldError
from ...outputs import CallStatus, Result, ToolCall, ToolCallDelta, split
from ...session.answers import Answers, AnswerStep
from ...session.inputs import ChatInput
from ...text import Content
from ..call import Call
from ..http import DONE, Events, Plain, data, refuse, same_field
from ..slots import ServedModel
from .documents import PdfPart, SentFile, read_pdfs
from .sampling import (
    BUDGETS,
    REFUSED,
    UNLIMITED,
    ConstraintFields,
    ReasoningLimit,
    TokenLimit,
    check_json_size,
    constraint,
    sampling_params,
)
from .tools import (
    INPUT,
    DeclaredTool,
    DeclaredTools,
    ImageUrl,
    call_arguments,
    check_tools,
    custom_input,
    function_call,
    newest_turn,
    part_text,
    read_chat_tools,
    read_content,
    skip,
    text_part,
    url_part,
    video_part,
)
from .usage import (
    FINGERPRINT,
    logprob_of,
    logprobs_of,
    progress_of,
    reuse_details,
    timings_of,
    usage_of,
)

CHUNK = "chat.completion.chunk"
MAX_VARIABLE_DEPTH = 8  # levels of JSON of a template variable
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# -- the request --------------------------------------------------------------------------------


class MessagePart(msgspec.Struct, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: ImageUrl | str | None = None  # as vLLM has it
    file: SentFile | None = None


class CalledTool(msgspec.Struct, kw_only=True):
    """The function of a call, with JSON as arguments, or its custom tool, with an input."""

    name: str
    arguments: str = "{}"
    input: str = ""


class EarlierCall(msgspec.Struct, kw_only=True):
    """A call in an earlier answer of the assistant."""

    function: CalledTool | None = None
    custom: CalledTool | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of the same
    refusal: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """The switch of DeepSeek's and GLM's APIs, and Anthropic's budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ReasoningLimit | None = None


class ReasoningSwitch(msgspec.Struct, kw_only=True):
    """The switch of OpenRouter's API."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: ReasoningLimit | None = None
    exclude: Any = None


class ChatRequest(ConstraintFields, kw_only=True):
    """A conversation to be answered.

    A call that tool_choice demands always conforms to its tool's schema. So does a call that the
    model chooses to make, if a tool is `strict` and the model marks calls by special tokens, as
    nearly all do; for calls in plain text (Llama 3) `strict` has no effect. An answer has at most
    32 calls under such a grammar (`text/tools/lark.py`), or one if parallel_tool_calls is false, so
    that it ends whatever the model does.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "echo": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    }

    messages: list[Message]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningSwitch | None = None
    reasoning_budget: Annotated[int, Meta(ge=-1)] | None = None  # of llama.cpp; -1: no limit
    thinking_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None  # llama.cpp's too
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None  # of vLLM

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer; None: until the context is full."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        given: int | None = getattr(self, name)
        if given == 0:
            raise InvalidRequestError.of(name, "is 0; expected 1 or more.")
        return None if given == UNLIMITED else given

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are named beside each; None: none are scored."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError.of("top_logprobs", "goes with logprobs: true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def reasoning_limit(self) -> int | None:
        """The most tokens of reasoning, under any of its names; None: no limit."""
        given = {name: getattr(self, name) for name in BUDGETS}
        if isinstance(self.thinking, ThinkingSwitch):
            given["thinking.budget_tokens"] = self.thinking.budget_tokens
        if self.reasoning is not None:
            given["reasoning.max_tokens"] = self.reasoning.max_tokens
        return same_field({name: limit for name, limit in given.items() if limit and limit > 0})

    def resolve(self) -> None:
        """Give other servers' switches of reasoning to the chat template."""
        switch = self.reasoning or ReasoningSwitch()
        refuse("reasoning.exclude", switch.exclude, (False,))
        thinking = self.thinking
        if isinstance(thinking, ThinkingSwitch):
            thinking = thinking.type != "disabled"
        by_effort = None if isinstance(self.think, bool) else self.think
        self.reasoning_effort = same_field(
            {
                "reasoning_effort": self.reasoning_effort,
                "think": by_effort,
                "reasoning.effort": switch.effort,
            }
        )
        wishes: dict[str, bool | None] = {
            "enable_thinking": self.enable_thinking,
            "thinking": thinking,
            "think": self.think if isinstance(self.think, bool) else None,
            "reasoning.enabled": switch.enabled,
            **{name: False for name in BUDGETS if getattr(self, name) == 0},
        }
        for name, enabled in wishes.items():
            if enabled is None:
                continue
            kwargs = self.chat_template_kwargs = dict(self.chat_template_kwargs or {})
            if kwargs.setdefault("enable_thinking", enabled) is not enabled:
                raise InvalidRequestError.of(
                    name, "contradicts another field that switches reasoning."
                )


def template_messages(messages: Sequence[Message], skipped: list[str]) -> list[Plain]:
    """The messages as chat templates read them.

    Text parts are joined by newlines, unless there are pictures among them. Arguments of tool calls
    become objects. Notes stand for parts of earlier turns that cannot be read; `skipped` gets their
    places.
    """
    if not messages:
        raise InvalidRequestError.of("messages", "is empty; send at least one.")
    newest = newest_turn([message.role for message in messages])
    return [
        template_message(message, f"messages[{i}]", skipped if i < newest else None)
        for i, message in enumerate(messages)
    ]


def template_message(message: Message, path: str, notes: list[str] | None = None) -> Plain:
    for name in ("audio", "function_call"):
        if getattr(message, name) is None:
            continue
        if notes is None:
            raise UnsupportedFieldError.of(f"{path}.{name}", "is not supported.")
        skip(notes, f"{path}.{name}", name)
    if message.role == "function":
        raise UnsupportedFieldError(
            f"{path}: the role function is not supported; use tool.", param=f"{path}.role"
        )
    content: Content | None = message.refusal
    if message.content is not None:
        content = read_content(message.content, _part, f"{path}.content", notes)
    if content is None and message.role == "tool":  # a tool that says nothing
        content = ""
    if content is None and message.role != "assistant":
        raise InvalidRequestError.of(f"{path}.content", "is missing.")
    if content is None and not message.tool_calls:
        content = ""
    plain: Plain = {"role": message.role, "content": content}
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
    }
    plain |= {key: value for key, value in optional.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            _earlier_call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _part(part: MessagePart, path: str) -> Plain:
    if part.type == "image_url":
        return url_part(*_url(part.image_url, f"{path}.image_url"))
    if part.type == "video_url":
        return video_part(*_url(part.video_url, f"{path}.video_url"))
    if part.type == "file":
        return text_part((part.file or SentFile()).shown(f"{path}.file"))
    return text_part(part_text(part.type, part.text or part.refusal, path))


def pdfs_of(messages: Sequence[Message]) -> Iterator[PdfPart]:
    newest = newest_turn([message.role for message in messages])
    for number, message in enumerate(messages):
        parts = [] if isinstance(message.content, str) else message.content or ()
        for place, part in enumerate(parts):
            if part.file is not None:
                path = f"messages[{number}].content[{place}].file"
                yield from part.file.pdfs(path, is_earlier=number < newest)


def _url(given: ImageUrl | str | None, path: str) -> tuple[str | None, str | None, str]:
    if isinstance(given, ImageUrl):
        return given.url, given.detail, f"{path}.url"
    return given, None, path


def _earlier_call(call: EarlierCall, path: str) -> dict[str, Any]:
    if call.type == "custom" and call.custom is not None:
        return function_call(call.id, call.custom.name, {INPUT: call.custom.input})
    if call.type == "function" and call.function is not None:
        arguments = call_arguments(call.function.arguments)
        return function_call(call.id, call.function.name, arguments)
    raise InvalidRequestError.of(f"{path}.{call.type}", "is missing, and is required.")


def read(body: ChatRequest, model: ServedModel, tools: DeclaredTools) -> ChatInput:
    check_tools(body.tools, body.tool_choice)
    read_chat_tools(body.tools, tools)
    kwargs = dict(body.chat_template_kwargs or {})
    check_json_size(kwargs, param="chat_template_kwargs", max_depth=MAX_VARIABLE_DEPTH)
    choice = body.tool_choice
    if tools.declared or (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        choice = tools.choose(choice)
    return ChatInput(
        messages=template_messages(body.messages, tools.skipped),
        tools=tools.functions,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        constraint=constraint(body),
        params=sampling_params(
            body,
            model,
            max_tokens=body.token_limit,
            stop=body.stops,
            logprobs=body.num_logprobs,
            max_reasoning_tokens=body.reasoning_limit,
        ),
        n=body.n or 1,
        cache_salt=body.cache_salt,
        id_slot=body.id_slot,
        reports_prompt=body.wants_progress,
        template_variables=kwargs,
        ignores_unread=True,
        reasoning_effort=body.reasoning_effort,
        continues=bool(body.continue_final_message),
        begins=body.add_generation_prompt,
    )


# -- the answer ---------------------------------------------------------------------------------


async def chat(call: Call, body: ChatRequest) -> Plain | Events:
    """Answer a conversation."""
    model = await call.model(body.model)
    call.require_place()
    tools = DeclaredTools(skipped=await read_pdfs(call, pdfs_of(body.messages)))
    answers = await call.start(model, lambda: [read(body, model, tools)])
    call.report_skipped(tools.skipped)
    writer = ChatWriter(call, body, model, answers, tools.declared)
    if body.stream:
        return Events(writer.frames())
    return writer.whole(await answers.aresults())


@dataclass(slots=True)
class ChatWriter:
    """Writes the answers to one request: whole, or as chunks."""

    call: Call
    body: ChatRequest
    model: ServedModel
    answers: Answers
    declared: Mapping[str, DeclaredTool]
    _custom: dict[tuple[int, int], list[ToolCallDelta]] = field(default_factory=dict)

    def whole(self, results: Sequence[Result]) -> Plain:
        """The answer to a request without `stream`."""
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        timings = {"timings": choices[0]["timings"]} if self.body.wants_timings else {}
        return self._object("chat.completion", choices, usage=self._usage(), **timings)

    def _choice(self, index: int, result: Result) -> Plain:
        message: Plain = {
            "role": "assistant",
            "content": None if result.tool_calls and not result.text else result.text,
            "refusal": None,
        }
        if result.reasoning is not None:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["tool_calls"] = [self._tool_call(call) for call in result.tool_calls]
        scored = logprobs_of(self.model.tokenizer, self.answers.answers[index])
        choice = _choice(index, message=message, reason=finish_reason(result), scored=scored)
        if self.body.wants_timings:
            choice["timings"] = timings_of(result)
        if self.body.return_token_ids:
            choice["token_ids"] = list(result.token_ids)
        return choice

    def _tool_call(self, call: ToolCall) -> Plain:
        if call.name in self.declared:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return function_call(call.id, call.name, call.arguments)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the role, the deltas, the token counts if they were asked for, and [DONE]."""
        count = len(self.answers.answers)
        role = {"role": "assistant", "content": ""}
        yield b"".join(self._frame(_choice(i, delta=role)) for i in range(count))
        async for frames in self.call.frames(
            self.answers, self.step_frames, lambda: self._frame(_choice(0, delta={}))
        ):
            yield frames
        if self.body.wants_usage:
            yield data(self._object(CHUNK, [], usage=self._usage()))
        yield DONE

    def step_frames(self, step: AnswerStep) -> Iterator[bytes]:
        """The frames of a step: none while its text is held back, two where the answer ends."""
        delta, body = step.delta, self.body
        text, reasoning, calls = split(delta.parts)
        if step.progress is not None:
            progress = progress_of(step.progress)
            choices = [_choice(step.index, delta={})]
            yield data(self._object(CHUNK, choices, prompt_progress=progress))
            return
        scored: list[Plain] = []
        if step.logprobs is not None:
            scored = logprob_of(self.model.tokenizer, self.answers.answers[step.index], step)
        pieces = [p for call in calls for p in self._pieces(step.index, call)]
        ids = list(delta.token_ids) if body.return_token_ids else []
        if text or reasoning or pieces or scored or ids:
            fields: Plain = {}
            if text or not (reasoning or pieces):
                fields["content"] = text
            if reasoning:
                fields["reasoning_content"] = reasoning
            if pieces:
                fields["tool_calls"] = pieces
            choice = _choice(step.index, delta=fields, scored=scored or None)
            yield self._frame({**choice, "token_ids": ids} if ids else choice)
        if delta.result is not None:
            last = _choice(step.index, delta={}, reason=finish_reason(delta.result))
            timings = {"timings": timings_of(delta.result)} if body.wants_timings else {}
            yield self._frame({**last, **timings}, **timings)

    def _frame(self, choice: Plain, **rest: Any) -> bytes:
        if self.body.wants_usage:
            running = self.body.wants_running_usage
            rest["usage"] = self._usage() if running else None
        return data(self._object(CHUNK, [choice], **rest))

    def _usage(self) -> Plain:
        reused = reuse_details(self.call.reuse, self.body.return_cached_tokens_details)
        return usage_of(self.answers, reused)

    def _object(self, kind: str, choices: list[Plain], **rest: Any) -> Plain:
        return {
            "id": f"chatcmpl-{self.call.id}",
            "object": kind,
            "created": self.call.created_s,
            "model": self.model.name,
            "choices": choices,
            "system_fingerprint": FINGERPRINT,
            **rest,
        }

    def _pieces(self, choice: int, piece: ToolCallDelta) -> Iterator[Plain]:
        """A delta of a call; that of a custom tool comes once its arguments are complete."""
        place = (choice, piece.index)
        if piece.name not in self.declared and place not in self._custom:
            if piece.id is not None or piece.arguments:
                yield _function_piece(piece)
            return
        begun = self._custom.setdefault(place, [])
        begun.append(piece)
        if piece.status is CallStatus.OPEN:
            return
        del self._custom[place]
        if piece.status is not CallStatus.BROKEN:  # a broken call follows as text
            text = custom_input("".join(delta.arguments for delta in begun))
            custom = {"name": begun[0].name, "input": text}
            yield {"index": piece.index, "id": begun[0].id, "type": "custom", "custom": custom}


def _choice(
    index: int, *, reason: str | None = None, scored: list[Plain] | None = None, **content: Plain
) -> Plain:
    logprobs = None if scored is None else {"content": scored, "refusal": None}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def finish_reason(result: Result) -> str:
    """OpenAI's finish reason: `tool_calls` for an answer that ended with calls."""
    if result.tool_calls and result.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return str(result.finish_reason)


def _function_piece(piece: ToolCallDelta) -> Plain:
    if piece.id is None or piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **function_call(piece.id, piece.name, piece.arguments)}
