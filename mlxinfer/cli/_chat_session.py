"""A conversation of a chat: its messages, settings, model and /commands. No terminal."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core import EFFORTS, FUNCTIONS, SamplingParams
from ..errors import InvalidRequestError, ServerError, TemplateError
from ..memory import human_bytes
from ..outputs import Delta, Result, ToolCall
from ..progress import Watch, unwatched
from ._options import SAMPLING
from ._output import counted, cut, printable, table
from ._pictures import check_sees, check_videos, picture_data, with_its_images
from ._tools import Tools
from .history import NAMES, ChatLog, as_call
from .run import attached, thinking

Message = dict[str, Any]


@dataclass(slots=True)
class ChatSession:
    """The messages, settings and model of a chat. `open_model` turns a name into an LLM."""

    model: str
    open_model: Callable[[str], Any]
    values: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, as the user chose
    system: str | None = None
    think: str | None = None  # as `run.wish_of` gives it
    files: list[str] = field(default_factory=list)  # texts that go with the next message
    images: list[str | bytes] = field(default_factory=list)  # pictures that do
    videos: list[str] = field(default_factory=list)  # paths of videos that do
    messages: list[Message] = field(default_factory=list)  # user and assistant, in turn
    last: Result | None = None
    log: ChatLog | None = None  # where the conversation is kept
    adapter: str | None = None  # that the first model answers with
    tools: Tools | None = None  # that answers may call
    allowed: set[str] = field(default_factory=set)  # tools that the user allowed for this chat
    watch: Watch = unwatched  # of the prompt of the next answer
    _llm: Any = None

    @property
    def llm(self) -> Any:
        if self._llm is None:
            self._llm = self._opened(self.model)
        return self._llm

    @property
    def params(self) -> SamplingParams:
        """Sampling values: those of the user, and the model's own for all others."""
        params: SamplingParams = self.llm.chat_params.changed(self.values)
        return params

    def close(self) -> None:
        self._free()
        if self.tools is not None:
            self.tools.close()
            self.tools = None

    def _free(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def switch(self, model: str) -> None:
        """Continue with another model; if that fails, the previous one is loaded when needed.

        The old model is freed first: two large models may not fit in memory together.
        """
        self._free()
        self._llm = self._opened(model)
        self.model, self.adapter = model, None

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Add a user message and stream the answer.

        If the stream is closed early, or by Ctrl-C, the text so far is kept as the answer. An error
        removes the question again, so that it does not affect the next one.
        """
        self._add("user", "\n\n".join([text, *self.files]), images=self.images)
        if self.videos:  # the history keeps none
            self.messages[-1]["videos"] = self.videos
        self.files.clear()
        self.images, self.videos = [], []
        yield from self._answer()

    def tell(self, results: Sequence[tuple[ToolCall, str]]) -> Generator[Delta, None, None]:
        """Add the results of the calls of the last answer, and stream the next one; as `ask`."""
        self._add_results(results)
        yield from self._answer()

    def stop(self, results: Sequence[tuple[ToolCall, str]]) -> None:
        """Add results as `tell`; the next answer is empty, as one that was stopped at once."""
        self._add_results(results)
        self._add("assistant", "")

    def _add_results(self, results: Sequence[tuple[ToolCall, str]]) -> None:
        for call, result in results:
            self._add("tool", result, tool_call_id=call.id)

    def _answer(self) -> Generator[Delta, None, None]:
        switch = thinking(self.llm, self.think)
        if self.adapter is not None:
            switch["adapter"] = self.adapter
        if self.tools is not None:
            switch["tools"] = self.tools.schemas
        prompt = [{"role": "system", "content": self.system}] if self.system is not None else []
        answer, thoughts, self.last = "", "", None
        try:
            messages = [*prompt, *map(with_its_images, self.messages)]
            for delta in self.llm.stream_chat(
                messages, self.params, prompt_progress_callback=self.watch, **switch
            ):
                answer += delta.text
                thoughts += delta.reasoning or ""
                self.last = delta.result
                yield delta
        except Exception:  # a question without an answer is no part of the conversation
            while self._remove()["role"] != "user":
                pass
            raise
        except (GeneratorExit, KeyboardInterrupt):
            self._add("assistant", answer, thoughts)
            raise
        self._add("assistant", answer, thoughts, calls=self.calls)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        if self.tools is None or self.last is None:
            return ()
        return tuple(call for call in self.last.tool_calls if call.complete)

    def take_back(self) -> str | None:
        """Remove the last user message and its answer. Returns its text, or None.

        Its pictures and videos go with the next message.
        """
        while self.messages:
            message = self._remove()
            if message["role"] == "user":
                text: str = message["content"]
                self.images = message.pop("images", [])
                self.videos = message.pop("videos", [])
                return text
        return None

    def set(self, key: str, value: str) -> None:
        """Change one sampling parameter; `value` is JSON, or text for `stop`."""
        check_setting(key)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        if key == "logit_bias" and isinstance(parsed, dict):  # keys of JSON objects are texts
            parsed = {int(k) if k.isdecimal() else k: bias for k, bias in parsed.items()}
        values = {**self.values, key: parsed}
        params = SamplingParams(**values)
        if self._llm is not None:
            params.check_vocabulary(self._llm.model_info.vocab_size)
        self.values = values

    def attach(self, path: Path) -> int:
        """Send a file's text along with the next message; returns its length in characters."""
        text = attached(path)
        self.files.append(text)
        return len(text)

    def attach_picture(self, path: str) -> None:
        """Send a picture along with the next message."""
        check_sees(self.llm)
        self.images.append(picture_data(path))

    def attach_video(self, path: str) -> None:
        """Send a video along with the next message; its file is read with every turn."""
        check_sees(self.llm)
        check_videos((path,))
        self.videos.append(path)

    def clear(self) -> None:
        self.messages.clear()
        if self.log is not None:
            self.log.begin()

    def _opened(self, model: str) -> Any:
        llm = self.open_model(model)
        if llm.model_info.chats:
            return llm
        llm.close()
        raise TemplateError(
            f"{model} has no chat template: it was not made for conversations. "
            "`mlxinfer run` has it continue a text."
        )

    def _add(
        self,
        role: str,
        text: str,
        thoughts: str = "",
        *,
        images: Sequence[str | bytes] = (),
        calls: Sequence[ToolCall] = (),
        **more: Any,
    ) -> None:
        plain = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]
        message: Message = {"role": role, "content": text, **more}
        if images:
            message["images"] = list(images)
        if plain:
            message["tool_calls"] = [as_call(**call) for call in plain]
        self.messages.append(message)
        if self.log is not None:
            details = {**more, "tool_calls": plain} if plain else more
            self.log.add(
                role,
                text,
                thoughts,
                model=self.model,
                system=self.system,
                images=images,
                details=details,
            )

    def _remove(self) -> Message:
        if self.log is not None:
            self.log.step_back()
        return self.messages.pop()


