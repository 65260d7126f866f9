"""How models mark their reasoning, and the split of an answer into reasoning and visible text.

Marks are found in the text, not among the ids: a model may write `<think>` as one token or as four.
A prompt may already hold the beginning of an answer (`answer_begun`): the start tag, if the
template writes it, or a part of the reasoning or of the message that the answer continues. The text
stream and grammars start from that state.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import tokenizers

from .reader import MAX_WORD, SPACE, Malformed, Parse, TextReader, compiled
from .samples import PLAIN, THOUGHT, samples_of
from .template import ChatTemplate
from .tokenizer import Tokenizer

MAX_LEADING_SPACE = 64  # before a start tag; more than that, and the answer has begun
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAIL = 64  # tokens at the end of a prompt among which a start tag ends it
_ASSISTANT = "<|start|>assistant"
_NO_MARK = re.compile("[^<]+")
_TOOL_NAME = re.compile(r"[\w.:/-]{0,128}")
MODEL_BLOCK, THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK, BLOCK_END = BLOCKS = (  # of Inkling
    "<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>",
    "<|end_message|>",
)  # fmt: skip
_RECIPIENT = re.compile(r"\sto=([^\s<]*)")
_TO, _TO_USER = ">>>", "all\n"  # of Functionary


class Splitter(ABC):
    """Takes text and gives (reasoning, visible text), however the text is divided into pushes."""

    def __init__(self) -> None:
        self._reader = TextReader()
        self._thought: list[str] = []  # found since the last push
        self._shown: list[str] = []
        self.is_thinking = False  # the text so far ends within a thought
        self._steps = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, visible text) that is certain now."""
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
        """Read a tag with white space before it, if it comes next."""
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
    """How a model marks messages within its answer, each with a header that says what it is.

    Attributes:
        marks: texts in and around headers.
        ends: texts after a message; the first of them ends a thought.
        thought: header of a thought, up to its text.
        preamble: header of a text before a call.
        final: header of the answer.
        shows_headers: tool-call parsers need the header of a call.
    """

    marks: tuple[str, ...]
    ends: tuple[str, ...]
    thought: str
    preamble: str
    final: str
    shows_headers: bool = True


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
        yield from reader.accept(_TO)
        while True:
            self._shown.append((yield from self._header(mark)))
            try:
                mark = yield from reader.pass_until((_TO,), self._shown.append)
            except Malformed:
                yield from reader.rest(self._shown.append)
                return
            reader.take(len(mark))

    def _header(self, mark: str) -> Parse[str]:
        """Read a header; return what is shown of it: all, if it is none."""
        name = ""
        while len(name) <= MAX_WORD and (
            piece := (yield from self._reader.run(compiled(r"[\w.:/-]+")))
        ):
            name += piece
        line = yield from self._reader.accept("\n")
        if line and name == "all":
            return ""
        is_call = line and name and (yield from self._reader.peek()) == "{"
        return f"{_TO if is_call else mark}{name}{line or ''}"


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


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning: between two tags, or by channels (`harmony`).

    With `answer`, the answer after the reasoning stands between two tags of its own. `implied` and
    `final`: see TagSplitter. `channels` say how messages are marked, with `harmony`. `recipient` is
    the header of an answer without reasoning, see RecipientSplitter. With `blocks` all text is in
    blocks, see BlockSplitter. `others` are tags that prompts have instead of `start` and `end`, as
    those of K2 Horizon for less effort.
    """

    start: str = "<think>"
    end: str = "</think>"
    harmony: bool = False
    answer: tuple[str, str] = ("", "")
    implied: bool = False
    final: str = ""
    channels: Channels = GPT_OSS
    recipient: str = ""
    blocks: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that this format looks for, whether they are special tokens or not."""
        if self.harmony:
            return (*self.channels.marks, *self.channels.ends)
        if self.blocks:
            return BLOCKS
        tags = itertools.chain((self.start, self.end), *self.others)
        return (*tags, *filter(None, (*self.answer, self.final)))

    def splitter(self, prefix: str = "") -> Splitter:
        """Return a splitter for an answer with this prefix (see `answer_begun`)."""
        if self.recipient:
            return RecipientSplitter()
        if self.blocks:
            return BlockSplitter(opened=self.is_open(prefix))
        if not self.harmony:
            opened, thought = self.is_open(prefix), prefix.partition(self.start)[2]
            continued = opened and bool(thought.strip())
            return TagSplitter(
                self.start,
                self.end,
                self.answer,
                opened=opened,
                continued=continued,
                wrapped=bool(prefix) and prefix == self.answer[0],
                implied=self.implied and not prefix,
                final=self.final,
            )
        harmony = HarmonySplitter(self.channels)
        if prefix.startswith(_ASSISTANT):
            harmony.push(prefix.removeprefix(_ASSISTANT))
        return harmony

    def is_open(self, prefix: str) -> bool:
        """Whether an answer with this prefix is within its reasoning."""
        if not self.harmony:
            return self.start in prefix and self.end not in prefix
        header = prefix.removesuffix("<|message|>")
        return header != prefix and channel_of(header) == "analysis"

    def is_closed(self, prefix: str) -> bool:
        """Whether the prompt holds the reasoning of this answer whole, such as an empty one."""
        if self.harmony:
            return False
        is_whole = self.start in prefix and self.end in prefix
        return is_whole or (bool(prefix) and prefix == self.answer[0])

    def is_over(self, prefix: str) -> bool:
        """Whether it is past its reasoning, because the prompt names another channel."""
        return self.harmony and prefix.endswith("<|message|>") and not self.is_open(prefix)


