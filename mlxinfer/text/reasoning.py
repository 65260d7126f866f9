"""How models mark their reasoning, and the split of an answer into reasoning and visible text.

Marks are found in the text, not among the ids: a model may write `<think>` as one token or as four.
A prompt may already hold the beginning of an answer (`answer_prefix`): the start tag, if the
template writes it, or a part of the reasoning or of the message that the answer continues. The text
stream and grammars start from that state.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from .reader import SPACE, Malformed, Parse, TextReader
from .samples import PLAIN, THOUGHT, samples_of
from .template import ChatTemplate
from .tokenizer import Tokenizer

MAX_LEADING_SPACE = 64  # before a start tag; more than that, and the answer has begun
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAIL = 64  # tokens at the end of a prompt among which a start tag ends it
_ASSISTANT = "<|start|>assistant"
_NO_MARK = re.compile("[^<]+")


class Splitter(ABC):
    """Takes text and gives (reasoning, visible text), however the text is divided into pushes."""

    def __init__(self) -> None:
        self._reader = TextReader()
        self._thought: list[str] = []  # found since the last push
        self._shown: list[str] = []
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
        found = "".join(self._thought), "".join(self._shown)
        self._thought.clear()
        self._shown.clear()
        return found

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
    """

    def __init__(
        self,
        start: str,
        end: str,
        answer: tuple[str, str] = ("", ""),
        *,
        opened: bool = False,
        continued: bool = False,
    ) -> None:
        super().__init__()
        self._start, self._end, self._answer = start, end, answer
        self._opened, self._continued = opened, continued
        self._space = ""  # before the answer, as long as a tag may follow

    def _read(self) -> Parse[None]:
        reader, (begin, end) = self._reader, self._answer
        begins = yield from self._begins(self._start)  # some models write a tag that is there
        if begins or self._opened:
            space, self._space = self._space, ""
            if begins or not self._continued:
                space = ""
                yield from reader.space()
            yield from self._between(self._end, self._thought, space)
        if begin and (yield from self._begins(begin)):
            yield from reader.space()
            is_wrapped = yield from self._between(end, self._shown)
            if is_wrapped and (yield from reader.more()):
                self._shown.append("\n")
        self._shown.append(self._space)
        yield from reader.rest(self._shown.append)

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

    def _between(self, end: str, found: list[str], begin: str = "") -> Parse[bool]:
        """Read up to a tag, and the white space around the tag; return whether text was found.

        `begin` is white space before the text that belongs to the text.
        """
        space = [begin]  # at the end of the text so far
        is_text = False

        def add(piece: str) -> None:
            nonlocal is_text
            body = piece.rstrip()
            if body:
                found.extend([*space, body])
                space.clear()
                is_text = True
            space.append(piece[len(body) :])

        try:
            yield from self._reader.pass_until((end,), add)
        except Malformed:  # the answer ended before the tag
            yield from self._reader.rest(add)
            return is_text
        self._reader.take(len(end))
        yield from self._reader.space()
        return is_text


class HarmonySplitter(Splitter):
    """Splits channels: analysis is reasoning; final, and commentary to the user, is the answer.

    A message to a tool stays in the text with its header and marks, so that a tool-call parser
    finds it. It begins with <|start|>, even if the prompt had that mark. Text without any channel
    is the answer. Source: the harmony response format of gpt-oss.
    """

    def __init__(self) -> None:
        super().__init__()
        self._header: list[str] | None = []  # between messages: what stands before <|message|>
        self._seen_mark = False
        self._is_header = False  # after a mark, or where the text begins with a recipient
        self._channel = "final"

    def _read(self) -> Parse[None]:
        reader = self._reader
        while (yield from reader.more()):
            mark = yield from reader.accept(*HARMONY, *HARMONY_ENDS)
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
        if mark in HARMONY_ENDS:
            closing = mark if self._header is None and self._channel == "tool" else ""
            self._header = []
            return closing
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
        return f"<|start|>{header}<|message|>" if self._channel == "tool" else ""


