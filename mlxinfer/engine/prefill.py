"""How many prompt tokens a step gets. Pure Python: knows no arrays of MLX.

Running answers wait while a step computes prompts. So while answers run, prompts get a slice of
time. With a fixed number of tokens (`prefill_chunk`), steps do not depend on the machine's speed,
and neither does the rounding of 16-bit numbers.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from math import inf, log2
from typing import NamedTuple

from ..fair import Shares, Tenant
from .batch import Batch, Sequence

# Prompt tokens of a step before any step was timed. A prompt alone has at least these in each
# step, until the GPU stops one: smaller steps would cost a few percent on a slow machine.
UNTIMED = 64
GAIN = 0.99  # a step of twice the tokens is tried while it cuts the time of a token to this share
CLOSE = 1.015  # a step size is good if its tokens take at most this much longer than the quickest
# Of prompts while none decodes. macOS stops a command buffer that keeps the GPU from drawing the
# screen for a good part of a second. MLX ends a buffer after 40 to 50 operations, some five layers,
# so a buffer takes a small part of a step. The worst is one attention behind 100,000 tokens in a
# model with ten such layers: a tenth of a step. Half a second a step would cost large models up to
# a third of their speed on small chips, where each step reads all weights.
MAX_STEP_S = 2.0
MIN_STEP_S = 0.125  # the same, however often steps were stopped
RISE_STEPS = 16  # steps with prompts that went well, after which larger ones are tried again
LATEST = 0.5  # weight of the latest measurement
HIDDEN = 0.1  # of the seconds of the step before: a shorter step had ended before that was read
LONGER = 4096  # tokens of context: a measured step size holds up to here, then until it doubles


class PromptRoom(NamedTuple):
    """The seconds that prompts may take in a step that several tenants share.

    Attributes:
        tenants: those whose answers get tokens in the step.
        seconds: time that the rows of these answers take.
        most_s: longest time that the whole step may take.
        shared_s: time that a step takes for any number of rows. Prompts get at least as much,
            because smaller parts would waste more than half of the step.
    """

    tenants: Collection[Tenant]
    seconds: float
    most_s: float
    shared_s: float = 0.0


class PrefillSizer:
    """Sizes the prefill part of steps.

    Args:
        most: tokens of all prompts in one step; whole pages.
        slice_s: seconds for the prompts of a step beside sequences that decode. None: every step
            takes `fixed` tokens, half of that while others run.
        fixed: whole pages; None: `most`. A step takes more only for tokens that see each other.
        num_stages: steps of different rows in flight, see `Scheduler`. All of them, each with
            prompts, follow each other from one token of an answer to the next.
        tenants: whose work is counted: each gets its share of the tokens of a step.

    Attributes:
        uncontested_s: seconds of steps since two tenants last had requests; inf: they never had.
    """

    def __init__(
        self,
        *,
        page_size: int,
        most: int,
        slice_s: float | None = None,
        fixed: int | None = None,
        num_stages: int = 1,
        tenants: Shares | None = None,
    ) -> None:
        assert most % page_size == 0
        self._num_stages = num_stages
        self.most = most
        self._page_size = page_size
        self._tenants = tenants or Shares()
        self._slice_s = slice_s
        self.uncontested_s = inf
        self.fixed = fixed or most
        self._decode_s: float | None = None  # of a step without prompts
        self.decoded = 0, 0.0  # tokens and seconds of the last such step
        # The last two before the latest step, to undo it; None: it had prompts, or waited for some.
        self._before_latest: tuple[float | None, tuple[int, float]] | None = None
        self._rows_s: float | None = None  # of the rows beside the last prompts of several tenants
        # Half-octave of the context -> context, and seconds that one more token takes there.
        self._token_s: dict[int, tuple[float, float]] = {}
        self._max_step_s = MAX_STEP_S
        self._limit = most  # tokens of a step; less after the GPU stopped one
        self._until_rise = 0
        self._size = min(UNTIMED, most)  # of steps while none decodes
        self._times: dict[int, float] = {}  # such a size -> seconds a token
        self._context = LONGER  # up to which these hold
        self._last = 0  # prompt tokens of the last step that had any
        self._unseen = 0, 0.0  # prompt tokens, and seconds, of steps that other ranks still work on

    def shares(
        self, prefilling: Seq[Sequence], num_running: int, prompt_room: PromptRoom | None = None
    ) -> list[tuple[Sequence, int]]:
        """Tokens of the next step for each prompt that gets any.

        Args:
            prefilling: running sequences with prompts to compute, oldest first.
            num_running: of all that run, without prompts that wait for pictures.
        """
        page_size = self._page_size
        served, self._rows_s = ((), None) if prompt_room is None else prompt_room[:2]
        if not prefilling:
            return []
        if self._slice_s is None:  # a fixed number; half, if others wait for the step
            room = min(self.fixed // 2 if num_running > 1 else self.fixed, self._limit)
            return self._divide(prefilling, max(room, page_size))
        if num_running == len(prefilling) and prompt_room is None:
            self._size = self._next_size()
            return self._divide(prefilling, self._bounded(prefilling))
        if not self._token_s:
            return self._divide(prefilling, min(UNTIMED, self._limit), served)
        if prompt_room is not None:
            left_s = max(prompt_room.most_s - prompt_room.seconds, prompt_room.shared_s)
        else:
            left_s = self._slice_s / self._num_stages - (self._decode_s or 0.0)
        costs = {sequence: self._cost(sequence, left_s) for sequence in prefilling}
        if (
            len(costs) > 1 and prompt_room is None
        ):  # a page for the oldest, and one for the shortest
            left_s = max(left_s, 2 * page_size * max(costs.values()))
        # Twice the last step's where keys share: what a token costs beside rows may be far off.
        most = self._limit
        if prompt_room is not None:
            most = min(most, max(2 * self._last, UNTIMED))
        left_s = min(left_s, most * min(costs.values()))
        return self._divide(prefilling, left_s, served, costs.__getitem__)

    def _divide(
        self,
        prefilling: Seq[Sequence],
        room: float,
        served: Collection[Tenant] = (),
        cost: Callable[[Sequence], float] = lambda sequence: 1,
    ) -> list[tuple[Sequence, int]]:
        """`prefill_shares`, each tenant with its part of the room, and with what others leave.

        Where a part is less than a page, tenants take turns. Tenants whose answers get tokens
        have a part of the step already: they get what the others leave.
        """
        prompts: dict[Tenant, list[Sequence]] = {}
        for sequence in prefilling:
            prompts.setdefault(sequence.request.tenant, []).append(sequence)
        if len(prompts) < 2:
            least = self._least(prefilling[0], room, served, cost)
            return prefill_shares(prefilling, room, self._page_size, cost=cost, least=least)
        page = self._page_size * max(map(cost, prefilling))
        wanted = {t: sum([s.num_left * cost(s) for s in prompts[t]]) for t in prompts}
        order = self._tenants.order(prompts)
        until = self._tenants.used(order[0]) + self._tenants.slice
        behind = [t for t in order if self._tenants.used(t) < until]
        behind = [tenant for tenant in behind if tenant not in served] or behind
        first = sorted(behind, key=lambda tenant: wanted[tenant] / tenant.weight)
        weight = sum(tenant.weight for tenant in first)
        shares: list[tuple[Sequence, int]] = []
        for tenant in first + [tenant for tenant in order if tenant not in behind]:
            if shares and room < page:
                break
            part = room * tenant.weight / weight if weight > 0 else room
            least = self._least(prompts[tenant][0], part, served, cost)
            given = prefill_shares(prompts[tenant], part, self._page_size, cost=cost, least=least)
            room -= sum([count * cost(sequence) for sequence, count in given])
            weight -= tenant.weight
            shares += given
        return shares

    def _least(
        self,
        oldest: Sequence,
        room: float,
        served: Collection[Tenant],
        cost: Callable[[Sequence], float],
    ) -> int:
        """Tokens that the oldest prompt of a tenant gets at least: a page, or far less.

        A page, if no other tenant's answers are in the step, or if the prompt is short (two pages),
        its tenant gets no tokens in the step, and has had less than a slice more work. Else what
        fits into the room, and a page if that is half of one: a page may take far longer than the
        room, or seem to. Such a short prompt gets a quarter of a page at least.
        """
        tenant, used = oldest.request.tenant, self._tenants.used
        others = [used(other) for other in served if other != tenant]
        is_short = len(oldest.token_ids) - oldest.num_cached <= 2 * self._page_size
        is_first = is_short and tenant not in served
        if not others or (is_first and used(tenant) < min(others) + self._tenants.slice):
            return self._page_size
        fitting = max(int(room / cost(oldest)), self._page_size // 4 if is_first else 1)
        return fitting if 2 * fitting < self._page_size else self._page_size

    def observe(self, batch: Batch, seconds: float, *, on_later_stages: bool = False) -> None:
        """Take in how long a step took.

        Args:
            batch: what was computed.
            seconds: until this rank had done its part.
            on_later_stages: they still work on the step, and it returns nothing. Their time becomes
                a part of the time of the next step that gives tokens.
        """
        self.uncontested_s += seconds
        if self._slice_s is None or not batch.num_tokens:
            return
        prompts, num_tokens = [], 0
        for segment in batch.ragged:
            if not segment.proposals:
                prompts.append(segment)
                num_tokens += segment.num_tokens
        unseen, unseen_s = self._unseen
        self._unseen = (unseen + num_tokens, unseen_s + seconds) if on_later_stages else (0, 0.0)
        if on_later_stages:
            return
        seconds += self._hidden_s(seconds)
        if not prompts:
            if not unseen:  # else it waited for prompts, too
                self._before_latest = self._decode_s, self.decoded
                self._decode_s = _blended(self._decode_s, seconds)
                self.decoded = batch.num_tokens, seconds
            return
        self._rise()
        self._last = num_tokens
        has_rows = num_tokens < batch.num_tokens
        if self._num_stages > 1:  # steps follow each other: what was not seen came before this one
            num_tokens, seconds, unseen, unseen_s = num_tokens + unseen, seconds + unseen_s, 0, 0.0
        context = max([segment.stop for segment in prompts])
        if not has_rows:
            tokens = num_tokens + unseen
            self._time_size(tokens, context, (seconds + unseen_s) / tokens)
        if not unseen:  # else later ranks were still busy with prompts, and `seconds` has that too
            self._note_cost(num_tokens, context, seconds, has_rows=has_rows)

    def _note_cost(self, num_tokens: int, context: int, seconds: float, *, has_rows: bool) -> None:
        """Take in the seconds of a step with prompt tokens; `has_rows`: of answers too.

        Args:
            context: of the longest of its prompts, up to the last token computed.
        """
        decode_s = self._decode_s if self._rows_s is None else self._rows_s
        spent_s = seconds - (decode_s or 0.0) if has_rows else seconds
        cost = max(spent_s, seconds / 8) / num_tokens
        place = int(2 * log2(max(context, 1)))
        at, _ = self._token_s.get(place, (context, 0.0))
        before = self._seconds_at(context) if self._token_s else None
        part = min(num_tokens / self._page_size, 1.0)  # the time of few tokens says little
        known = _blended(before, cost, part)
        if self._num_stages == 1:  # else the seconds are of one stage
            known = min(known, seconds / num_tokens)
        self._token_s[place] = _blended(at, context), known
        self._agree(place)

    def _hidden_s(self, seconds: float) -> float:
        """Seconds of this step that were counted in the step before, if that had no prompts.

        MLX limits the tasks in flight (`n_active_tasks` of its scheduler.h). So a launch may return
        only when most of the step has run. The step before is read after the launch, and its time
        includes this step's. Then that time is forgotten, and this step gets half of it at least.
        """
        restored, self._before_latest = self._before_latest, None
        before_s = self.decoded[1]
        if restored is None or seconds >= HIDDEN * before_s:
            return 0.0
        self._decode_s, self.decoded = restored
        return before_s - min(before_s / 2, self._decode_s or inf)

    def _agree(self, place: int) -> None:
        """Correct what older steps said of other contexts by what the last one said of its own.

        A token costs more the longer the context is, but at most in proportion to it.
        """
        context, known = self._token_s[place]
        for other, (at, seconds) in self._token_s.items():
            least, most = sorted((known, known * at / context))
            self._token_s[other] = at, min(max(seconds, least), most)

    @property
    def is_long(self) -> bool:
        """Whether the last step without prompts took more than half a slice."""
        return self._slice_s is not None and self.decoded[1] > self._slice_s / 2

    def halve(self, batch: Batch) -> None:
        """Give prompts half as many tokens as in this step, which the GPU stopped.

        From now on steps may take half as long. The limit in tokens rises again bit by bit, because
        the size of the step may not have been the reason.
        """
        num_tokens = sum([s.num_tokens for s in batch.ragged if not s.proposals])
        if not num_tokens:
            return
        self._limit = max(num_tokens // 2 // self._page_size, 1) * self._page_size
        self._until_rise = RISE_STEPS
        self._max_step_s = max(self._max_step_s / 2, MIN_STEP_S)
        if self._slice_s is not None:
            self._slice_s = min(self._slice_s, self._max_step_s)

    def _rise(self) -> None:
        self._until_rise -= 1
        if self._until_rise <= 0 and self._limit < self.most:
            self._limit, self._until_rise = min(2 * self._limit, self.most), RISE_STEPS

    # -- beside sequences that decode -----------------------------------------------------------

    @property
    def page_s(self) -> float:
        """Seconds that a page of a prompt takes in a step; 0: no step was timed."""
        return self._page_size * self._seconds_at(self._page_size) if self._token_s else 0.0

    def _cost(self, sequence: Sequence, left_s: float) -> float:
        start = sequence.num_computed
        first = self._seconds_at(start + self._page_size)
        return self._seconds_at(start + min(max(left_s, 0) / first, sequence.num_left, self.most))

    def _seconds_at(self, context: float) -> float:
        """Seconds of one token after `context` others, from the lengths that were measured."""
        return min([s * max(1.0, context / at) for at, s in self._token_s.values()])

    # -- while none decodes ---------------------------------------------------------------------

    def _bounded(self, prefilling: Seq[Sequence]) -> int:
        """Tokens of a step: `_size`, or fewer if they take too long behind the longest context."""
        if not self._token_s:
            return min(self._size, self._limit)
        context = max([sequence.num_computed for sequence in prefilling]) + self._page_size
        num_tokens = int(self._max_step_s / self._seconds_at(context))
        if len(prefilling) == 1:
            num_tokens = max(num_tokens, int(UNTIMED * self._max_step_s / MAX_STEP_S))
        num_pages = max(num_tokens // self._page_size, len(prefilling))
        return min(self._size, self._limit, num_pages * self._page_size)

    def _next_size(self) -> int:
        size, times = self._size, self._times
        if size not in times:
            return size
        larger, pays = 2 * size, times[size] < GAIN * times.get(size // 2, inf)
        if pays and larger <= self.most and larger not in times:
            return larger
        quickest = min(times.values())
        return min([chunk for chunk, seconds in times.items() if seconds <= CLOSE * quickest])

    def _time_size(self, num_tokens: int, context: int, seconds: float) -> None:
        if context > self._context:  # reading the context costs more now: try again
            self._times.clear()
            self._context = 2 * context
            self._size = max(self._size // 2, min(UNTIMED, self.most))
        elif num_tokens > self._size - self._page_size:
            self._times[self._size] = _blended(self._times.get(self._size), seconds)


def prefill_shares(
    prefilling: Seq[Sequence],
    room: float,
    page_size: int,
    *,
    cost: Callable[[Sequence], float] = lambda sequence: 1,
    least: int | None = None,
) -> list[tuple[Sequence, int]]:
    """Tokens of the next step for each prompt that gets any.

    A chunk ends at a page boundary unless it ends the prompt or is `least`. A quarter of the room
    is for the oldest prompt, so that it is never starved; the rest goes to the shortest first, so
    that a short question does not wait behind a long document.

    Args:
        prefilling: oldest first.
        least: tokens that the oldest prompt gets, even if there is no room; None: a page.
    """
    if not prefilling:
        return []
    oldest = prefilling[0]
    first = max(int(room / 4 / cost(oldest)), page_size if least is None else least)
    shares = {oldest: _chunk(oldest, first, page_size) or first}
    room = max(room - shares[oldest] * cost(oldest), 0)
    for sequence in sorted(prefilling[1:], key=lambda s: s.num_left):
        shares[sequence] = _chunk(sequence, int(room / cost(sequence)), page_size)
        room -= shares[sequence] * cost(sequence)
    rest = _chunk(oldest, shares[oldest] + int(max(room, 0) / cost(oldest)), page_size)
    shares[oldest] = max(shares[oldest], rest)
    return [(sequence, count) for sequence, count in shares.items() if count]


def _chunk(sequence: Sequence, limit: int, page_size: int) -> int:
    """Tokens of the next chunk: all that are left, or as many as end at a page boundary."""
    if sequence.num_left <= limit:
        return sequence.num_left
    stop = sequence.num_computed + limit
    return max(limit - stop % page_size, 0)


def _blended(before: float | None, latest: float, part: float = 1.0) -> float:
    return latest if before is None else before + part * LATEST * (latest - before)