def answer_begun(
    tokenizer: Tokenizer, reasoning: ReasoningFormat, prompt_ids: Sequence[int]
) -> tuple[ReasoningFormat, str]:
    """Return the format of this answer, and the beginning of it at the prompt's end, "" for none.

    With tags it is the text from the last start tag on, closed or not, and the format has the tags
    that the prompt chose. With channels (harmony) it is the header of the last message.
    """
    if reasoning.harmony:
        return reasoning, _header(tokenizer, reasoning.channels, prompt_ids)
    for start, end in ((reasoning.start, reasoning.end), *reasoning.others):
        chosen = replace(reasoning, start=start, end=end)
        if prefix := _thought(tokenizer, chosen, prompt_ids):
            return chosen, prefix
    return reasoning, ""


def _header(tokenizer: Tokenizer, channels: Channels, ids: Sequence[int]) -> str:
    """Return the header of the last message with its tokens, "" where that message has ended."""
    start = _last(ids, tokenizer.piece_to_id("<|start|>"))
    message = ids[start:] if start >= 0 else ()
    if any(tokenizer.piece_to_id(mark) in message for mark in channels.ends):
        return ""
    body = tokenizer.piece_to_id("<|message|>")
    size = message.index(body) + 1 if body in message else len(message)
    return tokenizer.decode(message[:size], skip_special_tokens=False)


def _thought(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> str:
    """Return the text of the last turn from its last start tag on, "" without one."""
    turn = _last_division(tokenizer, reasoning, ids)
    if _is_header(tokenizer, ids, turn):  # all that follows is the answer's text
        text = tokenizer.decode(ids[turn + 1 :], skip_special_tokens=False)
        start = text.rfind(reasoning.start)
        return text[start:] if start >= 0 else ""
    start = _last(ids, _added_id(tokenizer, reasoning.start))
    if start > turn:
        return tokenizer.decode(ids[start:], skip_special_tokens=False)
    text = tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False).rstrip()
    begins = (reasoning.start, reasoning.answer[0])
    return next((begin for begin in begins if begin and text.endswith(begin)), "")


