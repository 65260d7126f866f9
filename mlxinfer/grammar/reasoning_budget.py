"""Bounds the tokens of an answer's reasoning: a grammar forces the closing mark.

The idea is that of budget forcing (Muennighoff et al., s1: Simple test-time scaling,
arXiv:2501.19393), in the masks of the sampler, so that it holds in any batch and beside any other
grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from ..core import Grammar
from ..text import ReasoningFormat, Tokenizer
from ..text.splitters import MAX_LEADING_SPACE, channel_of

WORD_BITS = 32  # of a mask
ALL = np.uint32(0xFFFFFFFF)
MAX_HEADER = 256  # characters of a message's header, marks included


class _Phase(Enum):
    BEFORE = auto()  # the answer may yet open its reasoning; with channels: between messages
    REASONING = auto()
    AFTER = auto()  # no more reasoning


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """The tokens of a model that bound its reasoning, the same for all answers.

    Attributes:
        closing: token ids of the mark that ends the reasoning.
        reopening: the first token of the channel of reasoning; None: nothing reopens it.
    """

    tokenizer: Tokenizer
    format: ReasoningFormat
    closing: tuple[int, ...]
    reopening: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, format: ReasoningFormat) -> "BudgetRule":
        mark = format.channels.ends[0] if format.harmony else format.end
        closing = tokenizer.encode(mark, add_special_tokens=False, parse_special=True)
        reopening = None
        if format.harmony and "analysis" in format.channels.thought:
            reopening = tokenizer.encode("analysis", add_special_tokens=False)[0]
        return cls(tokenizer, format, tuple(closing), reopening)


class ReasoningBudget:
    """The state of one answer; a `core.Grammar`.

    Args:
        max_tokens: of reasoning, marks included; then the closing mark is forced, as soon as the
            grammar within allows it. With channels no further message of reasoning may begin.
        prefix: what the prompt holds of the answer (see `answer_begun`).
        inner: the grammar of the whole answer, reasoning included; None: any text.
    """

    def __init__(
        self, rule: BudgetRule, max_tokens: int, prefix: str, inner: Grammar | None
    ) -> None:
        self._rule, self._inner = rule, inner
        self._left = max_tokens
        self._num_closed = 0  # tokens of the closing mark that have come
        self._text = ""  # the end of the answer that may hold a part of a mark
        self._phase = _Phase.BEFORE
        if rule.format.is_open(prefix):
            self._phase = _Phase.REASONING
        elif rule.format.is_closed(prefix) or rule.format.is_over(prefix):
            self._phase = _Phase.AFTER
        elif rule.format.harmony:
            self._text = prefix

    @property
    def place(self) -> str:
        return "max_reasoning_tokens" if self._inner is None else self._inner.place

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is whole: not while its reasoning is being closed."""
        return not self._is_due and (self._inner is None or self._inner.accepting)

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    @property
    def problem(self) -> str | None:
        """Why the answer cannot go on; None if it can."""
        return None if self._inner is None else self._inner.problem

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._phase is _Phase.AFTER:
            return
        closing = self._rule.closing
        if self._phase is _Phase.REASONING:
            self._left -= 1
            follows = token_id == closing[self._num_closed]
            self._num_closed = self._num_closed + 1 if follows else int(token_id == closing[0])
        self._text += self._rule.tokenizer.decode([token_id], skip_special_tokens=False)
        if self._num_closed == len(closing):
            self._close()
        elif self._rule.format.harmony:
            self._follow_channels()
        else:
            self._follow_tags()

    def forced(self) -> list[int]:
        """Return the rest of the closing mark if it is due, else what the inner grammar forces."""
        if self._is_due:
            return list(self._rule.closing[self._num_closed :])
        return [] if self._inner is None else self._inner.forced()

    def fork(self) -> "ReasoningBudget":
        other = object.__new__(ReasoningBudget)
        other.__dict__.update(self.__dict__)
        other._inner = None if self._inner is None else self._inner.fork()
        return other

    @staticmethod
    def fill_masks(
        grammars: Sequence["ReasoningBudget"], rows: Sequence[int], masks: NDArray[np.uint32]
    ) -> None:
        """Write the allowed next tokens of several answers into their rows of `masks`.

        Args: see `core.Grammar.fill_masks`.
        """
        kinds: dict[type[Grammar], list[tuple[Grammar, int]]] = {}
        for grammar, row in zip(grammars, rows, strict=True):
            if grammar._inner is None:
                masks[row] = ALL
            else:
                kinds.setdefault(type(grammar._inner), []).append((grammar._inner, row))
        for kind, pairs in kinds.items():
            kind.fill_masks([inner for inner, _ in pairs], [row for _, row in pairs], masks)
        for grammar, row in zip(grammars, rows, strict=True):
            grammar._narrow(masks[row])

    @property
    def _is_due(self) -> bool:
        return self._phase is _Phase.REASONING and self._left <= 0

    def _narrow(self, mask: NDArray[np.uint32]) -> None:
        if self._is_due:
            word, bit = divmod(self._rule.closing[self._num_closed], WORD_BITS)
            if mask[word] >> np.uint32(bit) & np.uint32(1):
                mask[:] = 0
                mask[word] = np.uint32(1 << bit)
        elif self._is_header and self._left <= 0 and self._rule.reopening is not None:
            word, bit = divmod(self._rule.reopening, WORD_BITS)
            mask[word] &= ~np.uint32(1 << bit)

    @property
    def _is_header(self) -> bool:
        return self._phase is _Phase.BEFORE and self._text.endswith("<|channel|>")

    def _close(self) -> None:
        self._text, self._num_closed = "", 0
        self._phase = _Phase.BEFORE if self._rule.format.harmony else _Phase.AFTER

    def _follow_tags(self) -> None:
        """Follow tags: reasoning can only stand at the beginning of an answer, and ends once."""
        start, end = self._rule.format.start, self._rule.format.end
        if self._phase is _Phase.REASONING:
            if end in self._text:
                self._close()
            self._text = self._text[-len(end) :]
            return
        body = self._text.lstrip()
        if len(self._text) - len(body) > MAX_LEADING_SPACE:
            self._phase = _Phase.AFTER
        elif body.startswith(start):
            self._phase, self._text = _Phase.REASONING, ""
        elif not start.startswith(body):
            self._phase = _Phase.AFTER

    def _follow_channels(self) -> None:
        """Follow channels: each message of the channel `analysis` is reasoning."""
        if any(self._text.endswith(mark) for mark in self._rule.format.channels.ends):
            self._close()
        elif self._phase is _Phase.BEFORE and self._text.endswith("<|message|>"):
            header = self._text.removesuffix("<|message|>")
            if channel_of(header) == "analysis":
                self._phase = _Phase.REASONING
            self._text = ""
        elif self._phase is _Phase.REASONING:
            self._text = ""
        self._text = self._text[-MAX_HEADER:]
