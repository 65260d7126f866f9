"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...core import FinishReason
from ...errors import (
    InvalidRequestError,
    MlxinferError,
    PictureError,
    PromptTooLongError,
    UnsupportedFieldError,
)
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
from ...session.answers import Answer, Answers, AnswerStep
from ...session.inputs import ChatInput
from ...text import around, joined
from ..call import Call
from ..http import ErrorForm, Events, Plain, clipped_message, encode, named, refuse
from ..slots import ServedModel
from .documents import (
    PDF,
    PdfPart,
    check_text_type,
    read_pdfs,
    shown_file,
    text_of_file,
)
from .sampling import (
    MAX_STOPS,
    REFUSED_ELSEWHERE,
    SamplerFields,
    StopString,
    read_form,
    sampling_params,
)
from .tools import (
    base64_part,
    begun_object,
    check_tools,
    function_call,
    newest_turn,
    not_text,
    part_text,
    read_content,
    skip,
    text_part,
    url_part,
)
from .usage import reuse_details

PING = named("ping", {"type": "ping"})
# Claude Code's first line: it differs with each version and session, and says nothing to a model.
BILLING = "x-anthropic-billing-header:"


# -- the request --------------------------------------------------------------------------------


class BlockSource(msgspec.Struct, kw_only=True):
    """The content of a document or of a picture."""

    type: str
    media_type: str = "text/plain"
    data: str | None = None
    url: str | None = None  # of a picture
    content: "str | list[ContentBlock] | None" = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A content block of any type: of a message, a system prompt or a tool result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    # one block: of hosted tools
    content: "str | list[ContentBlock] | ContentBlock | None" = None
    is_error: bool | None = None
    source: "BlockSource | str | None" = None  # of a search result: its URL
    title: str | None = None
    tool_name: str | None = None  # of a tool_reference

    @property
    def parts(self) -> "str | list[ContentBlock]":
        """The content."""
        return [self.content] if isinstance(self.content, ContentBlock) else self.content or ""


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn; system messages may be among them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client's own, one with a schema that Anthropic has defined, or a hosted one."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool is used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model may reason before it answers.

    The switch has no effect on templates without one. The budget holds whatever the template: the
    reasoning is closed after so many tokens.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None


class CountRequest(SamplerFields, kw_only=True):
    """A conversation, for its tokens to be counted."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED_ELSEWHERE,
        "mcp_servers": ([],),
        "container": (),
    }

    messages: Annotated[list[AnthropicMessage], Meta(max_length=100_000)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountRequest.refused,
        "speed": ("standard",),
        "diagnostics": (),
        "stop": ([],),
        "n": (1,),
        "logprobs": (False,),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
    }

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are shown; otherwise their blocks are empty."""
        return self.thinking is None or self.thinking.display != "omitted"

    def resolve(self) -> None:
        """Raise InvalidRequestError for a budget of thinking that leaves the answer nothing."""
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            if budget is not None and budget >= self.max_tokens:  # some clients send none
                raise InvalidRequestError.of(
                    "thinking.budget_tokens",
                    f"is {budget}; expected a number below max_tokens, {self.max_tokens}.",
                )


def _keeps_all(management: Any) -> bool:
    """Whether a context_management asks for what happens anyway: nothing is cleared."""
    edits = management.get("edits", []) if isinstance(management, dict) else None
    return management is None or (
        isinstance(edits, list)
        and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
    )


def read(body: CountRequest, skipped: list[str], **fields: Any) -> ChatInput:
    """The conversation of a request. Takes a while.

    Args:
        body: of the request.
        skipped: gets hosted tools and their blocks.
        fields: further fields of ChatInput.
    """
    effort = body.output_config.effort if body.output_config else None
    variables: Plain = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    choice = body.tool_choice
    tools = openai_tools(body.tools, skipped)
    check_tools(tools)
    if not _keeps_all(body.context_management):
        skip(skipped, "context_management", "edits")
    return ChatInput(
        messages=conversation(body, skipped),
        tools=tools,
        tool_choice=_openai_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        template_variables=variables,
        ignores_unread=True,
        reasoning_effort=effort,
        continues=_continues_last(body.messages),
        cache_salt=body.cache_salt,
        id_slot=body.id_slot,
        **fields,
    )


