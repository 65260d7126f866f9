"""One answer's token ids to text, reasoning and tool calls, with stop strings.

Stop strings are found by an Aho-Corasick automaton (1975): one step per character, however many
strings there are. Its depth is exactly how much of the text could still become a stop string.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from ..outputs import CallStatus, Part, ReasoningPart, TextPart, ToolCallDelta, merged
from .detokenizer import Detokenizer
from .reasoning import ReasoningFormat, answer_prefix
from .tokenizer import Tokenizer
from .tools.format import ToolParser


class TextStream:
    """Token ids in, parts of the answer out.

    Their sum does not depend on how the ids are divided into pushes.

    Args:
        tokenizer: of the ids.
        stop: strings that end the answer. They are looked for in the visible text only, and not
            across a tool call.
        reasoning: how the model marks its reasoning; None: all text is visible.
        tools: finds tool calls in the visible text; None: there are none. Reasoning has none.
        single_call: the first complete tool call ends the answer.
        include_stop: keep the stop string that ended the answer.
        min_tokens: a stop string that is completed before this many tokens does not count.
        prompt_ids: the prompt, which may have opened the reasoning.
        continues: the answer continues the prompt's text (a plain completion), so that a leading
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
        include_stop: bool = False,
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
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._tools = tools
        self._single_call = single_call
        self._min_tokens = min_tokens
        self._finished = False
        self.stopped = False
        self.num_tokens = 0

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

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
        if not self.stopped:
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
        for part in found:
            if self.stopped:
                return
            if isinstance(part, TextPart):
                enabled = self.num_tokens >= self._min_tokens
                parts.append(TextPart(self._matcher.push(part.text, enabled=enabled)))
                self.stopped = self._matcher.matched is not None
                continue
            parts += [TextPart(self._matcher.finish()), part]
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

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._include = include_stop
        self._next: list[dict[str, int]] = [{}]  # node -> character -> node
        self._fail = [0]  # node -> node of its longest proper suffix
        self._depth = [0]
        self._match: list[str | None] = [None]  # longest stop string that ends at the node
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0
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
        if len(self._next) == 1:
            return text
        node = self._node
        for index, char in enumerate(text):
            while node and char not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(char, 0)
            match = self._match[node]
            if match is not None and enabled:
                return self._stop(self._held + text[: index + 1], match)
        self._node = node
        shown, self._held = _split(self._held + text, self._depth[node])
        return shown

    def finish(self) -> str:
        """Return what was held back, at the end of a text; the next text begins afresh."""
        held, self._held = self._held, ""
        self._node = 0
        return held

    def _stop(self, text: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return text if self._include else text[: len(text) - len(match)]

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][char]
        if node:
            self._match[node] = stop

    def _link(self) -> None:
        """Set `_fail` breadth first, and let nodes inherit the matches of their suffixes."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fail = self._fail[node]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)


def _split(text: str, held: int) -> tuple[str, str]:
    """Return text without its last `held` characters, and those."""
    cut = len(text) - held
    return text[:cut], text[cut:]
