"""How many proposals of each sequence a step verifies: as many as give most tokens a second.

Proposals add rows to a step. Speculation loses if these rows cost more than the accepted proposals
are worth: with small models, mixtures of experts, many requests at once, or unpredictable text. So
the controller measures the time of steps and the share of proposals that are accepted, and proposes
nothing where speculation loses. Before anything is measured, it uses the chances that sources
state, and a published curve of step times.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.batch import Sequence

Key = tuple[str, int]  # source, and what its proposals differ by: match length, or position

DECAY = 0.98  # of the weight of earlier trials, at each trial: the last 50 count
SEQUENCE_DECAY = 0.9
PRIOR_WEIGHT = 4.0  # trials that the prior counts as
SEQUENCE_WEIGHT = 2.0
CERTAIN = 0.995

WARM_UP = 4  # plain steps that are measured before the first proposals
LOOK_BACK = 16  # steps with proposals that must not be slower than plain ones, together
FIRST_REST, LONGEST_REST = 96, 3072  # plain steps until the next trial
RECHECK = 512  # steps with proposals until plain ones are measured again
MARGIN = 1.02  # by which a step with proposals must promise more
PROBES = 2
WORTH_A_PROBE = 0.3  # chance of a proposal
KEPT = 9  # latest measurements; their median counts
FEWEST = 2  # measurements that count at all

# Seconds of a quantised matrix product with 1 to 8 rows over those with one: 5120 x 17408, 4 bits,
# groups of 64, in MLX (mini-sglang-mlx, README: 0.602 to 1.268 ms). The last slope goes on.
CURVE = (1.0, 0.98, 1.07, 1.26, 1.47, 1.69, 1.89, 2.11)
SLOPE = 0.21  # of each row beyond
EXTRA = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PLAIN = 0  # extra rows of a step without proposals


class Outlook(NamedTuple):
    """The proposals that could be made for a sequence: their chances and their cost."""

    chances: Seq[float]  # that a proposal holds if those before it do; by position
    cost: float = 0.0  # of making a proposal, in plain steps, as long as it was not measured


class MeasuredStep(NamedTuple):
    """A step that was read: its proposals, its tokens, and how long it took."""

    num_sequences: int  # that got tokens
    num_proposals: int
    num_tokens: int  # of their answers
    seconds: float | None  # since the step before it was read; None: not timed
    draft_s: float = 0.0  # part of these, for making proposals
    depth: int = 0  # the most proposals of one sequence that had a cost


# -- how likely proposals hold ----------------------------------------------------------------


Trials = tuple[float, float]  # proposals that held, and those tried; both decayed
UNTRIED: Trials = (0.0, 0.0)


class Acceptance:
    """Chances that the next proposal holds if those before it did.

    The chance of a proposal is the chance of its key, over all sequences, times a factor of its
    sequence: how much better or worse than expected the sequence's last proposals were.
    """

    def __init__(self, priors: Mapping[Key, float]) -> None:
        self._priors = priors
        self._by_key: dict[Key, Trials] = {}
        self._by_sequence: dict[Hashable, Trials] = {}

    def chance(self, sequence: Sequence, key: Key) -> float:
        """The chance of one proposal, in [0, 1)."""
        held, tried = self._by_sequence.get(sequence, UNTRIED)
        factor = (held + SEQUENCE_WEIGHT) / (tried + SEQUENCE_WEIGHT)
        return min(self._of_key(key) * factor, CERTAIN)

    def observe(self, sequence: Sequence, key: Key, held: bool) -> None:
        num_held, expected = self._by_sequence.get(sequence, UNTRIED)
        expected = expected * SEQUENCE_DECAY + self._of_key(key)
        self._by_sequence[sequence] = num_held * SEQUENCE_DECAY + held, expected
        num_held, num_tried = self._by_key.get(key) or self._prior(key)
        self._by_key[key] = num_held * DECAY + held, num_tried * DECAY + 1.0

    def renew(self, source: str) -> None:
        """Forget what was measured of a source, so that it is tried again."""
        self._by_key = {key: trials for key, trials in self._by_key.items() if key[0] != source}
        self._by_sequence.clear()

    def forget(self, sequence: Sequence) -> None:
        self._by_sequence.pop(sequence, None)

    def measured(self) -> dict[Key, float]:
        return {key: self._of_key(key) for key in sorted(self._by_key)}

    def _of_key(self, key: Key) -> float:
        held, tried = self._by_key.get(key) or self._prior(key)
        return held / tried

    def _prior(self, key: Key) -> Trials:
        return self._priors[key] * PRIOR_WEIGHT, PRIOR_WEIGHT


# -- how long steps take ----------------------------------------------------------------------


def relative_cost(rows: int) -> float:
    """The time of a step of `rows` rows, in steps of one row."""
    if rows <= len(CURVE):
        return CURVE[max(rows, 1) - 1]
    return CURVE[-1] + SLOPE * (rows - len(CURVE))


@lru_cache(maxsize=4096)
def bucket_of(num_sequences: int) -> int:
    """Batch sizes of steps that are measured together: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..."""
    if num_sequences <= 4:
        return num_sequences
    half = 1 << ((num_sequences - 1).bit_length() - 2)
    return -(-num_sequences // half) * half


def _low_median(times: Seq[float]) -> float:
    """The median, the lower one of two: a slow first step that compiles counts for little."""
    return sorted(times)[(len(times) - 1) // 2]


class VerifyTimes:
    """Seconds of steps, by batch size and by rows beyond one a sequence.

    Between two measured numbers of rows, and beyond the last, every row costs the same. If nothing
    was measured with a batch size, a row costs as much as with another batch size. If nothing was
    measured at all, times are relative to a step of one row, by the published curve.
    """

    def __init__(self) -> None:
        # Bucket of the batch size -> extra rows -> the last seconds.
        self._cells: dict[int, dict[int, deque[float]]] = defaultdict(
            lambda: {extra: deque(maxlen=KEPT) for extra in (PLAIN, *EXTRA)}
        )

    def add(self, num_sequences: int, extra: int, seconds: float) -> None:
        """Count a step; without `extra` rows it is a plain one."""
        cell = next((most for most in EXTRA if extra <= most), EXTRA[-1]) if extra else PLAIN
        self._cells[bucket_of(num_sequences)][cell].append(seconds)

    def is_measured(self, num_sequences: int) -> bool:
        return any(self._measured(bucket_of(num_sequences)).keys() - {PLAIN})

    def seconds(self, num_sequences: int, extra: int) -> float:
        return float(self.table(num_sequences, extra)[extra])

    def table(self, num_sequences: int, most: int) -> NDArray[np.float64]:
        """(most + 1,) seconds of steps with 0 to `most` rows more."""
        extra = np.arange(most + 1)
        known = self._measured(bucket_of(num_sequences))
        if PLAIN not in known:
            known[PLAIN] = self._plain_elsewhere(num_sequences)
        last = max(known)
        each_s = self._row_elsewhere()
        if last != PLAIN:
            each_s = max(known[last] - known[PLAIN], 0.0) / last
        if each_s is None:
            curve = np.array([relative_cost(num_sequences + i) for i in extra.tolist()])
            return known[PLAIN] * curve / curve[0]
        rows = sorted(known)
        seconds = np.interp(extra, rows, [known[i] for i in rows])
        return seconds + each_s * np.maximum(extra - last, 0)

    def _measured(self, bucket: int) -> dict[int, float]:
        """Extra rows -> seconds, of a batch size.

        Fewer rows never take longer: if they seem to, the machine was busier.
        """
        medians, least_s = {}, np.inf
        for extra, times in reversed(self._cells[bucket].items()):
            if len(times) >= FEWEST:
                medians[extra] = least_s = min(_low_median(times), least_s)
        return medians

    def _plain_elsewhere(self, num_sequences: int) -> float:
        plains = {size: cells[PLAIN] for size, cells in self._cells.items()}
        plains = {size: times for size, times in plains.items() if len(times) >= FEWEST}
        if not plains:
            return relative_cost(num_sequences)
        near = min(plains, key=lambda size: abs(size - num_sequences))
        return _low_median(plains[near]) * relative_cost(num_sequences) / relative_cost(near)

    def _row_elsewhere(self) -> float | None:
        row_s: dict[int, float] = {}
        for size in list(self._cells):
            known = self._measured(size)
            most = max(known, default=PLAIN)
            if most != PLAIN and PLAIN in known:
                row_s[most] = max(known[most] - known[PLAIN], 0.0) / most
        return row_s[max(row_s)] if row_s else None


# -- the choice -------------------------------------------------------------------------------


@dataclass(slots=True)
class Regime:
    """Rests and measurements of one batch size."""

    blocked: int = WARM_UP  # plain steps until proposals may come again
    until_trial: int = FIRST_REST  # plain steps until costly sources are tried once more
    next_rest: int = FIRST_REST
    since_recheck: int = 0
    probes: int = PROBES  # steps of one proposal each that measure what rows cost, pay or not
    recent: deque[tuple[float, float]] = field(  # (seconds, those of plain steps for the tokens)
        default_factory=lambda: deque(maxlen=LOOK_BACK)
    )
    draft_s: deque[float] = field(  # seconds of one more proposal for each sequence
        default_factory=lambda: deque(maxlen=KEPT)
    )

    def rest(self) -> None:
        """Continue with plain steps, twice as many as last time."""
        self.until_trial = self.next_rest
        self.next_rest = min(2 * self.next_rest, LONGEST_REST)
        self.probes = 1
        self.recent.clear()


class Controller:
    """Chooses depths from measured step times and given chances.

    Whatever it chooses, answers are the same. If 16 steps together were slower than plain ones, it
    rests. If a loss follows a rest, the next rest is twice as long.

    Args:
        max_depth: proposals of one sequence, at most.
    """

    def __init__(self, *, max_depth: int) -> None:
        self.times = VerifyTimes()
        self._max_depth = max_depth
        self._regimes: dict[int, Regime] = defaultdict(Regime)  # by `bucket_of` the batch size

    def is_open(self, num_sequences: int) -> bool:
        """Whether `choose` may want proposals with this many sequences.

        It wants none while it rests or measures plain steps.
        """
        return self._max_depth > 0 and not self._regimes[bucket_of(num_sequences)].blocked

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        """How many proposals to verify of each sequence that could have any.

        The choice gives most tokens a second, if steps that take turns choose alike. For each depth
        that costly proposals may have, the likeliest proposals are added while that pays.

        Args:
            num_sequences: all that decode in the step, or in the steps that take turns.
        """
        depths = [0] * len(outlooks)
        regime = self._regimes[bucket_of(num_sequences)]
        if not self.is_open(num_sequences):
            return depths
        most = self._max_depth if self.times.is_measured(num_sequences) else 1
        plain_s = self.times.seconds(num_sequences, 0)
        each_s = max(o.cost for o in outlooks) * plain_s
        if regime.draft_s:
            each_s = _low_median(regime.draft_s)
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
        """Learn from a step; True: costly sources should be tried once more."""
        regime = self._regimes[bucket_of(step.num_sequences)]
        if step.seconds is not None:
            self.times.add(step.num_sequences, step.num_proposals, step.seconds - step.draft_s)
        if step.num_proposals:
            self._check_gain(regime, step)
            return False
        regime.blocked = max(regime.blocked - 1, 0)
        regime.until_trial -= 1
        if not regime.until_trial:
            regime.rest()  # until the trial after this one
            return True
        return False

    def _check_gain(self, regime: Regime, step: MeasuredStep) -> None:
        """Rest if the last steps with proposals lost; now and then measure plain steps again."""
        if step.depth:
            regime.draft_s.append(step.draft_s / step.depth)
        if step.seconds is not None:
            plain_s = self.times.seconds(step.num_sequences, 0)
            regime.recent.append((step.seconds, plain_s * step.num_tokens / step.num_sequences))
        if len(regime.recent) == LOOK_BACK:
            took_s, plain_s = map(sum, zip(*regime.recent, strict=True))
            if took_s > plain_s:
                regime.rest()
                regime.blocked = regime.until_trial
            else:
                regime.until_trial = regime.next_rest = FIRST_REST
        regime.probes = max(regime.probes - 1, 0)
        regime.since_recheck += 1
        if regime.since_recheck >= RECHECK:
            regime.since_recheck, regime.blocked = 0, WARM_UP


class FixedDepth(Controller):
    """Always proposes the same number of tokens: for measurements and tests."""

    def __init__(self, depth: int) -> None:
        super().__init__(max_depth=depth)

    def is_open(self, num_sequences: int) -> bool:
        return self._max_depth > 0

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        return [min(self._max_depth, len(outlook.chances)) for outlook in outlooks]

    def observe(self, step: MeasuredStep) -> bool:
        return False


def _expected_tokens(outlooks: Seq[Outlook], most: int) -> NDArray[np.float64]:
    """(R, most) chance that a proposal and all before it hold; 0 if there is none."""
    chances = np.zeros((len(outlooks), most))
    for row, outlook in enumerate(outlooks):
        outlook_chances = outlook.chances[:most]
        chances[row, : len(outlook_chances)] = outlook_chances
    return np.asarray(np.cumprod(chances, axis=1), dtype=np.float64)
