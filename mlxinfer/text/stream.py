"""One answer's token ids to text, reasoning and tool calls, with stop strings.

The detokenizer turns ids to text as they arrive, never half a character. A tokenizer's decoder is a
chain of steps over a list of tokens. Each step has an incremental form here, which holds back only
tokens that a later one could still change.
"""

import codecs
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..outputs import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta, merged
from .reasoning import ReasoningFormat, answer_prefix
from .tokenizer import BYTE_OF, Tokenizer, byte_of_fallback
from .tools.format import ToolParser

PROMPT_TAIL = 16  # prompt tokens that can matter to the first characters of an answer


class DecoderStep(ABC):
    """One step of a decoder, fed a token at a time. Most steps hold nothing back."""

    @abstractmethod
    def feed(self, token: str) -> list[str]:
        """Return the tokens that are certain after `token`."""

    def finish(self) -> list[str]:
        """Return the tokens that were held back, at the end of the text."""
        return []

    def settle(self) -> list[str]:
        """Return the tokens that are held back at the end of a prompt.

        Half a character stays held, since the answer may complete it.
        """
        return []


class EachToken(DecoderStep):
    """Changes the first token in one way and all others in another, by default in the same."""

    def __init__(
        self, first: Callable[[str], str], other: Callable[[str], str] | None = None
    ) -> None:
        self._change, self._other = first, other or first

    def feed(self, token: str) -> list[str]:
        """Return the token, changed."""
        changed = self._change(token)
        self._change = self._other
        return [changed]


class ByteLevel(DecoderStep):
    """GPT-2's alphabet: each character of a token stands for a byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: str) -> list[str]:
        """Return the characters that are complete."""
        try:
            data = bytes([BYTE_OF[char] for char in token])
        except KeyError:  # an added token, outside of the alphabet
            data = token.encode()
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        """Return U+FFFD for a character that stayed incomplete."""
        return [self._utf8.decode(b"", final=True)]


class ByteFallback(DecoderStep):
    """Tokens such as `<0xE2>` stand for bytes.

    A run of them becomes text if it is valid UTF-8, and otherwise one U+FFFD for each byte. The run
    is held back until it ends, since only then it is known to be valid.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, token: str) -> list[str]:
        """Return the run that this token ends, then the token."""
        byte = byte_of_fallback(token)
        if byte is not None:
            self._run.append(byte)
            return []
        return [*self.finish(), token]

    def finish(self) -> list[str]:
        """Return the run."""
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def settle(self) -> list[str]:
        """Return the run without half a character at its end."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = utf8.decode(bytes(self._run))
        self._run = bytearray(utf8.getstate()[0])
        return [text] if text else []


class StripEnds(DecoderStep):
    """Removes up to `start` and `stop` characters `content` from the ends of the whole text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._tail = ""  # trailing `content`, which may be the end

    def feed(self, token: str) -> list[str]:
        """Return the new text without trailing characters that may have to be removed."""
        while self._start and token:
            if token[0] != self._content:
                self._start = 0
            else:
                self._start -= 1
                token = token[1:]
        text = self._tail + token
        kept = len(text)
        while kept and len(text) - kept < self._stop and text[kept - 1] == self._content:
            kept -= 1
        self._tail = text[kept:]
        return [text[:kept]]

    def settle(self) -> list[str]:
        """Return what is held back; at the end of a text it would be removed."""
        tail, self._tail = self._tail, ""
        return [tail] if tail else []


def decoder_steps(spec: dict[str, Any] | None) -> list[DecoderStep] | None:
    """Return fresh steps for a decoder's JSON description, None without an incremental form."""
    if spec is None:  # without a decoder, tokens are joined by spaces
        return [EachToken(str, lambda token: " " + token)]
    fused = False
    steps: list[DecoderStep] = []
    for part in spec["decoders"] if spec.get("type") == "Sequence" else [spec]:
        kind = part.get("type")
        step = None if kind == "Fuse" else _step_of(part, fused)
        if kind != "Fuse" and step is None:
            return None
        steps.extend([step] if step else [])
        fused = fused or kind in ("Fuse", "ByteLevel")
    return steps