def check_setting(key: str) -> None:
    known = [f.name for f in fields(SamplingParams) if f.name not in FUNCTIONS]
    if key not in known:
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}" if near else f"there are: {', '.join(known)}"
        raise InvalidRequestError(f"{key!r} cannot be set; {hint}{'?' if near else '.'}")


# -- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommandReply:
    """The work that a command leaves to the chat's loop."""

    text: str = ""  # show it
    ask: str | None = None  # send this message
    edit: str | None = None  # let the user change this text, then send it
    copy: str | None = None  # bring it to the clipboard
    quit: bool = False


Run = Callable[[ChatSession, str], CommandReply]


def is_command(line: str) -> bool:
    """Whether a line is a command; '//' starts a message that begins with '/'."""
    return line.startswith("/") and not line.startswith("//")


def run_command(session: ChatSession, line: str) -> CommandReply:
    """Run the command of a line."""
    name, _, argument = line[1:].partition(" ")
    name = OTHER_NAMES.get(name, name)
    if name not in COMMANDS:
        raise InvalidRequestError(
            f"There is no /{name}; /help lists what there is, and // sends a text that begins so."
        )
    usage, run, _ = COMMANDS[name]
    if usage == "FILE" and not argument.strip():
        raise InvalidRequestError(f"Usage: /{name} {usage}")
    return run(session, argument.strip())


