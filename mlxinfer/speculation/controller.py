"""How many proposals of each sequence a step verifies: as many as give most tokens a second.

Speculation loses where a step of more rows costs more than the proposals that hold are worth: with
small models, mixtures of experts, many requests at once, or text that cannot be foreseen. So the
time of steps and the acceptance are measured, and nothing is proposed where that loses.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .estimates import StepTimes, bucket_of

WARM_UP = 4  # plain steps that are measured before the first proposals
LOOK_BACK = 16  # steps with proposals that must not be slower than plain ones, together
FIRST_REST, LONGEST_REST = 96, 3072  # plain steps until the next trial
RECHECK = 512  # steps with proposals until plain ones are measured again
MARGIN = 1.02  # by which a step with proposals must promise more
PROBES = 2
WORTH_A_PROBE = 0.3  # chance of a proposal
KEPT = 9  # measurements of which the median counts


@dataclass(frozen=True, slots=True)
class Outlook:
    """What could be proposed for a sequence: how likely proposals hold, and what they cost."""

    chances: Seq[float]  # that the next proposal holds, those before it given; by position
    cost: float = 0.0  # of making a proposal, in plain steps, as long as it was not measured


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was read: its proposals, its tokens, and how long it took."""

    num_sequences: int  # that got tokens
    num_proposals: int
    num_tokens: int  # of their answers
    seconds: float | None  # since the step before it was read; None: not timed
    draft_s: float = 0.0  # of these, for making proposals
    depth: int = 0  # the most proposals of one sequence that had a cost


class Policy(Protocol):
    """Says how many proposals a step verifies."""

    def is_open(self, num_sequences: int) -> bool:
        """Whether `choose` may want proposals with so many sequences; False: none need be made."""
        ...

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        """How many proposals to verify of each sequence that could have any.

        Args:
            outlooks: of these sequences.
            num_sequences: all that decode in the step, or in those that take turns.
            share: of them that decode in the step.
        """
        ...

    def observe(self, step: MeasuredStep) -> bool:
        """Learn from a step; True: sources that cost something are to be tried once more."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same number of proposals always: for measurements and tests."""

    depth: int

    def is_open(self, num_sequences: int) -> bool:
        """Whether the depth is not 0."""
        return self.depth > 0

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        """As many proposals as there are, up to the depth."""
        return [min(self.depth, len(outlook.chances)) for outlook in outlooks]

    def observe(self, step: MeasuredStep) -> bool:
        """Ignored: the depth is fixed."""
        return False


@dataclass(slots=True)
class Regime:
    """What holds for steps of one batch size."""

    blocked: int = WARM_UP  # plain steps until proposals may come again
    until_trial: int = FIRST_REST  # plain steps until costly sources are tried once more
    next_rest: int = FIRST_REST
    since_recheck: int = 0
    probes: int = PROBES  # steps of one proposal each that measure what rows cost, pay or not
    recent: deque[tuple[float, float]] = field(  # (seconds, those of plain steps for the tokens)
        default_factory=lambda: deque(maxlen=LOOK_BACK)
    )

    def rest(self) -> None:
        """Go on with plain steps, twice as many as last time."""
        self.until_trial = self.next_rest
        self.next_rest = min(2 * self.next_rest, LONGEST_REST)
        self.probes = 1
        self.recent.clear()


def _expected_tokens(outlooks: Seq[Outlook], most: int) -> NDArray[np.float64]:
    """(R, most) chance that a proposal and all before it hold; 0 where there is none."""
    chances = np.zeros((len(outlooks), most))
    for row, outlook in enumerate(outlooks):
        some = outlook.chances[:most]
        chances[row, : len(some)] = some
    return np.asarray(np.cumprod(chances, axis=1), dtype=np.float64)