def read_messages(body: MessagesRequest, model: ServedModel, skipped: list[str]) -> ChatInput:
    """The conversation that a request wants answered. Takes a while."""
    form = body.output_config.format if body.output_config else None
    return read(
        body,
        skipped,
        constraint=None if form is None else read_form(form, "output_config.format"),
        params=sampling_params(
            body,
            model,
            max_tokens=body.max_tokens,
            max_reasoning_tokens=body.thinking.budget_tokens if body.thinking else None,
            stop=tuple(body.stop_sequences or ()),
        ),
    )


def conversation(body: CountRequest, skipped: list[str]) -> list[Plain]:
    """System prompt and turns; neighbours of one role become one message.

    A tool result is a message of the role tool; one that reports an error says so in its text.
    Blocks of tools that Anthropic's servers run are left out, and noted in `skipped`.

    Raises:
        InvalidRequestError: no messages, or an incomplete block.
        PictureError: a picture is none.
        UnsupportedFieldError: blocks that are neither text nor pictures.
    """
    if not body.messages:
        raise InvalidRequestError.of("messages", "is empty; send at least one.")
    messages: list[Plain] = []
    system = _without_billing(_text(body.system, "system")) if body.system else ""
    if system:
        messages.append({"role": "system", "content": system})
    newest = newest_turn([message.role for message in body.messages])
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        for plain in _turn(message, place, skipped, is_earlier=number < newest):
            if messages and _together(messages[-1], plain):
                messages[-1]["content"] = joined(messages[-1]["content"], plain["content"], "\n\n")
            else:
                messages.append(plain)
    return messages


def _without_billing(system: str) -> str:
    """The system prompt without Claude Code's first line, so that its prefix stays the same."""
    first, _, rest = system.partition("\n")
    return rest.lstrip("\n") if first.startswith(BILLING) else system


def _together(one: Plain, two: Plain) -> bool:
    """Whether two messages are one turn in Anthropic's API."""
    plain = {"role", "content"}
    return one["role"] == two["role"] and one["role"] != "tool" and set(one) == set(two) == plain


def _continues_last(messages: Sequence[AnthropicMessage]) -> bool:
    """Whether the answer continues the last message, the assistant's (a prefill).

    Raises:
        InvalidRequestError: that message calls a tool, and its result is missing.
    """
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    if isinstance(last.content, list) and any(b.type == "tool_use" for b in last.content):
        raise InvalidRequestError(
            "The last message calls a tool; its tool_result has to follow.", param="messages"
        )
    return True


def openai_tools(tools: Sequence[AnthropicTool] | None, skipped: list[str]) -> list[Plain]:
    """The tools in OpenAI's form, which templates expect.

    Tools that clients run by a schema of Anthropic's (shell, text editor) have that schema; tools
    that Anthropic's servers run are left out, and noted in `skipped`.

    Raises:
        UnsupportedFieldError: a field that would change the answer.
    """
    functions = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if tool.type is not None and tool.type != "custom" and tool.type not in DEFINED:
            skip(skipped, where, tool.type)
            continue
        if tool.name is None:
            raise InvalidRequestError.of(f"{where}.name", "is missing, and is required.")
        if tool.defer_loading:  # it is told at once: nothing here searches for tools
            skip(skipped, where, "defer_loading")
        refuse(f"{where}.allowed_callers", tool.allowed_callers, (["direct"],))
        function: Plain = {"name": tool.name, **DEFINED.get(tool.type or "", {})}
        function.setdefault("parameters", tool.input_schema or {})
        if tool.description:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        functions.append({"type": "function", "function": function})
    return functions


def _openai_choice(choice: ToolChoice | None) -> str | Plain:
    """The tool_choice in OpenAI's form; raises InvalidRequestError for a missing name."""
    if choice is None:
        return "auto"
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise InvalidRequestError.of("tool_choice.name", "is missing.")
    return {"type": "function", "function": {"name": choice.name}}