def _last_division(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> int:
    """Return the last position of a token that only a template writes, tags aside; or -1."""
    for place in range(len(ids) - 1, -1, -1):
        token = tokenizer.added_tokens.get(ids[place])
        if token is None or any(token.content in tag for tag in reasoning.marks):
            continue
        if token.special or _writes(tokenizer, token):
            return place
    return -1


def _writes(tokenizer: Tokenizer, token: tokenizers.AddedToken) -> bool:
    """Whether the chat template's text contains this token."""
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    return not token.content.isspace() and any(token.content in source for source in sources)


def _is_header(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> bool:
    """Whether the token at `place` begins a message, rather than the prompt, or ends a message."""
    if place < 0 or ids[place] in tokenizer.eos_token_ids:
        return False
    is_bos = (
        ids[place] == tokenizer.bos_token_id
    )  # templates also write it through the variable bos_token
    return not is_bos or (place > 0 and _writes(tokenizer, tokenizer.added_tokens[ids[place]]))


def _added_id(tokenizer: Tokenizer, tag: str) -> int | None:
    token_id = tokenizer.piece_to_id(tag)
    token = tokenizer.added_tokens.get(token_id) if token_id is not None else None
    if token is None:
        return None
    is_control = token.special or tokenizer.template is None or _writes(tokenizer, token)
    return token_id if is_control else None  # a user's text can become the others


def _last(ids: Sequence[int], wanted: int | None) -> int:
    """Return the last position of an id, -1 for none."""
    return next((n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted), -1)


TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
_ANSWERS = (  # around the answer after a thought: Granite 3.3 and ERNIE 4.5, Hunyuan, Command
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
_FRAMES = {"<|open|>", "<|close|>", "<|sep|>"}  # Kimi K3
KIMI_K3 = ReasoningFormat(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    final="<|close|>message<|sep|>",
)
SOLAR = ReasoningFormat("<|think|>", "<|end|><|begin|>assistant", answer=("<|content|>", "<|end|>"))
INKLING = ReasoningFormat(
    THOUGHT_BLOCK, f"{BLOCK_END}{MODEL_BLOCK}", answer=(TEXT_BLOCK, BLOCK_END), blocks=True
)
_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format that the tokenizer's tokens or chat template show, None for none."""
    format = _detected(tokenizer)
    if format is None or not format.start:
        return format
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    written = "\0".join([*sources, *(t.content for t in tokenizer.added_tokens.values())])
    return replace(format, others=tuple(_other_tags(format.start, format.end, written)))


def _other_tags(start: str, end: str, written: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of tags whose names are longer: `<think_fast>` and `</think_fast>`."""
    longer = re.compile(rf"{re.escape(start[:-1])}([\w-]+){re.escape(start[-1])}")
    for name in dict.fromkeys(longer.findall(written)):
        closing = f"{end[:-1]}{name}{end[-1]}"
        if closing in written:
            yield f"{start[:-1]}{name}{start[-1]}", closing


def _detected(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """`detect_reasoning` without other tags.

    If no known mark is found, a conversation with a thought is rendered. The marks are the texts
    before and after the thought.
    """
    sources = "\0".join(tokenizer.template.sources.values()) if tokenizer.template else ""
    added = {token.content: token for token in tokenizer.added_tokens.values()}
    template = tokenizer.template
    if all(mark in added or mark in sources for mark in HARMONY if "con" not in mark):
        return ReasoningFormat("", "", harmony=True)
    if " to=self" in sources and all(mark in sources for mark in (*MUSE.marks, *MUSE.ends)):
        return ReasoningFormat("", "", harmony=True, channels=MUSE)
    if added.keys() >= _FRAMES or all(mark in sources for mark in _FRAMES):
        return KIMI_K3
    if all(mark in sources for mark in (SOLAR.start, *SOLAR.answer)):
        return SOLAR
    if all(mark in added or mark in sources for mark in BLOCKS):
        return INKLING
    if f"{_TO}{_TO_USER.strip()}" in sources:
        return ReasoningFormat(recipient=_TO_USER)
    in_template = [tags for tags in TAGS if all(tag in sources for tag in tags)]
    written = None if template is None or in_template else written_marks(template)
    in_tokens = [(a, b) for a, b in TAGS if b in added and any(a.startswith(t) for t in added)]
    if written is not None or not (in_template or in_tokens):
        return written
    start, end = (in_template or in_tokens)[0]
    # An answer that waits for an end mark does not stream: only where a token is that mark.
    is_plain = end in added and not added[end].special
    implied = is_plain and template is not None and writes_thoughts(template, end)
    return ReasoningFormat(start, end, answer=_answer_marks(added.keys(), sources), implied=implied)


def writes_thoughts(template: ChatTemplate, end: str) -> bool:
    """Whether a template writes a thought, with this mark after it, so that its model has them."""
    text = samples_of(template)["thought"] or ""
    return end in text.partition(THOUGHT)[2]


def _answer_marks(added: Collection[str], sources: str) -> tuple[str, str]:
    """Return the marks around the answer that tokens or templates show, ("", "") for none."""
    for begin, end in _ANSWERS:
        if (begin in added and end in added) or (begin in sources and end in sources):
            return begin, end
    return "", ""


def written_marks(template: ChatTemplate) -> ReasoningFormat | None:
    """Return the marks that a template writes around a thought, None where it writes none.

    A mark is one word between angle or square brackets, right beside the thought and nowhere else.
    """
    if not any(field in source for source in template.sources.values() for field in _FIELDS):
        return None
    text = samples_of(template)["thought"] or ""
    before, thought, rest = text.partition(THOUGHT)
    after, answered, _ = rest.partition(PLAIN)
    start, end = _MARK.findall(before.rstrip()), _MARK.findall(after)
    if not (thought and answered and start and end):
        return None
    beside = before.rstrip().endswith(start[-1]) and after.lstrip().startswith(end[0])
    if beside and text.count(start[-1]) == text.count(end[0]) == 1:
        return ReasoningFormat(start[-1], end[0])
    return None
