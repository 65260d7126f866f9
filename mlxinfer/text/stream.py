"""One request's tokens to what its user sees. Knows text rules; nothing of engines or transport."""

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import Detokenizer
from .reasoning import ReasoningFormat
from .stops import StopMatcher
from .tokenizer import Tokenizer

PROMPT_TAIL = 64  # prompt tokens among which an opened reasoning tag or channel is looked for


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: visible text, and reasoning (which comes before it)."""

    text: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning)


class TextStream:
    """Token ids in, deltas out; the deltas joined are the same whatever pieces the ids come in.

    Args:
        tokenizer: whose ids these are.
        stop: strings that end the answer, looked for in the visible text only.
        reasoning: how the model marks its reasoning; None: all text is visible.
        include_stop: keep the stop string that ended the answer.
        min_tokens: a stop string completed before this many tokens does not count.
        prompt_ids: the prompt, to see whether it has opened the reasoning already.
        continues: the answer goes on within the prompt's text (a plain completion), so that a
            leading space is part of it.

    Attributes:
        stopped: a stop string has come; nothing is given out any more.
        stop_match: that string.
        num_tokens: tokens taken, the one that completed the stop string being the last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        continues: bool = False,
    ) -> None:
        kept = _special_ids_in(tokenizer, reasoning.marks) if reasoning else frozenset()
        before = prompt_ids if continues else ()
        self._detokenizer = Detokenizer(tokenizer, keep_ids=kept, prompt_ids=before)
        self._splitter = None
        if reasoning:
            tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False)
            self._splitter = reasoning.splitter(tail)
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._finished = False
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._matcher.matched is not None

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Return what these tokens add; nothing once a stop string has come."""
        assert self.stopped or not self._finished, "push after finish"
        texts: list[str] = []
        thoughts: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            self._take(self._detokenizer.push(token_id), texts, thoughts)
        return Delta("".join(texts), "".join(thoughts))

    def finish(self) -> Delta:
        """Return what was held back, now that no token follows. A second call returns nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return Delta()
        self._finished = True
        texts: list[str] = []
        thoughts: list[str] = []
        self._take(self._detokenizer.flush(), texts, thoughts)
        if self._splitter and not self.stopped:
            reasoning, text = self._splitter.finish()
            thoughts.append(reasoning)
            texts.append(self._match(text))
        texts.append(self._matcher.finish())
        return Delta("".join(texts), "".join(thoughts))

    def _take(self, text: str, texts: list[str], thoughts: list[str]) -> None:
        if not text:
            return
        if self._splitter:
            reasoning, text = self._splitter.push(text)
            thoughts.append(reasoning)
        texts.append(self._match(text))

    def _match(self, text: str) -> str:
        return self._matcher.push(text, enabled=self.num_tokens >= self._min_tokens)


def _special_ids_in(tokenizer: Tokenizer, marks: Sequence[str]) -> frozenset[int]:
    """Return the special ids whose text is a mark or a part of one."""
    return frozenset(
        token_id
        for token_id in tokenizer.special_ids
        if any(tokenizer.added_tokens[token_id].content in mark for mark in marks)
    )
