"""Splitters: the text of an answer becomes reasoning and answer, piece by piece."""

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass

from .reader import MAX_WORD, SPACE, Malformed, Parse, TextReader, compiled

MAX_LEADING_SPACE = 64  # before a start tag; more than that, and the answer has begun
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NO_MARK = re.compile("[^<]+")
_TOOL_NAME = re.compile(r"[\w.:/-]{0,128}")
_RECIPIENT = re.compile(r"\sto=([^\s<]*)")
MODEL_BLOCK, THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK, BLOCK_END = BLOCKS = (  # of Inkling
    "<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>",
    "<|end_message|>",
)  # fmt: skip
TO_ALL, TO_USER = ">>>", "all\n"  # of Functionary


class Splitter(ABC):
    """Takes text and gives (reasoning, visible text), however the text is divided into pushes."""

    def __init__(self) -> None:
        self._reader = TextReader()
        self._thought: list[str] = []  # found since the last push
        self._shown: list[str] = []
        self.is_thinking = False  # the text so far ends within a thought
        self._steps = self._read()

    def push(self, text: str) -> tuple[str, str]:
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> tuple[str, str]:
        """Return what was held back; an incomplete mark is text."""
        self._reader.close()
        return self._advance()

    def _advance(self) -> tuple[str, str]:
        next(self._steps, None)
        self._reader.commit()
        split = "".join(self._thought), "".join(self._shown)
        self._thought.clear()
        self._shown.clear()
        return split

    @abstractmethod
    def _read(self) -> Parse[None]:
        """Read the text to its end; add its parts to `_thought` and `_shown`."""


class TagSplitter(Splitter):
    """Splits off the reasoning between a start and an end tag at the beginning of the answer.

    White space around the reasoning, and before the answer after it, is dropped. Later tags are
    ordinary text, because an answer may mention them.

    Args:
        start: the tag before the reasoning.
        end: the tag after it.
        answer: tags around the answer, such as `<response>` and `</response>`. If the answer begins
            with the first of them, both are dropped, with the white space beside them.
        opened: the prompt ends after the start tag.
        continued: the prompt ends within the reasoning, so a space after it is part of it.
        wrapped: the prompt ends after the first tag of `answer`.
        implied: the start tag may be missing. Then the text up to the end tag is reasoning, so no
            text is certain before that tag has come, or the answer has ended.
        final: after this text nothing belongs to the answer; "": there is no such text.
    """

    def __init__(
        self,
        start: str,
        end: str,
        answer: tuple[str, str] = ("", ""),
        *,
        opened: bool = False,
        continued: bool = False,
        wrapped: bool = False,
        implied: bool = False,
        final: str = "",
    ) -> None:
        super().__init__()
        self._start, self._end, self._answer = start, end, answer
        self._opened, self._continued, self._wrapped = opened, continued, wrapped
        self._implied, self._final = implied, final
        self.is_thinking = opened
        self._space = ""  # before the answer, as long as a tag may follow

    def _read(self) -> Parse[None]:
        reader, (begin, end) = self._reader, self._answer
        begins = yield from self._begins(self._start)  # some models write a tag that is there
        if begins or self._opened:
            space, self._space = self._space, ""
            if begins or not self._continued:
                space = ""
                yield from reader.space()
            self.is_thinking = True
            yield from self._between(self._end, self._thought, space)
        elif self._implied:
            yield from self._unmarked()
        if self._wrapped or (begin and (yield from self._begins(begin))):
            yield from reader.space()
            is_wrapped = yield from self._between(end, self._shown)
            is_last = bool(self._final) and (yield from reader.ahead((self._final,))) is not None
            if is_wrapped and not is_last and (yield from reader.more()):
                self._shown.append("\n")
        self._shown.append(self._space)
        if self._final:
            with suppress(Malformed):
                yield from reader.pass_until((self._final,), self._shown.append)
                yield from reader.rest(lambda _: None)
        yield from reader.rest(self._shown.append)

    def _unmarked(self) -> Parse[None]:
        """Read a thought without its start tag; without an end tag, the text is the answer."""
        held = [self._space]
        self._space = ""
        try:
            yield from self._reader.pass_until((self._end,), held.append)
        except Malformed:
            yield from self._reader.rest(held.append)
            self._shown += held
            return
        self._thought.append("".join(held).strip())
        self._reader.take(len(self._end))
        yield from self._reader.space()

    def _begins(self, tag: str) -> Parse[bool]:
        while len(self._space) <= MAX_LEADING_SPACE:
            piece = yield from self._reader.run(SPACE)
            self._space += piece
            if not piece and (yield from self._reader.accept(tag)):
                self._space = ""
                return True
            if not piece:
                break
        return False

    def _between(self, end: str, parts: list[str], begin: str = "") -> Parse[bool]:
        """Read up to a tag, and the white space around the tag; return whether text was found.

        `begin` is white space before the text that belongs to the text.
        """
        space = [begin]  # at the end of the text so far
        is_text = False

        def add(piece: str) -> None:
            nonlocal is_text
            body = piece.rstrip()
            if body:
                parts.extend([*space, body])
                space.clear()
                is_text = True
            space.append(piece[len(body) :])

        try:
            yield from self._reader.pass_until((end,), add)
        except Malformed:  # the answer ended before the tag
            yield from self._reader.rest(add)
            return is_text
        self.is_thinking = False
        self._reader.take(len(end))
        yield from self._reader.space()
        return is_text


