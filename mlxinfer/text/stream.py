"""One request's tokens to what its user sees. Knows text rules; nothing of engines or transport."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..parts import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta, merged
from .begun import begun_in
from .detokenizer import Detokenizer
from .reasoning import ReasoningFormat
from .stops import StopMatcher
from .tokenizer import Tokenizer
from .tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new: visible text, reasoning and pieces of tool calls, in their order."""

    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The visible text."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of tool calls."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))

    def __bool__(self) -> bool:
        return bool(self.parts)


class TextStream:
    """Token ids in, deltas out; the deltas joined are the same whatever pieces the ids come in.

    Args:
        tokenizer: whose ids these are.
        stop: strings that end the answer, looked for in the visible text only, and not across
            a tool call.
        reasoning: how the model marks its reasoning; None: all text is visible.
        tools: finds tool calls in what is visible; None: they are text. Reasoning has none.
        single_call: the first complete tool call ends the answer.
        include_stop: keep the stop string that ended the answer.
        min_tokens: a stop string completed before this many tokens does not count.
        prompt_ids: the prompt, to see whether it has opened the reasoning already.
        continues: the answer goes on within the prompt's text (a plain completion), so that a
            leading space is part of it.

    Attributes:
        stopped: a stop string, or the only tool call, has come; nothing is given out any more.
        stop_match: that string.
        num_tokens: tokens taken, the one that completed the stop string being the last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
        tools: ToolParser | None = None,
        single_call: bool = False,
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        continues: bool = False,
    ) -> None:
        marks = (*(reasoning.marks if reasoning else ()), *(tools.marks if tools else ()))
        kept = _special_ids_in(tokenizer, marks)
        before = prompt_ids if continues else ()
        self._detokenizer = Detokenizer(tokenizer, keep_ids=kept, prompt_ids=before)
        self._splitter = None
        if reasoning:
            self._splitter = reasoning.splitter(begun_in(tokenizer, reasoning, prompt_ids))
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._tools = tools
        self._single_call = single_call
        self._called = False  # the only tool call is complete
        self._min_tokens = min_tokens
        self._finished = False
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the only tool call, has ended the answer."""
        return self._called or self._matcher.matched is not None

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Return what these tokens add; nothing once the answer has been stopped."""
        assert self.stopped or not self._finished, "push after finish"
        parts: list[Part] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if text:
                self._split(text, parts)
        return TextDelta(merged(parts))

    def finish(self) -> TextDelta:
        """Return what was held back, now that no token follows. A second call returns nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return TextDelta()
        self._finished = True
        parts: list[Part] = []
        self._split(self._detokenizer.flush(), parts)
        if self._splitter and not self.stopped:
            reasoning, text = self._splitter.finish()
            parts.append(ReasoningPart(reasoning))
            self._find_calls(text, parts)
        if self._tools and not self.stopped:
            self._show(self._tools.finish(), parts)
        if not self.stopped:
            parts.append(TextPart(self._matcher.finish()))
        return TextDelta(merged(parts))

    def _split(self, text: str, parts: list[Part]) -> None:
        if self._splitter:
            reasoning, text = self._splitter.push(text)
            parts.append(ReasoningPart(reasoning))
        self._find_calls(text, parts)

    def _find_calls(self, text: str, parts: list[Part]) -> None:
        self._show(self._tools.push(text) if self._tools else [TextPart(text)], parts)

    def _show(self, found: Iterable[Part], parts: list[Part]) -> None:
        """Look for stop strings in the text, and pass on what comes before one."""
        for part in found:
            if self.stopped:
                return
            if isinstance(part, TextPart):
                enabled = self.num_tokens >= self._min_tokens
                parts.append(TextPart(self._matcher.push(part.text, enabled=enabled)))
                continue
            parts += [TextPart(self._matcher.finish()), part]
            if isinstance(part, ToolCallDelta) and part.status is CallStatus.DONE:
                self._called = self._single_call


def _special_ids_in(tokenizer: Tokenizer, marks: Sequence[str]) -> frozenset[int]:
    """Return the special ids whose text is a mark or a part of one."""
    return frozenset(
        token_id
        for token_id in tokenizer.special_ids
        if any(tokenizer.added_tokens[token_id].content in mark for mark in marks)
    )
