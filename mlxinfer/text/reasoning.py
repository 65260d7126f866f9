"""How models mark their reasoning, and the split of an answer into reasoning and visible text.

Marks are found in the text and not among the ids, so that it does not matter whether a model writes
`<think>` as one token or as four. A prompt may already hold the beginning of an answer
(`answer_prefix`): the start tag, which its template wrote, or a part of the reasoning or of the
message that the answer continues. The text stream, and grammars, start from that state.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers

from .samples import PLAIN, THOUGHT, samples_of
from .template import ChatTemplate
from .tokenizer import Tokenizer

MAX_LEADING_SPACE = 64  # before a start tag; more than that, and the answer has begun
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAIL = 64  # tokens at the end of a prompt among which a start tag ends it
_ASSISTANT = "<|start|>assistant"


class MarkScanner:
    """Splits arriving text at marks such as `</think>`; holds back what may become a mark.

    The mark that begins first wins; of two at the same position, the longer.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._first = re.compile("[" + re.escape("".join({m[0] for m in marks})) + "]")
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Return (text, is a mark) in order, as far as it is certain."""
        text = self._held + text
        parts: list[tuple[str, bool]] = []
        start = position = 0
        while candidate := self._first.search(text, position):
            position = candidate.start()
            mark = self._mark_at(text, position)
            if mark is None:
                position += 1
                continue
            if len(mark) > len(text) - position:  # the text ends within it
                break
            parts += [(text[start:position], False), (mark, True)]
            start = position = position + len(mark)
        else:
            position = len(text)
        self._held = text[position:]
        parts.append((text[start:position], False))
        return [part for part in parts if part[0]]

    def finish(self) -> str:
        """Return what was held back, which is no mark."""
        held, self._held = self._held, ""
        return held

    def _mark_at(self, text: str, position: int) -> str | None:
        """Return the longest mark at this position, or one that the end of the text cuts off."""
        rest = len(text) - position
        for mark in self._marks:
            if text.startswith(mark[:rest], position):
                return mark
        return None


class Splitter(Protocol):
    """Takes text and gives (reasoning, visible text), however the text is divided into pushes."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, visible text) that is certain now."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return what was held back."""
        ...


class TagSplitter:
    """Splits off the reasoning between a start and an end tag at the beginning of the answer.

    White space around the reasoning, and before the answer after it, is dropped. Later tags are
    ordinary text: an answer may mention them.

    Args:
        start: the tag before the reasoning.
        end: the tag after it.
        opened: the prompt ends after the start tag.
        continued: the prompt ends within the reasoning, so that a space after it belongs to it.
    """

    def __init__(
        self, start: str, end: str, *, opened: bool = False, continued: bool = False
    ) -> None:
        self._start = start
        self._scanner = MarkScanner((end,))
        self._head: str | None = ""  # the answer's beginning, None once it is decided
        self._thinking = opened
        # nothing but space so far, of the reasoning or of the answer after it
        self._bare = opened and not continued
        self._space: list[str] = []  # trailing space of the reasoning

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, visible text) that is certain now."""
        if self._head is not None:
            text = self._begin(self._head + text)
        return self._split(text)

    def finish(self) -> tuple[str, str]:
        """Return what was held back: an incomplete tag is text."""
        reasoning, shown = self._split(self._head or "")
        self._head = None
        if self._thinking:
            reasoning += self._reasoning(self._scanner.finish())
        return reasoning, shown

    def _begin(self, head: str) -> str:
        """Decide whether the answer begins with the start tag; return the text after it."""
        body = head.lstrip()
        near = len(head) - len(body) <= MAX_LEADING_SPACE
        if near and len(body) < len(self._start) and self._start.startswith(body):
            self._head = head
            return ""
        self._head = None
        if near and body.startswith(self._start):
            self._thinking = self._bare = True
            return body[len(self._start) :]
        return head

    def _split(self, text: str) -> tuple[str, str]:
        reasoning = shown = ""
        if not self._thinking:
            return "", self._answer(text)
        for part, is_mark in self._scanner.push(text):
            if not self._thinking:
                shown += self._answer(part)
            elif is_mark:
                self._thinking, self._bare = False, True
            else:
                reasoning += self._reasoning(part)
        if not self._thinking:
            shown += self._answer(self._scanner.finish())
        return reasoning, shown

    def _reasoning(self, text: str) -> str:
        text = text.lstrip() if self._bare else text
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        self._bare = False
        space = "".join(self._space)
        self._space = [text[len(body) :]]
        return space + body

    def _answer(self, text: str) -> str:
        text = text.lstrip() if self._bare else text
        self._bare = self._bare and not text
        return text


