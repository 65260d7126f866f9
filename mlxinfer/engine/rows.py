"""Which sequences decode in a step that tenants share. Plain Python: knows no arrays of MLX.

A row is a token of the step: the newest one of a sequence, or a proposal after it.

With a share of a half, a tenant's tokens may come half as often as without others. A step with many
rows of another tenant takes longer than that allows. Then only some rows are in each step, and they
take turns. A step of `rows` takes about a + b * rows seconds: what all rows share, and each row. So
as many rows as fit in twice the time of one are at least half as quick, all together, as any number
of rows: (2a + 2b) / (2 + a / b) <= 2b seconds for each.

A tenant without tokens may wait for its first one twice as long as without others, too. So a step
with its prompt takes no more than twice as long as one with that prompt alone.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import sqrt

from ..fair import Tenant
from .batch import Sequence
from .prefill import PromptRoom

LATEST = 0.1  # weight of the latest measurement
NUM_MEASURED = 2 / LATEST - 1  # measurements of one weight that would say as much
ERRORS = 1.5  # standard errors that the cost of a row may be above the best line's
PROPORTIONAL = 0.001  # weight of "no rows take no time", for the first measurements
TRIED_EVERY = 8  # steps of one with more rows, so that it is seen what rows cost
TIMED_EVERY = 16  # steps of one without prompts, for the same reason
MOST = 1.5  # times its equal share that a tenant waits for its tokens
PLANNED = 0.85  # of what a step may take: some take longer than the ones before said


class DecodeTimes:
    """Seconds of a decode step by its number of rows: a line through the latest measurements.

    Where steps of nearly as many rows differ much, other rows may cost more than the line says.
    So `rows_in` asks a line that is steeper by `ERRORS` standard errors, through the same middle.
    """

    def __init__(self) -> None:
        self._measured: tuple[int, float] | None = None
        self._sums = [PROPORTIONAL, *[0.0] * 5]  # of weight 1, r, s, r * r, r * s, s * s

    @property
    def known(self) -> bool:
        return self._measured is not None

    def note(self, measured: tuple[int, float]) -> None:
        """Take in the rows and seconds of the latest step, unless it is the same step as before."""
        if measured is self._measured or not measured[0]:
            return
        rows, seconds = measured
        if self.known:  # a step that was held up by something else says little
            seconds = min(seconds, 2 * self.of(rows))
        self._measured = measured
        left = 1 - LATEST
        new = (1.0, rows, seconds, rows * rows, rows * seconds, seconds * seconds)
        self._sums = [left * old + LATEST * x for old, x in zip(self._sums, new, strict=True)]
        self._sums[0] += LATEST * PROPORTIONAL

    def of(self, rows: int) -> float:
        shared, per_row = self._line()
        return shared + per_row * rows

    def rows_in(self, seconds: float) -> int:
        shared, per_row = self._line(ERRORS)
        return int(max(seconds - shared, 0.0) / per_row * (1 + 1e-9))

    def _line(self, errors: float = 0.0) -> tuple[float, float]:
        """Seconds that rows share, and of each row, steeper by `errors` standard errors.

        Neither is negative.
        """
        n, r, s, rr, rs, ss = self._sums
        spread, both = n * rr - r * r, n * rs - r * s
        per_row = both / spread if spread > 0 else 0.0
        unexplained = max(n * ss - s * s - per_row * both, 0.0)
        per_row += errors * sqrt(unexplained / max(spread, 1e-9) / NUM_MEASURED)
        per_row = max(min(max(per_row, 0.01 * s / r), s / r), 1e-9)
        return max(s - per_row * r, 0.0) / n, per_row


class DecodeRows:
    """Limits the rows of a step, so that each tenant's tokens come as often as its share says."""

    def __init__(self, slice_s: float) -> None:
        self._slice_s = PLANNED * slice_s
        self.times = DecodeTimes()
        self.depth = 0  # proposals for each chosen sequence that fit in the step
        self._step = 0
        self._timed = -TIMED_EVERY  # the last step without prompts
        self._last: dict[Sequence, int] = {}  # the last step of each

    def choose(
        self,
        decoding: list[Sequence],
        prefilling: Mapping[Tenant, float],
        tenants: Collection[Tenant],
        page_s: float,
    ) -> list[Sequence]:
        """The sequences of the next step, in the given order.

        Args:
            prefilling: seconds of the prompts of each tenant that has any to compute.
            page_s: that a page of a prompt takes in a step.
        """
        rows: dict[Tenant, list[Sequence]] = {}
        for sequence in decoding:
            rows.setdefault(sequence.request.tenant, []).append(sequence)
        counts = {tenant: len(rows[tenant]) for tenant in rows}
        limit = max(self._limit(counts, prefilling, tenants, page_s), len(counts))
        self._step += 1
        if not prefilling:
            self._timed = self._step
        self._last = {s: self._last.get(s, 0) for s in decoding}
        chosen = set(self._in_turn(rows, limit)) if len(decoding) > limit else set(decoding)
        self.depth = (limit - len(chosen)) // max(len(chosen), 1)
        self._last.update(dict.fromkeys(chosen, self._step))
        return [sequence for sequence in decoding if sequence in chosen]

    def _limit(
        self,
        counts: dict[Tenant, int],
        prefilling: Mapping[Tenant, float],
        tenants: Collection[Tenant],
        page_s: float,
    ) -> int:
        """Rows of the next step: each tenant gets one, even if they do not fit."""
        if not self.times.known:
            return sum(counts.values())
        slice_s, weight = self._slice_s, sum(t.weight for t in tenants)
        if prefilling:  # a page is in the step, too
            slice_s -= min(page_s, slice_s / 2)
        limit = self.times.rows_in(slice_s)
        for tenant, count in counts.items():
            most_s = equal_s = weight / tenant.weight * self.times.of(count)
            if any(other != tenant for other in prefilling):
                most_s = min(equal_s, MOST * equal_s - page_s)
            limit = min(limit, self.times.rows_in(most_s))
        for tenant, prompts_s in prefilling.items():
            if tenant not in counts:  # its part of the step is left for its prompts
                equal_s = PLANNED * weight / tenant.weight * (self.times.of(0) + prompts_s)
                part_s = self._slice_s * tenant.weight / weight
                most_s = min(self._slice_s - part_s, equal_s - prompts_s)
                limit = min(limit, self.times.rows_in(most_s))
        if self._step % TRIED_EVERY == 0:
            limit += max(limit // 4, 1)
        return limit

    def _in_turn(self, rows: dict[Tenant, list[Sequence]], limit: int) -> Iterable[Sequence]:
        weight = sum(tenant.weight for tenant in rows)
        num_tenants = len(rows)
        for tenant in sorted(rows, key=lambda tenant: len(rows[tenant]) / tenant.weight):
            num_tenants -= 1
            part = int(limit * tenant.weight / weight) if num_tenants else limit
            part = max(min(part, limit - num_tenants), 1)
            longest = sorted(rows[tenant], key=self._last.__getitem__)[:part]
            yield from longest
            limit, weight = limit - len(longest), weight - tenant.weight

    def room_for_prompts(
        self,
        chosen: Iterable[Sequence],
        prefilling: Mapping[Tenant, float],
        tenants: Iterable[Tenant],
        tower_s: float = 0.0,
    ) -> PromptRoom | None:
        """What prompts may take of a step with these rows; None: it is one without prompts.

        Args:
            prefilling: see `choose`.
            tower_s: seconds that a tower took since the step before.
        """
        room = self._room(chosen, prefilling, tenants)
        waits = any(t not in room.tenants and prefilling[t] < self._slice_s for t in prefilling)
        if room.tenants and self._step - self._timed >= TIMED_EVERY * (1 + waits):
            self._timed = self._step
            return None
        return room._replace(most_s=room.most_s - tower_s)

    def tower_s(
        self, chosen: Iterable[Sequence], seeing: Mapping[Tenant, float], tenants: Iterable[Tenant]
    ) -> float:
        room = self._room(chosen, seeing, tenants)
        return room.most_s - room.seconds

    def _room(
        self,
        chosen: Iterable[Sequence],
        prefilling: Mapping[Tenant, float],
        tenants: Iterable[Tenant],
    ) -> PromptRoom:
        counts = Counter([sequence.request.tenant for sequence in chosen])
        rows_s = shared_s = 0.0
        if counts and self.times.known:
            rows_s, shared_s = self.times.of(counts.total()), self.times.of(0)
        weight, most_s = sum(tenant.weight for tenant in tenants), self._slice_s
        if any(tenant not in counts for tenant in prefilling):
            most_s = max(most_s, 2 * rows_s)
        for tenant, count in counts.items():
            if rows_s and any(other != tenant for other in prefilling):
                equal_s = weight / tenant.weight * self.times.of(count)
                most_s = min(most_s, MOST * equal_s)
        for tenant, prompts_s in prefilling.items():
            if tenant not in counts:
                equal_s = PLANNED * weight / tenant.weight * (shared_s + prompts_s)
                most_s = min(most_s, max(equal_s, rows_s + prompts_s))
        return PromptRoom(counts.keys(), rows_s, most_s, shared_s)