def _step_of(part: dict[str, Any], fused: bool) -> DecoderStep | None:
    """Return one step, None without an incremental form; after Fuse the text is a single token."""
    kind = part.get("type")
    if kind == "Strip":
        return _strip(part["content"], part["start"], part["stop"], fused)
    if kind == "Replace":
        return _replace(part["pattern"].get("String"), part["content"], fused)
    if kind == "ByteLevel" and not fused:
        return ByteLevel()
    if kind == "ByteFallback" and not fused:
        return ByteFallback()
    if kind == "Metaspace" and not fused:
        return _metaspace(part["replacement"], part.get("prepend_scheme", "always"))
    return None


def _strip(content: str, start: int, stop: int, fused: bool) -> DecoderStep:
    if fused:
        return StripEnds(content, start, stop)

    def strip(token: str) -> str:
        whole = StripEnds(content, start, stop)
        return "".join(whole.feed(token))

    return EachToken(strip)


def _replace(old: str | None, new: str, fused: bool) -> DecoderStep | None:
    if not old or (fused and len(old) > 1):  # a match could lie across tokens
        return None
    return EachToken(lambda token: token.replace(old, new))


def _metaspace(mark: str, prepend_scheme: str) -> DecoderStep:
    def other(token: str) -> str:
        return token.replace(mark, " ")

    def first(token: str) -> str:
        return token.replace(mark, "")

    return EachToken(other if prepend_scheme == "never" else first, other)


class Detokenizer:
    """Ids in, text out, for one answer. The texts joined equal `Tokenizer.decode` of all ids.

    The time is linear in the number of ids: each id is looked up once and passes each step once.
    A decoder without an incremental form (CTC, WordPiece) gives all of its text at the end.

    Args:
        tokenizer: of the ids.
        skip_special_tokens: leave out control tokens, as `Tokenizer.decode` does.
        keep_ids: special ids that are written out all the same.
        prompt_ids: the prompt, if the answer continues its text. Then the answer's leading space
            is kept, which decoders strip at the beginning of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        keep_ids: Iterable[int] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - set(keep_ids) if skip_special_tokens else set()
        self._steps = decoder_steps(tokenizer.decoder_spec)
        self._held: list[int] = []  # where the decoder has no incremental form
        self._before = 0  # characters of the held ids that are the prompt's
        if prompt_ids:
            for token_id in prompt_ids[-PROMPT_TAIL:]:
                self.push(token_id)
            self.end_prompt()

    def push(self, token_id: int) -> str:
        """Return the text that is certain after this token; often ""."""
        if token_id in self._skipped:
            return ""
        if self._steps is None:
            self._held.append(token_id)
            return ""
        piece = self._tokenizer.id_to_piece(token_id)
        if piece is None:
            return ""
        tokens = [piece]
        for step in self._steps:
            tokens = [out for token in tokens for out in step.feed(token)]
        return "".join(tokens)

    def end_prompt(self) -> str:
        """Return the text that is certain if the ids so far are a prompt which an answer continues.

        Half a character stays held: `flush`, or the answer's text, begins with it.
        """
        text = self._decoded()
        self._before = len(text)
        return text or self._drain(lambda step: step.settle())

    def flush(self) -> str:
        """Return the rest of the text; half a character becomes U+FFFD. No token may follow."""
        if self._steps is None:
            text = self._decoded()[self._before :]
            self._held, self._before = [], 0
            return text
        return self._drain(lambda step: step.finish())

    def _drain(self, held_by: Callable[[DecoderStep], list[str]]) -> str:
        """Return what the steps hold back, passing each one's tokens through the steps after it."""
        tokens: list[str] = []
        for step in self._steps or ():
            tokens = [out for token in tokens for out in step.feed(token)] + held_by(step)
        return "".join(tokens)

    def _decoded(self) -> str:
        """Return the text of the held ids, for a decoder without an incremental form."""
        return self._tokenizer.decode(self._held, skip_special_tokens=False) if self._held else ""