class Controller:
    """Chooses depths from measured step times and given chances.

    Whatever it chooses, answers are the same. Where 16 steps were slower than plain ones, together,
    it rests; each rest that is followed by another loss is twice as long.

    Args:
        max_depth: proposals of one sequence, at most.
    """

    def __init__(self, *, max_depth: int) -> None:
        self.times = StepTimes()
        self._max_depth = max_depth
        self._regimes: dict[int, Regime] = {}
        self._draft: dict[int, deque[float]] = {}  # by batch size: seconds of one more proposal

    def is_open(self, num_sequences: int) -> bool:
        """Not while it measures plain steps or rests."""
        return bool(self._max_depth) and not self._regime(num_sequences).blocked

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        """The depths that give most tokens a second, if steps that take turns do alike.

        For each depth that costly proposals may have, the likeliest are added as long as that pays.
        """
        depths = [0] * len(outlooks)
        regime = self._regime(num_sequences)
        if not self.is_open(num_sequences):
            return depths
        most = self._max_depth if self.times.is_measured(num_sequences) else 1
        plain_s = self.times.seconds(num_sequences, 0)
        each_s = self._each_s(num_sequences, max(o.cost for o in outlooks) * plain_s)
        gains = _expected_tokens(outlooks, most)
        rows = np.rint(np.arange(1, gains.size + 1) / share).astype(int)  # of a turn of all
        times_s = self.times.table(num_sequences, int(rows[-1]))[rows]
        costly = np.array([bool(outlook.cost) for outlook in outlooks])
        best_rate = MARGIN * num_sequences / plain_s
        for bound in range(most + 1 if costly.any() else 1):  # of proposals that have a cost
            allowed = gains.copy()
            allowed[costly, bound:] = 0.0
            order = np.argsort(-allowed, axis=None, kind="stable")
            order = order[: np.count_nonzero(allowed)]
            tokens = num_sequences + np.cumsum(allowed.ravel()[order]) / share
            rates = tokens / (times_s[: len(order)] + bound * each_s)
            if len(order) and rates.max() > best_rate:
                count = int(rates.argmax()) + 1
                best_rate = float(rates[count - 1])
                depths = np.bincount(order[:count] // most, minlength=len(outlooks)).tolist()
        if not any(depths) and regime.probes:
            return [int(bool(o.chances) and o.chances[0] >= WORTH_A_PROBE) for o in outlooks]
        return depths

    def observe(self, step: MeasuredStep) -> bool:
        """Learn from a step."""
        regime = self._regime(step.num_sequences)
        if step.seconds is not None:
            self.times.add(step.num_sequences, step.num_proposals, step.seconds - step.draft_s)
        if not step.num_proposals:
            return self._observe_plain(regime)
        if step.depth:
            each_s = self._draft.setdefault(bucket_of(step.num_sequences), deque(maxlen=KEPT))
            each_s.append(step.draft_s / step.depth)
        if step.seconds is not None:
            plain_s = self.times.seconds(step.num_sequences, 0)
            regime.recent.append((step.seconds, plain_s * step.num_tokens / step.num_sequences))
        self._check_gain(regime)
        regime.probes = max(regime.probes - 1, 0)
        regime.since_recheck += 1
        if regime.since_recheck >= RECHECK:
            regime.since_recheck, regime.blocked = 0, WARM_UP
        return False

    def _check_gain(self, regime: Regime) -> None:
        """Rest where the last steps with proposals lost."""
        if len(regime.recent) < LOOK_BACK:
            return
        took_s, plain_s = map(sum, zip(*regime.recent, strict=True))
        if took_s > plain_s:
            regime.rest()
            regime.blocked = regime.until_trial
        else:
            regime.until_trial = regime.next_rest = FIRST_REST

    def _observe_plain(self, regime: Regime) -> bool:
        regime.blocked = max(regime.blocked - 1, 0)
        regime.until_trial -= 1
        if regime.until_trial:
            return False
        regime.rest()  # until the trial after this one
        return True

    def _each_s(self, num_sequences: int, default_s: float) -> float:
        """Seconds of one more proposal for each sequence."""
        measured = self._draft.get(bucket_of(num_sequences))
        return sorted(measured)[(len(measured) - 1) // 2] if measured else default_s

    def _regime(self, num_sequences: int) -> Regime:
        return self._regimes.setdefault(bucket_of(num_sequences), Regime())