def channel_of(header: str) -> str:
    """Return "analysis", "tool" or "final" for a message with this header."""
    if " to=" in f" {header}":
        return "tool"
    _, _, channel = header.partition("<|channel|>")
    return "analysis" if channel.split()[:1] == ["analysis"] else "final"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning: between two tags, or by channels (`harmony`).

    With `answer`, the answer after the reasoning stands between two tags of its own.
    """

    start: str = "<think>"
    end: str = "</think>"
    harmony: bool = False
    answer: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that this format looks for, whether they are special tokens or not."""
        if self.harmony:
            return (*HARMONY, *HARMONY_ENDS)
        return (self.start, self.end, *filter(None, self.answer))

    def splitter(self, prefix: str = "") -> Splitter:
        """Return a splitter for an answer with this prefix (see `answer_prefix`)."""
        if not self.harmony:
            opened, thought = self.is_open(prefix), prefix.partition(self.start)[2]
            continued = opened and bool(thought.strip())
            return TagSplitter(
                self.start, self.end, self.answer, opened=opened, continued=continued
            )
        harmony = HarmonySplitter()
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
        return not self.harmony and self.start in prefix and self.end in prefix

    def is_over(self, prefix: str) -> bool:
        """Whether it is past its reasoning, because the prompt names another channel."""
        return self.harmony and prefix.endswith("<|message|>") and not self.is_open(prefix)


def answer_prefix(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, prompt_ids: Sequence[int]
) -> str:
    """Return the beginning of the answer at the prompt's end, "" if there is none.

    With tags it is the text from the last start tag on, closed or not. With channels (harmony) it
    is the header of the last message.
    """
    if reasoning is None:
        return ""
    if reasoning.harmony:
        return _header(tokenizer, prompt_ids)
    return _thought(tokenizer, reasoning, prompt_ids)


def _header(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the header of the last message with its tokens, "" where that message has ended."""
    start = _last(ids, tokenizer.piece_to_id("<|start|>"))
    message = ids[start:] if start >= 0 else ()
    if any(tokenizer.piece_to_id(mark) in message for mark in HARMONY_ENDS):
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
    text = tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False)
    return reasoning.start if text.rstrip().endswith(reasoning.start) else ""


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
    """Return the id of a tag that is one token and that a user's text cannot produce."""
    found = tokenizer.piece_to_id(tag)
    token = tokenizer.added_tokens.get(found) if found is not None else None
    if token is None:
        return None
    is_control = token.special or tokenizer.template is None or _writes(tokenizer, token)
    return found if is_control else None  # a user's text can become the others


def _last(ids: Sequence[int], wanted: int | None) -> int:
    """Return the last position of an id, -1 for none."""
    return next((n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted), -1)


TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)
_ANSWERS = (  # around the answer after a thought: Granite 3.3 and ERNIE 4.5, Hunyuan
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)
_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format that the tokenizer's tokens or chat template show, None for none.

    If no known mark is found, a conversation with a thought is rendered. The marks are the texts
    before and after the thought.
    """
    if all(tokenizer.piece_to_id(mark) is not None for mark in HARMONY if "con" not in mark):
        return ReasoningFormat("", "", harmony=True)
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    added = {token.content for token in tokenizer.added_tokens.values()}
    for start, end in TAGS:
        in_tokens = end in added and any(start.startswith(token) for token in added)
        in_template = any(start in source and end in source for source in sources)
        if in_tokens or in_template:
            return ReasoningFormat(start, end, answer=_answer_marks(added, "".join(sources)))
    return None if tokenizer.template is None else written_marks(tokenizer.template)


def _answer_marks(added: set[str], sources: str) -> tuple[str, str]:
    """Return the marks around the answer that tokens or templates show, ("", "") for none."""
    for begin, end in _ANSWERS:
        if {begin, end} <= added or (begin in sources and end in sources):
            return begin, end
    return "", ""


def written_marks(template: ChatTemplate) -> ReasoningFormat | None:
    """Return the marks that a template writes around a thought, None where it writes none.

    A mark is one word between angle or square brackets, right beside the thought and nowhere else.
    """
    if not any(field in source for source in template.sources.values() for field in _FIELDS):
        return None
    text = samples_of(template)["thought"] or ""
    before, found, rest = text.partition(THOUGHT)
    after, answered, _ = rest.partition(PLAIN)
    start, end = _MARK.findall(before.rstrip()), _MARK.findall(after)
    if not (found and answered and start and end):
        return None
    beside = before.rstrip().endswith(start[-1]) and after.lstrip().startswith(end[0])
    if beside and text.count(start[-1]) == text.count(end[0]) == 1:
        return ReasoningFormat(start[-1], end[0])
    return None