@dataclass(frozen=True, slots=True)
class Channels:
    """How a model marks messages within its answer, each with a header that says what it is."""

    marks: tuple[str, ...]  # texts in and around headers
    ends: tuple[str, ...]  # texts after a message; the first of them ends a thought
    thought: str  # header of a thought, up to its text
    preamble: str  # header of a text before a call
    final: str  # header of the answer
    shows_headers: bool = True  # tool-call parsers need the header of a call


GPT_OSS = Channels(
    HARMONY,
    HARMONY_ENDS,
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
)

MUSE = Channels(  # the headers name who is spoken to: self, user, or a tool
    ("<|start|>", "<|message|>"),
    ("<|eom|>", "<|eot|>"),
    " to=self<|message|>",
    " to=user<|message|>",
    " to=user<|message|>",
    shows_headers=False,
)


class HarmonySplitter(Splitter):
    """Splits channels: analysis is reasoning; final, and commentary to the user, is the answer.

    A message to a tool stays in the text with its header and marks, so that a tool-call parser
    finds it. It begins with <|start|>, even if the prompt had that mark. Text without any channel
    is the answer. Source: the harmony response format of gpt-oss. Muse's headers name recipients
    instead of channels.
    """

    def __init__(self, channels: Channels = GPT_OSS) -> None:
        super().__init__()
        self._channels = channels
        self._header: list[str] | None = []  # between messages: what stands before <|message|>
        self._seen_mark = False
        self._is_header = False  # after a mark, or where the text begins with a recipient
        self._channel = "final"

    def _read(self) -> Parse[None]:
        reader = self._reader
        while (yield from reader.more()):
            mark = yield from reader.accept(*self._channels.marks, *self._channels.ends)
            if mark is not None:
                said = self._mark(mark)
            else:
                said = self._text((yield from reader.run(_NO_MARK)) or reader.take())
            (self._thought if self._channel == "analysis" else self._shown).append(said)
        if not self._seen_mark and self._header:
            self._shown += self._header

    def _text(self, text: str) -> str:
        if self._header is None:
            return text
        self._header.append(text)
        if self._is_header:
            return ""
        held = "".join(self._header)
        body = held.lstrip()
        if len(held) - len(body) <= MAX_LEADING_SPACE:
            self._is_header = body.startswith("to=")
            if self._is_header or "to=".startswith(body):
                return ""
        self._header = None  # an answer without any marks
        return held

    def _mark(self, mark: str) -> str:
        """Enter the next part of the message; return the text that the mark adds to the output."""
        self._seen_mark = self._is_header = True
        if mark in self._channels.ends:
            is_call = self._header is None and self._channel == "tool"
            self._header = []
            return mark if is_call and self._channels.shows_headers else ""
        if mark == "<|message|>":
            return self._begin_body("".join(self._header or []))
        if mark == "<|start|>" or self._header is None:
            self._header = []
        if mark != "<|start|>":
            self._header.append(mark)
        return ""

    def _begin_body(self, header: str) -> str:
        self._header = None
        self._channel = channel_of(header)
        is_shown = self._channel == "tool" and self._channels.shows_headers
        return f"<|start|>{header}<|message|>" if is_shown else ""