def _help(_: ChatSession, __: str) -> CommandReply:
    rows = [(f"/{name} {usage}".rstrip(), text) for name, (usage, _, text) in COMMANDS.items()]
    keys = "End a line with \\ (or press Alt-Enter) to go on in the next. Ctrl-C stops an answer."
    texts = "A message that begins with / is written with two: //tmp is a folder."
    return CommandReply(f"{table(rows)}\n\n{keys}\n{texts}")


def _model(session: ChatSession, name: str) -> CommandReply:
    if name:
        session.switch(name)
    return CommandReply(f"model: {session.model}")


def _system(session: ChatSession, text: str) -> CommandReply:
    if text:
        session.system = None if text == "off" else text
    return CommandReply(f"system: {session.system or 'none'}")


def _set(session: ChatSession, argument: str) -> CommandReply:
    key, _, value = argument.partition(" ")
    if value:
        session.set(key, value.strip())
    elif key:
        check_setting(key)
    params = session.params
    if key:
        return CommandReply(f"{key}  {_typed(getattr(params, key))}")
    names = [f.name for f in fields(params)]
    usual = [name for name in names if name in {*SAMPLING, *session.values}]
    helps = {name: text.split("  [")[0] for name, (_, text) in SAMPLING.items()}
    rows = [(n, _typed(getattr(params, n)), helps.get(n, "")) for n in usual]
    unusual = ", ".join(name for name in names if name not in usual)
    return CommandReply(f"{table(rows)}\n\nAlso: {unusual}")