class HarmonySplitter:
    """Splits channels: analysis is reasoning; final, and commentary to the user, is the answer.

    A message to a tool goes into the text with its header and marks, beginning with <|start|> (even
    where the prompt had that), so that a tool-call parser finds it. Text without any channel is the
    answer. Source: the harmony response format of gpt-oss.
    """

    def __init__(self) -> None:
        self._scanner = MarkScanner((*HARMONY, *HARMONY_ENDS))
        self._header: list[str] | None = []  # between messages: what stands before <|message|>
        self._seen_mark = False
        self._is_header = False  # after a mark, or where the text begins with a recipient
        self._channel = "final"

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, visible text) that is certain now."""
        return self._take(self._scanner.push(text))

    def finish(self) -> tuple[str, str]:
        """Return what was held back: half a mark is text."""
        reasoning, shown = self._take([(self._scanner.finish(), False)])
        if not self._seen_mark and self._header:
            shown += "".join(self._header)
        self._header = None
        return reasoning, shown

    def _take(self, parts: list[tuple[str, bool]]) -> tuple[str, str]:
        reasoning = shown = ""
        for part, is_mark in parts:
            out = self._mark(part) if is_mark else self._text(part)
            if self._channel == "analysis":
                reasoning += out
            else:
                shown += out
        return reasoning, shown

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
        """Enter the next part of the message; return what the mark itself adds to the output."""
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


class UnwrappedAnswer:
    """Removes the marks around the answer, such as `<response>` and `</response>`.

    They are dropped where the answer begins with the first of them, with the white space at them.

    Args:
        splitter: divides reasoning and answer.
        begin: the mark before the answer.
        end: the mark after it.
    """

    def __init__(self, splitter: Splitter, begin: str, end: str) -> None:
        self._splitter, self._marks = splitter, TagSplitter(begin, end)
        self._is_wrapped = self._is_past = False  # within the marks was text; so was behind them

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, visible text) that is certain now."""
        reasoning, shown = self._splitter.push(text)
        return reasoning, self._joined(*self._marks.push(shown))

    def finish(self) -> tuple[str, str]:
        """Return what was held back."""
        reasoning, shown = self._splitter.finish()
        shown = self._joined(*self._marks.push(shown))
        return reasoning, shown + self._joined(*self._marks.finish())

    def _joined(self, inner: str, after: str) -> str:
        """Return the text within the marks, and a new line before the text behind them."""
        self._is_wrapped = self._is_wrapped or bool(inner)
        gap = "\n" if after and self._is_wrapped and not self._is_past else ""
        self._is_past = self._is_past or bool(after)
        return inner + gap + after


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
            tags = TagSplitter(self.start, self.end, opened=opened, continued=continued)
            return UnwrappedAnswer(tags, *self.answer) if self.answer[0] else tags
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
    """Return the beginning of the answer that stands at the prompt's end, "" where there is none.

    With tags that is the text from the last start tag on, closed or not; with channels (harmony)
    the header of the last message.
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

    Where no known mark is found, a conversation with a thought is rendered: what stands before and
    after the thought are its marks.
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