def _turn(
    message: AnthropicMessage, path: str, skipped: list[str], *, is_earlier: bool
) -> list[Plain]:
    if message.role == "assistant":
        content = message.content
        return [_earlier_answer(content, f"{path}.content", skipped, is_earlier=is_earlier)]
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": _text(message.content, f"{path}.content")}]
    messages: list[Plain] = []
    rest: list[ContentBlock] = []
    read_part = partial(_part, skipped=skipped)
    notes = skipped if is_earlier else None
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            messages.append(_tool_result(block, read_part, f"{path}.content[{number}]", notes))
        else:
            rest.append(block)
    if rest or not messages:
        said = read_content(rest, read_part, f"{path}.content", notes)
        messages.append({"role": "user", "content": said})
    return messages


def _earlier_answer(
    content: str | list[ContentBlock], path: str, skipped: list[str], *, is_earlier: bool
) -> Plain:
    """An earlier answer: its text, reasoning and calls; one to be continued is not `is_earlier`."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    of_type: dict[str, list[ContentBlock]] = {"text": [], "thinking": [], "tool_use": []}
    for number, block in enumerate(content):
        if block.type not in of_type:
            if not (is_earlier or block.type in HOSTED_BLOCKS):
                raise not_text(block.type, f"{path}[{number}]")
            skip(skipped, f"{path}[{number}]", block.type)
            continue
        of_type[block.type].append(block)
    plain: Plain = {"role": "assistant", "content": _text(of_type["text"], path)}
    thoughts = [block.thinking or "" for block in of_type["thinking"]]
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if of_type["tool_use"]:
        plain["tool_calls"] = [_earlier_call(block, path) for block in of_type["tool_use"]]
    return plain


def _earlier_call(block: ContentBlock, path: str) -> Plain:
    if block.name is None or block.id is None:
        raise InvalidRequestError(f"{path}: a tool_use has neither name nor id.", param=path)
    return function_call(block.id, block.name, block.input or {})


def _tool_result(
    block: ContentBlock,
    read_part: Callable[[ContentBlock, str], Plain],
    path: str,
    notes: list[str] | None,
) -> Plain:
    if block.tool_use_id is None:
        raise InvalidRequestError.of(f"{path}.tool_use_id", "is missing.")
    content = read_content(block.parts, read_part, f"{path}.content", notes)
    if block.is_error:
        content = around(content, "Error: ")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _part(block: ContentBlock, path: str, skipped: list[str]) -> Plain:
    """A part, or the name of a tool that `skipped` gets."""
    if block.type == "tool_reference":
        skip(skipped, path, block.type)
        return text_part(f"[tool {block.tool_name}]")
    source = block.source
    if block.type != "image" or not isinstance(source, BlockSource):
        return text_part(_block_text(block, path))
    if source.type == "url":
        return url_part(source.url, None, f"{path}.source.url")
    if source.type != "base64" or source.data is None:
        raise PictureError.of(f"{path}.source", "is no picture in base64, and has no URL.")
    return base64_part(source.data, f"{path}.source.data")


def _text(content: str | Sequence[ContentBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_block_text(block, f"{path}[{i}]") for i, block in enumerate(content)])


def _block_text(block: ContentBlock, path: str) -> str:
    if block.type == "search_result" and isinstance(block.source, str):
        text = _text(block.parts, f"{path}.content")
        return shown_file(text, block.title or block.source)
    if block.type == "document" and isinstance(block.source, BlockSource):
        return shown_file(_document(block, block.source, path), block.title)
    return part_text(block.type, block.text, path, ("text",))


def _document(block: ContentBlock, source: BlockSource, path: str) -> str:
    if source.type == "content" and source.content is not None:
        return _text(source.content, f"{path}.source.content")
    if source.type not in ("text", "base64") or source.data is None:
        raise UnsupportedFieldError.of(
            f"{path}.source", "of this document holds no file; send it as text or in base64."
        )
    check_text_type(source.media_type, f"{path}.source.media_type")
    if source.type == "text":
        return source.data
    return text_of_file(source.data, f"{path}.source.data")


def _pdfs(body: CountRequest) -> Iterator[PdfPart]:
    """The PDFs in the system prompt, in messages and tool results."""
    for block, path in _blocks(body.system, "system"):
        yield from _pdf(block, path)
    newest = newest_turn([message.role for message in body.messages])
    for number, message in enumerate(body.messages):
        place = f"messages[{number}].content"
        for block, path in _blocks(message.content, place):
            yield from _pdf(block, path, is_earlier=number < newest)
            for inner, inner_path in _blocks(block.parts, f"{path}.content"):
                yield from _pdf(inner, inner_path, is_earlier=number < newest)


def _blocks(
    content: str | list[ContentBlock] | None, path: str
) -> Iterator[tuple[ContentBlock, str]]:
    for number, block in enumerate([] if isinstance(content, str) else content or ()):
        yield block, f"{path}[{number}]"


def _pdf(block: ContentBlock, path: str, *, is_earlier: bool = False) -> Iterator[PdfPart]:
    source = block.source
    if (
        block.type == "document"
        and isinstance(source, BlockSource)
        and (source.type, source.media_type.lower()) == ("base64", PDF)
        and source.data is not None
    ):
        place = f"{path}.source.data"
        yield PdfPart(source.data, place, partial(_be_text, source), is_earlier)


def _be_text(source: BlockSource, text: str) -> None:
    source.type, source.media_type, source.data = "text", "text/plain", text


# -- the answer ---------------------------------------------------------------------------------


async def messages(call: Call, body: MessagesRequest) -> Plain | Events:
    """Answer a conversation (Anthropic's API)."""
    model = await call.model(body.model)
    skipped = await read_pdfs(call, _pdfs(body))
    answers = await call.start(model, lambda: [read_messages(body, model, skipped)])
    call.report_skipped(skipped)
    writer = MessageWriter(call, body, model, answers)
    return Events(writer.frames()) if body.stream else await writer.whole()


async def count_tokens(call: Call, body: CountRequest) -> Plain:
    """Count the tokens of a conversation (Anthropic's API)."""
    model = await call.model(body.model)
    await read_pdfs(call, _pdfs(body))
    return {"input_tokens": len(await call.encode(model, lambda: read(body, [])))}


@dataclass(slots=True)
class MessageWriter:
    """Writes the answer to one request: whole, or as events of blocks, one block open at a time."""

    _call: Call
    _body: MessagesRequest
    _model: ServedModel
    _answers: Answers
    _index: int = -1
    _open: str | None = None  # the type of the open block

    async def whole(self) -> Plain:
        """The answer to a request without `stream`."""
        parts: list[Part] = []
        async for steps in self._answers:
            for step in steps:
                parts += step.delta.parts
        content = self.blocks(merged(parts), self._result.tool_calls)
        return self._message(content, self._usage, **self._ending())

    def _message(
        self,
        content: list[Plain],
        usage: Plain,
        *,
        stop_reason: str | None = None,
        stop_sequence: str | None = None,
    ) -> Plain:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def blocks(self, parts: Sequence[Part], calls: Sequence[ToolCall]) -> list[Plain]:
        """The content of a complete answer, in the order in which it came; the rest is text.

        Args:
            parts: of the answer, neighbours joined.
            calls: of the answer; the last one may be cut off.
        """
        complete = {call.id: call for call in calls}
        blocks: list[Plain] = []
        for part in parts:
            if isinstance(part, TextPart):
                blocks.append({"type": "text", "text": part.text})
            elif isinstance(part, ReasoningPart):
                shown = part.text if self._body.shows_thinking else ""
                signature = self._call.id  # never checked
                blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
            elif part.id in complete:
                call = complete[part.id]
                named_call = {"type": "tool_use", "id": call.id, "name": call.name}
                blocks.append({**named_call, "input": begun_object(call.arguments)})
        return blocks

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events of the message: its start, its blocks, its end."""
        begun = self._message([], usage_of(len(self._answer.request.prompt_ids)))
        yield named("message_start", {"type": "message_start", "message": begun}) + PING
        async for frames in self._call.frames(self._answers, self.step_frames, lambda: PING):
            yield frames
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage}
        stop = named("message_stop", {"type": "message_stop"})
        yield b"".join(self.close()) + named("message_delta", last) + stop

    def step_frames(self, step: AnswerStep) -> Iterator[bytes]:
        """The events of a step."""
        for part in step.delta.parts:
            if isinstance(part, TextPart):
                yield from self._within("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part.text})
            elif isinstance(part, ReasoningPart):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._within("thinking", empty)
                if self._body.shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._tool_use(part)

    def close(self) -> Iterator[bytes]:
        """The events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._call.id})
        self._open = None
        yield named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _tool_use(self, piece: ToolCallDelta) -> Iterator[bytes]:
        if piece.id is not None:
            yield from self.close()
            block: Plain = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
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
        yield named("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named("content_block_delta", event)

    @property
    def _answer(self) -> Answer:
        return self._answers.answers[0]

    @property
    def _result(self) -> Result:
        assert self._answer.result is not None
        return self._answer.result

    @property
    def _usage(self) -> Plain:
        result = self._result
        return {
            **usage_of(result.prompt_tokens, result.cached_tokens, len(result.token_ids)),
            **reuse_details(self._call.reuse, self._body.return_cached_tokens_details),
        }

    def _ending(self) -> dict[str, Any]:
        clipped = (self._answer.request.params.max_tokens or 0) < self._body.max_tokens
        match = self._answer.stop_match
        reason = stop_reason(self._result, stopped=match is not None, clipped=clipped)
        return {"stop_reason": reason, "stop_sequence": match}


def usage_of(prompt: int, cached: int = 0, answer: int = 0) -> Plain:
    """Token counts; input_tokens are those not read from the cache."""
    return {
        "input_tokens": prompt - cached,
        "output_tokens": answer,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def stop_reason(result: Result, *, stopped: bool, clipped: bool) -> str:
    """Why an answer ended: by a stop string; or the context had less room than max_tokens, ...."""
    if result.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if stopped:
        return "stop_sequence"
    return "tool_use" if result.tool_calls else "end_turn"


# -- tools and blocks that Anthropic has defined ------------------------------------------------
#
# Sources: its documentation's pages on the bash, text editor and memory tools; types of its Python
# library 2.10.

_PATH = {"type": "string", "description": "Path of the file or folder."}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_TEXT = {"type": "string"}
_EDITS: dict[str, Any] = {
    "path": _PATH,
    "view_range": {**_LINES, "description": "With view: first and last line; -1 is the end."},
    "old_str": {**_TEXT, "description": "With str_replace: the text to be replaced."},
    "new_str": {**_TEXT, "description": "With str_replace: the text in its place."},
    "file_text": {**_TEXT, "description": "With create: the content of the file."},
    "insert_line": {"type": "integer", "description": "With insert: the line before the text."},
    "insert_text": {**_TEXT, "description": "With insert: the text."},
}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _editor(*commands: str, **more: Any) -> dict[str, Any]:
    command = {"type": "string", "enum": list(commands)}
    return {
        "description": "Views, creates and edits text files.",
        "parameters": _object({"command": command, **_EDITS, **more}, "command", "path"),
    }


_BASH = {
    "description": "Runs a command in a shell that stays open, or restarts that shell.",
    "parameters": _object(
        {
            "command": {"type": "string", "description": "The command to run."},
            "restart": {"type": "boolean", "description": "Restart the shell instead."},
        }
    ),
}
_COMMANDS = ("view", "create", "str_replace", "insert")
_MOVES = {"old_path": _TEXT, "new_path": _TEXT}
_MEMORY = _editor(*_COMMANDS, "delete", "rename", **_MOVES)
DEFINED: dict[str, dict[str, Any]] = {  # run by the client; by `type`
    "bash_20250124": _BASH,
    "text_editor_20250124": _editor(*_COMMANDS, "undo_edit"),
    "text_editor_20250429": _editor(*_COMMANDS),
    "text_editor_20250728": _editor(*_COMMANDS),
    "memory_20250818": {
        "description": "Reads and writes files under /memories, which last between conversations.",
        "parameters": {**_MEMORY["parameters"], "required": ["command"]},
    },
}
_RUN_BY = ("code_execution", "bash_code_execution", "text_editor_code_execution")
HOSTED_BLOCKS = frozenset(  # in earlier answers of Anthropic's own models
    (
        "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload",
        "redacted_thinking", "compaction", "fallback",  # only its own servers can read them
        *(f"{tool}_tool_result" for tool in ("web_search", "web_fetch", "tool_search", *_RUN_BY)),
    )
)  # fmt: skip


# -- errors -------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: MlxinferError) -> dict[str, object]:
    """The body of an error."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, fallback)
    message = clipped_message(error)
    if isinstance(error, PromptTooLongError):  # agents read both numbers from these words
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = ErrorForm(
    body=lambda error: encode(anthropic_error(error)),
    event=lambda error: named("error", anthropic_error(error)),
    id_headers=(b"request-id",),
)