class RecipientSplitter(Splitter):
    """Drops the header of what is said to the user; a call to a tool keeps its own.

    Each message begins with `>>>` and a line with its recipient: `all`, or the name of a tool whose
    arguments follow. The prompt has the first `>>>`. Source: the chat template of Functionary v3.2.
    """

    def _read(self) -> Parse[None]:
        reader, mark = self._reader, ""
        yield from reader.accept(TO_ALL)
        while True:
            self._shown.append((yield from self._header(mark)))
            try:
                mark = yield from reader.pass_until((TO_ALL,), self._shown.append)
            except Malformed:
                yield from reader.rest(self._shown.append)
                return
            reader.take(len(mark))

    def _header(self, mark: str) -> Parse[str]:
        name = ""
        while len(name) <= MAX_WORD and (
            piece := (yield from self._reader.run(compiled(r"[\w.:/-]+")))
        ):
            name += piece
        line = yield from self._reader.accept("\n")
        if line and name == "all":
            return ""
        is_call = line and name and (yield from self._reader.peek()) == "{"
        return f"{TO_ALL if is_call else mark}{name}{line or ''}"


class BlockSplitter(Splitter):
    """Splits blocks, each behind a mark of its kind: thoughts, texts and calls, in any order.

    A header may stand before the mark of a call, the name of its tool, and is dropped. The call
    stays in the text with the mark, so that a tool-call parser finds it. Text without any mark is
    the answer. Source: tml-renderers 0.4.2, which writes and reads what Inkling writes.

    Args:
        opened: the prompt ends within a thought.
    """

    def __init__(self, *, opened: bool = False) -> None:
        super().__init__()
        self.is_thinking = opened
        self._header: str | None = None if opened else ""  # None: within a block
        self._in_call = False

    def _read(self) -> Parse[None]:
        reader = self._reader
        while (yield from reader.more()):
            mark = yield from reader.accept(*BLOCKS)
            if mark is not None:
                self._mark(mark)
            else:
                self._text((yield from reader.run(_NO_MARK)) or reader.take())
        self._shown.append(self._header or "")

    def _text(self, text: str) -> None:
        if self._header is not None:
            text, self._header = self._header + text, self._header + text
            if _TOOL_NAME.fullmatch(text):
                return  # the name of a tool, or an answer without marks
            self._header = None
        (self._thought if self.is_thinking else self._shown).append(text)

    def _mark(self, mark: str) -> None:
        if mark == CALL_BLOCK or (self._in_call and mark == BLOCK_END):
            self._shown.append(mark)
        elif mark == BLOCK_END and self._header:  # of an answer without a mark before it
            self._shown.append(self._header)
        self._header = None if mark in (THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK) else ""
        self.is_thinking, self._in_call = mark == THOUGHT_BLOCK, mark == CALL_BLOCK


def channel_of(header: str) -> str:
    """Return "analysis", "tool" or "final" for a message with this header."""
    recipient = _RECIPIENT.search(f" {header}")
    if recipient is not None:
        return {"self": "analysis", "user": "final"}.get(recipient[1], "tool")
    _, _, channel = header.partition("<|channel|>")
    return "analysis" if channel.split()[:1] == ["analysis"] else "final"