class TextStream:
    """Token ids in, parts of the answer out.

    The sum of the parts does not depend on how the ids are divided into pushes.

    Args:
        tokenizer: of the ids.
        stop: strings that end the answer. They are looked for in the visible text only, and not
            across a tool call.
        reasoning: how the model marks its reasoning; None: all text is visible.
        tools: finds tool calls in the visible text; None: there are none. Reasoning has none.
        single_call: the first complete tool call ends the answer.
        min_tokens: a stop string that is completed before this many tokens does not count.
        prompt_ids: the prompt, which may have opened the reasoning.
        continues: the answer continues the prompt's text (a plain completion), so its leading
            space is part of it.

    Attributes:
        stopped: a stop string or the only tool call has ended the answer; nothing follows.
        stop_match: that stop string.
        num_tokens: tokens taken, up to and including the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
        tools: ToolParser | None = None,
        single_call: bool = False,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        continues: bool = False,
    ) -> None:
        marks = (*(reasoning.marks if reasoning else ()), *(tools.marks if tools else ()))
        kept = _special_ids_in(tokenizer, marks) if marks else frozenset()
        before = prompt_ids if continues else ()
        self._detokenizer = Detokenizer(tokenizer, keep_ids=kept, prompt_ids=before)
        self._splitter = None
        if reasoning:
            self._splitter = reasoning.splitter(answer_prefix(tokenizer, reasoning, prompt_ids))
        self._matcher = StopMatcher(stop) if stop else None
        self._tools = tools
        self._single_call = single_call
        self._min_tokens = min_tokens
        self._finished = False
        self.stopped = False
        self.num_tokens = 0

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._matcher is None else self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> tuple[Part, ...]:
        """Return what these tokens add; nothing after the answer was stopped."""
        assert not self._finished or self.stopped, "push after finish"
        parts: list[Part] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if text:
                self._split(text, parts)
        return merged(parts)

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, at the end of the answer. A second call returns nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return ()
        self._finished = True
        parts: list[Part] = []
        self._split(self._detokenizer.flush(), parts)
        if self._splitter and not self.stopped:
            reasoning, text = self._splitter.finish()
            parts.append(ReasoningPart(reasoning))
            self._find_calls(text, parts)
        if self._tools and not self.stopped:
            self._show(self._tools.finish(), parts)
        if self._matcher and not self.stopped:
            parts.append(TextPart(self._matcher.finish()))
        return merged(parts)

    def _split(self, text: str, parts: list[Part]) -> None:
        if self._splitter:
            reasoning, text = self._splitter.push(text)
            parts.append(ReasoningPart(reasoning))
        self._find_calls(text, parts)

    def _find_calls(self, text: str, parts: list[Part]) -> None:
        self._show(self._tools.push(text) if self._tools else [TextPart(text)], parts)

    def _show(self, found: Iterable[Part], parts: list[Part]) -> None:
        """Append parts up to the first stop string in their text."""
        matcher = self._matcher
        for part in found:
            if self.stopped:
                return
            if matcher and isinstance(part, TextPart):
                enabled = self.num_tokens >= self._min_tokens
                parts.append(TextPart(matcher.push(part.text, enabled=enabled)))
                self.stopped = matcher.matched is not None
                continue
            if matcher:
                parts.append(TextPart(matcher.finish()))
            parts.append(part)
            if isinstance(part, ToolCallDelta) and part.status is CallStatus.DONE:
                self.stopped = self._single_call


def _special_ids_in(tokenizer: Tokenizer, marks: Sequence[str]) -> frozenset[int]:
    """Return the special ids of tokens that are a mark or a part of one."""
    return frozenset(
        token_id
        for token_id in tokenizer.special_ids
        if any(tokenizer.added_tokens[token_id].content in mark for mark in marks)
    )


class StopMatcher:
    """Holds text back only while it may still become a stop string.

    The first stop string to be complete ends the text; of several that are complete at the same
    character, the longest. `matched` is that string, None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops)
        self._known = frozenset(stops)
        self._sizes = sorted(set(map(len, stops)), reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, enabled: bool = True) -> str:
        """Return the text that can be shown now; nothing after a match.

        Args:
            text: the next piece.
            enabled: False: a stop string that this piece completes does not count.
        """
        if self.matched is not None:
            return ""
        old, text = len(self._held), self._held + text
        found = self._first(text, old) if enabled else None
        if found is not None:
            end, self.matched = found
            self._held = ""
            return text[: end - len(self.matched)]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return what was held back, at the end of a text; the next text begins afresh."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """Return where the first stop string ends after the `old` characters, and that string."""
        for end in range(old + 1, len(text) + 1):
            for size in self._sizes:
                if size <= end and (part := text[end - size : end]) in self._known:
                    return end, part
        return None

    def _num_held(self, text: str) -> int:
        """Return how many of the last characters are the beginning of a stop string."""
        longest = self._sizes[0] if self._sizes else 1
        for size in range(min(len(text), longest - 1), 0, -1):
            end = text[-size:]
            at = bisect_right(self._stops, end)  # longer strings with this beginning come next
            if at < len(self._stops) and self._stops[at].startswith(end):
                return size
        return 0