def _typed(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _copy(session: ChatSession, _: str) -> CommandReply:
    answers = [m["content"] for m in session.messages if m["role"] == "assistant"]
    if not answers:
        raise InvalidRequestError("There is no answer to copy yet.")
    return CommandReply(copy=answers[-1])


def _save(session: ChatSession, name: str) -> CommandReply:
    path = Path(name).expanduser()
    parts = [f"> {session.system}"] if session.system else []
    parts += [f"## {NAMES[m['role']]}\n\n{m['content']}" for m in session.messages]
    with path.open("x") as file:  # what is there stays
        file.write("\n\n".join(parts) + "\n")
    return CommandReply(f"{counted(len(session.messages), 'message')} in {path}")


def _undo(session: ChatSession, _: str) -> CommandReply:
    text = session.take_back()
    if text is None:
        raise InvalidRequestError("There is no message to take back.")
    session.images, session.videos = [], []
    return CommandReply(f"Taken back, with its answer: {cut(' '.join(text.split()), 60)}")


def _clear(session: ChatSession, _: str) -> CommandReply:
    session.clear()
    return CommandReply("The conversation is empty.")


def _edit(session: ChatSession, text: str) -> CommandReply:
    last = _last_question(session)
    return CommandReply(ask=text) if text else CommandReply(edit=last)


def _regen(session: ChatSession, _: str) -> CommandReply:
    return CommandReply(ask=_last_question(session))


def _stats(session: ChatSession, _: str) -> CommandReply:
    info = session.llm.model_info
    rows = [
        ("model", f"{info.name}, {info.summary}"),
        ("chat", f"{counted(len(session.messages), 'message')}, {session.params.words}"),
        ("last answer", session.last.summary if session.last else "none that is complete"),
    ]
    with suppress(ServerError):  # which not every key may ask for its figures
        rows += _figures(session.llm.stats())
    return CommandReply(table(rows))


def _figures(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Memory, and the work saved by the cache; a server gives its weights alone."""
    if "groups" not in stats:
        return [("memory", f"{human_bytes(stats['weights_bytes'])} of weights at the server")]
    read = stats.get("prompt_tokens_computed", 0) + stats.get("prompt_tokens_reused", 0)
    reused = stats.get("prompt_tokens_reused", 0)
    accepted = (stats.get("speculation") or {}).get("accepted", 0)
    saved = (
        f"{reused:,} of {read:,} prompt tokens found in the cache, "
        f"{counted(accepted, 'token')} verified ahead"
    )
    return [("memory", _memory(stats)), ("saved", saved)]


def _memory(stats: dict[str, Any]) -> str:
    limit = sum(group["pages"] * group["page_bytes"] for group in stats.get("groups", ()))
    used = stats.get("kv_bytes_held", 0) + stats.get("kv_bytes_cached", 0)
    held = human_bytes(stats.get("active_memory_bytes", 0))
    return f"{held} in use; KV cache {human_bytes(used)} of {human_bytes(limit)}"


def _think(session: ChatSession, word: str) -> CommandReply:
    if word not in ("", "on", "off", "auto", *EFFORTS):
        raise InvalidRequestError(f"Usage: /think [on|off|auto|{'|'.join(EFFORTS)}]")
    wish = session.think if word == "" else None if word == "auto" else word
    thinking(session.llm, wish)
    session.think = wish
    return CommandReply(f"thinking: {wish or 'as the model does by itself'}")


def _file(session: ChatSession, name: str) -> CommandReply:
    if "\0" in name:
        raise InvalidRequestError("A file name holds no NUL character.")
    count = session.attach(Path(name).expanduser())
    return CommandReply(f"{count:,} characters go with the next message")


def _image(session: ChatSession, path: str) -> CommandReply:
    session.attach_picture(path)
    return CommandReply(f"{counted(len(session.images), 'picture')} with the next message")


def _video(session: ChatSession, path: str) -> CommandReply:
    session.attach_video(path)
    return CommandReply(f"{counted(len(session.videos), 'video')} with the next message")


def _tools(session: ChatSession, _: str) -> CommandReply:
    if session.tools is None:
        return CommandReply(
            "There are no tools: the config file has no MCP server, and --tools names no file; see "
            "docs/tools.md."
        )
    names = [tool["function"]["name"] for tool in session.tools.schemas]
    allows = session.tools.allows
    rows = [(name, "allowed" if allows(name) else "asks first") for name in names]
    missing = {**session.tools.failures, **session.tools.left_out}
    failed = [f"{name}: {why}" for name, why in missing.items()]
    return CommandReply(printable("\n".join([table(rows), *failed])))


COMMANDS: dict[str, tuple[str, Run, str]] = {
    "help": ("", _help, "this list"),
    "model": ("[NAME]", _model, "show the model, or go on with another"),
    "system": ("[TEXT|off]", _system, "show or change the system message"),
    "set": ("[KEY [VALUE]]", _set, "show or change how tokens are chosen"),
    "clear": ("", _clear, "forget the conversation"),
    "regen": ("", _regen, "answer the last message again"),
    "edit": ("[TEXT]", _edit, "change the last message and send it again"),
    "undo": ("", _undo, "take back the last message and its answer"),
    "copy": ("", _copy, "copy the last answer"),
    "save": ("FILE", _save, "write the conversation to a new file, as Markdown"),
    "file": ("FILE", _file, "send a text along with the next message"),
    "image": ("FILE", _image, "send a picture along with the next message; or drop it here"),
    "video": ("FILE", _video, "send a video along with the next message"),
    "think": ("[on|off|auto|LEVEL]", _think, "whether and how much a model thinks"),
    "tools": ("", _tools, "the tools that answers may call"),
    "stats": ("", _stats, "the model, the last answer, memory"),
    "quit": ("", lambda *_: CommandReply(quit=True), "leave (or Ctrl-D)"),
}
OTHER_NAMES = {"exit": "quit", "bye": "quit", "?": "help"}  # those of other programs


def _last_question(session: ChatSession) -> str:
    text = session.take_back()
    if text is None:
        raise InvalidRequestError("There is no message to send again.")
    return text
