"""One answer's token ids to text, reasoning and tool calls, with stop strings.

The detokenizer turns ids to text as they arrive, never half a character.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial

from ..outputs import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta, merged
from .reasoning import ReasoningFormat, answer_begun
from .tokenizer import INCOMPLETE, Tokenizer
from .tools.format import ToolParser

PROMPT_TAIL = 16  # prompt tokens that can matter to the first characters of an answer
MAX_HELD = 64  # ids; more than these are no character


class Detokenizer:
    """Ids in, text out, for one answer.

    The text of an id is what it adds to the decoding of the ids before it. Those of the last piece
    are enough: decoders look back at most to the end of a character. A text that ends with U+FFFD
    is held back, since the next ids may complete its last character. The texts joined equal
    `Tokenizer.decode` of all ids, unless bytes among these are no characters.

    Args:
        keep_ids: special ids that are written out; `Tokenizer.decode` leaves out all.
        prompt_ids: the prompt, if the answer continues its text. Then the answer's leading space
            is kept, which decoders strip at the beginning of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, keep_ids: Iterable[int] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._skipped = tokenizer.special_ids - set(keep_ids)
        self._ids = [i for i in prompt_ids[-PROMPT_TAIL:] if i not in self._skipped]
        text = self._decode(self._ids)
        self._shown = text.rstrip(INCOMPLETE)  # the text of `_ids` that was returned
        self._num_shown = len(self._ids) if text == self._shown else 0  # ids with no other text

    def push(self, token_id: int) -> str:
        """Return the text that is certain after this token; often ""."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._num_shown
        if held < MAX_HELD and (len(text) <= len(self._shown) or text.endswith(INCOMPLETE)):
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown, self._shown = len(self._ids), self._decode(self._ids)
        return piece

    def flush(self) -> str:
        """Return the rest of the text; half a character becomes U+FFFD. No token may follow."""
        return self._decode(self._ids)[len(self._shown) :]


class TextStream:
    """Token ids in, parts of the answer out.

    The sum of the parts does not depend on how the ids are divided into pushes.

    Args:
        stop: strings that end the answer. They are looked for in the visible text only, and not
            across a tool call.
        reasoning: how the model marks its reasoning; None: all text is visible.
        tools: finds tool calls in the visible text; None: there are none. A call in the reasoning
            counts only if the answer ends with it (`ThoughtCalls`).
        single_call: the first complete tool call ends the answer.
        min_tokens: a stop string that is completed before this many tokens does not count.
        continues: the answer continues the prompt's text (a plain completion), so its leading
            space is part of it.

    Attributes:
        stopped: a stop string or the only tool call has ended the answer; nothing follows.
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
        keep_ids = _special_ids_in(tokenizer, marks) if marks else frozenset()
        before = prompt_ids if continues else ()
        self._detokenizer = Detokenizer(tokenizer, keep_ids=keep_ids, prompt_ids=before)
        self._splitter = None
        if reasoning:
            chosen, prefix = answer_begun(tokenizer, reasoning, prompt_ids)
            self._splitter = chosen.splitter(prefix)
        self._thoughts = ThoughtCalls(tools) if self._splitter and tools else None
        self._matcher = StopMatcher(stop) if stop else None
        self._tools = tools
        self._single_call = single_call
        self._min_tokens = min_tokens
        self._finished = False
        self.stopped = False
        self.num_tokens = 0

    @property
    def stop_match(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> tuple[Part, ...]:
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
            is_thinking = self._splitter.is_thinking
            reasoning, text = self._splitter.finish()
            if self._thoughts:
                parts.append(ReasoningPart(self._thoughts.push(reasoning)))
                parts += self._thoughts.finish(is_thinking=is_thinking)
            else:
                parts.append(ReasoningPart(reasoning))
            self._find_calls(text, parts)
        if self._tools and not self.stopped:
            self._show(self._tools.finish(), parts)
        if self._matcher and not self.stopped:
            parts.append(TextPart(self._matcher.finish()))
        return merged(parts)

    def _split(self, text: str, parts: list[Part]) -> None:
        if self._splitter:
            self._think(*self._splitter.push(text), parts)
        else:
            self._find_calls(text, parts)

    def _think(self, reasoning: str, text: str, parts: list[Part]) -> None:
        if self._thoughts:
            reasoning = self._thoughts.push(reasoning)
            if self._splitter is None or not self._splitter.is_thinking:
                reasoning += self._thoughts.release()
        parts.append(ReasoningPart(reasoning))
        self._find_calls(text, parts)

    def _find_calls(self, text: str, parts: list[Part]) -> None:
        self._show(self._tools.push(text) if self._tools else [TextPart(text)], parts)

    def _show(self, new: Iterable[Part], parts: list[Part]) -> None:
        matcher = self._matcher
        for part in new:
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


class ThoughtCalls:
    """Finds complete calls at the end of a thought that is never closed.

    A thought may mention a call. So what looks like one is held back until other text follows it,
    or the thought is closed: then it is a part of the thought. If the answer ends there, it is a
    call.

    Args:
        tools: the parser of the visible text, of which others are made.
    """

    def __init__(self, tools: ToolParser) -> None:
        self._tools = tools
        self._parser = tools.another(lambda: "")
        self._held = ""
        self._num_released = 0  # characters

    def push(self, text: str) -> str:
        self._held += text
        self._parser.push(text)
        size = max(self._parser.text_end - self._num_released, 0)
        shown, self._held = self._held[:size], self._held[size:]
        self._num_released += size
        return shown

    def release(self) -> str:
        """Return what was held back, once the thought is closed."""
        held, self._held = self._held, ""
        self._num_released += len(held)
        return held

    def finish(self, *, is_thinking: bool) -> tuple[Part, ...]:
        """Return the rest of the thought, as calls if it is nothing else and still open."""
        held = self.release()
        if not is_thinking or not held.strip():
            return (ReasoningPart(held),)
        parser = self._tools.another()
        parts = merged([*parser.push(held), *parser.finish()])
        ends = [part.status for part in parts if isinstance(part, ToolCallDelta)]
        is_text = any(isinstance(part, TextPart) and part.text.strip() for part in parts)
        is_broken = any(status in (CallStatus.CUT, CallStatus.BROKEN) for status in ends)
        is_call = bool(ends) and not is_text and not is_broken
        return parts if is_call else (ReasoningPart(held),)


def _special_ids_in(tokenizer: Tokenizer, marks: Sequence[str]) -> frozenset[int]:
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
            enabled: False: a stop string that this piece completes does not count.
        """
        if self.matched is not None:
            return ""
        old, text = len(self._held), self._held + text
        match = self._first(text, old) if enabled else None
        if match is not None:
            end, self.matched = match
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
        longest = self._sizes[0] if self._sizes else 1
        for size in range(min(len(text), longest - 1), 0, -1):
            end = text[-size:]
            at = bisect_right(self._stops, end)  # longer strings with this beginning come next
            if at < len(self._stops) and self._stops[at].startswith(end):
                return size
        return 0
