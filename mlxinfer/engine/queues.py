"""Every unfinished request, waiting or running: slots, pages, and shares of tenants.

Pure Python: knows no arrays of MLX. What each step computes: `scheduler.py`.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from ..core import Request
from ..fair import Shares, Tenant
from .batch import Batch, Sequence, namespace_of
from .kv_manager import KVManager
from .prompt_pictures import PromptPictures

# Work of a token of an answer, where one of a prompt is 1: as in VTC, arXiv:2401.00588.
ANSWER_WORK = 2
SLICE = 256  # of work, after which tenants change slots that they cannot share
MOST_PASSES = 3  # requests of a tenant that may begin before its oldest one, by their priority


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine started."""

    requests: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0  # of the proposed ones
    preemptions: int = 0
    step_failures: int = 0
    pages_sealed: int = 0


class FeatureSource:
    """Says which tokens of prompts with pictures can be computed. Here: all, since none has any.

    Attributes:
        worked_s: seconds that the tower took since the last step.
    """

    wanted: Collection[Any] = ()
    worked_s: float = 0.0

    def available(self, sequence: Sequence, count: int) -> int:
        return count

    def release(self, sequence: Sequence) -> None:
        """A sequence gives up its slot: it needs no features any more."""


NO_FEATURES = FeatureSource()


class RequestQueues:
    """Every unfinished request: waiting in order of arrival, or running with a slot and pages.

    Tenants share slots and pages. A tenant that waits for its share takes it from a tenant that
    holds more: the youngest sequences of that tenant are preempted.

    Args:
        features: of pictures, which running sequences hold, too.
    """

    def __init__(
        self,
        kv_manager: KVManager,
        counters: EngineCounters,
        *,
        max_batch: int,
        features: FeatureSource = NO_FEATURES,
    ) -> None:
        self._features = features
        self.shares = Shares(SLICE)
        self._unfinished: Counter[Tenant] = Counter()
        self._passes: Counter[Tenant] = Counter()  # since the oldest request of a tenant began
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._kv = kv_manager
        self._counters = counters
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_batch))  # a heap: low slots first keeps tails small
        self.admitted: list[Sequence] = []  # since the last step, which takes them

    @property
    def idle(self) -> bool:
        """Whether every unfinished request waits for pages of peers."""
        return all(sequence.fetch is not None for sequence in self._by_id.values())

    # -- arrivals and departures ----------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        max_output: int,
        pictures: PromptPictures | None = None,
        rope_variant: int = 0,
        adapter: int = 0,
        adapter_id: str | None = None,
    ) -> Sequence:
        """Queue a valid request.

        Args:
            rope_variant: see `Model.rope_variant`.
            adapter: its number; 0: none.
        """
        sequence = Sequence(
            request=request,
            max_known=len(request.prompt_ids) + max_output,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
            pictures=pictures,
            rope_variant=rope_variant,
            adapter=adapter,
            namespace=namespace_of(adapter_id, rope_variant, request.cache_salt),
        )
        self._by_id[request.id] = sequence
        self._unfinished[request.tenant] += 1
        self.waiting.append(sequence)
        self._counters.requests += 1
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        return list(self._by_id.values())

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence and release what it holds; tokens of a launched step are discarded.

        Args:
            keep: whether later requests may use what was computed.
        """
        assert not sequence.finished
        sequence.finished = True
        if sequence.fetch is not None:
            sequence.fetch.cancel()
        del self._by_id[sequence.request.id]
        tenant = sequence.request.tenant
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant], self._passes[tenant]
        if sequence.slot >= 0:
            self._release(sequence, keep)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Put a running sequence back at the head of the queue, with its tokens.

        Its pages stay in the prefix cache. Only the pages that are evicted meanwhile are computed
        again.
        """
        self._release(sequence, keep)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_preempted += 1
        self.waiting.appendleft(sequence)
        self._counters.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        self.running.remove(sequence)
        self._kv.end(sequence, keep=keep)
        if sequence.pictures is not None:
            self._features.release(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.started = False

    # -- slots and pages ------------------------------------------------------------------------

    def admit(self, prefilling: Seq[Sequence], most: int, *, again: bool = True) -> Sequence | None:
        """Start the first waiting sequence for which there is room, of each tenant in its turn.

        A sequence waits if another one is computing tokens that it can share soon. Later sequences
        may pass it. Others may be preempted, see `Shares.giver`. While a sequence waits for more
        room than there is, only a tenant without a slot may pass it, for a slice of work.

        Args:
            again: whether preempted sequences may start: not in the step that preempted them, which
                may still have a token of theirs.
        """
        if not self.contested:
            if not self._free_slots or len(prefilling) >= most:
                return None
            sequence = self._next(self.waiting, prefilling, again=again)
            return self._start(sequence) if sequence is not None else None
        waiting: dict[Tenant, list[Sequence]] = {}
        for sequence in self.waiting:
            waiting.setdefault(sequence.request.tenant, []).append(sequence)
        self.shares.advance([*waiting, *(s.request.tenant for s in prefilling)])
        passed: Tenant | None = None
        for tenant in sorted(self.shares.order(waiting), key=partial(self._would_lose, waiting)):
            if passed is not None and not self._may_pass(tenant, passed):
                continue
            candidate = self._next(waiting[tenant], prefilling, again=again)
            if candidate is None or not self._make_room(tenant, prefilling, most):
                continue
            while (started := self._start(candidate)) is None:
                if not self._take_from(self.running, tenant):
                    passed = passed or tenant
                    break
            else:
                return started
        return None

    def _may_pass(self, tenant: Tenant, other: Tenant) -> bool:
        """Whether a tenant may begin while another waits for room: else that never finds it."""
        has_none = all(sequence.request.tenant != tenant for sequence in self.running)
        return has_none and self.shares.used(tenant) < self.shares.used(other) + self.shares.slice

    def _next(
        self, waiting: Seq[Sequence], prefilling: Seq[Sequence], *, again: bool
    ) -> Sequence | None:
        """The first of the sequences of a tenant that may start, see `admit`.

        They are in the order of their priority, unless the oldest one was passed too often.
        """
        oldest = waiting[0] if waiting else None
        if oldest is not None and self._passes[oldest.request.tenant] < MOST_PASSES:
            waiting = sorted(waiting, key=attrgetter("request.priority"))
        for sequence in waiting:
            if sequence.fetch is not None:
                continue
            if sequence.num_pending:
                return None  # preempted during a step: it gets the token of that step first
            if sequence.num_preempted and not again:
                return None
            if not self._kv.shares_later(sequence, prefilling):
                return sequence
        return None

    def _start(self, sequence: Sequence) -> Sequence | None:
        """Give a sequence a slot, which is free, and its pages; None: these are not."""
        if not self._kv.begin(sequence, slot=self._free_slots[0], spare=len(self.running)):
            return None
        tenant = sequence.request.tenant
        if sequence is next(s for s in self.waiting if s.request.tenant == tenant):
            del self._passes[tenant]
        else:
            self._passes[tenant] += 1
        self.waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        self.running.append(sequence)
        self.admitted.append(sequence)
        return sequence

    # -- between tenants ------------------------------------------------------------------------

    @property
    def contested(self) -> bool:
        return len(self._unfinished) > 1

    @property
    def tenants(self) -> Collection[Tenant]:
        return self._unfinished.keys()

    def _would_lose(self, waiting: Iterable[Tenant], tenant: Tenant) -> bool:
        """Whether another tenant that waits would at once take a place given to this one."""
        held = Counter([tenant, *(s.request.tenant for s in self.running)])
        return any(self.shares.giver(held, other) == tenant for other in waiting)

    def _make_room(self, tenant: Tenant, prefilling: Seq[Sequence], most: int) -> bool:
        """Free a slot for a tenant, and one of the `most` prompts; False: it has its share."""
        if len(prefilling) >= most and not self._take_from(prefilling, tenant):
            return False
        return bool(self._free_slots) or self._take_from(self.running, tenant)

    def _take_from(self, sequences: Seq[Sequence], tenant: Tenant) -> bool:
        """Preempt the youngest sequence of a tenant that holds more; False: no tenant does."""
        running = [sequence for sequence in sequences if sequence.slot >= 0]
        giver = self.shares.giver(Counter([s.request.tenant for s in running]), tenant)
        if giver is None:
            return False
        self.preempt(next(s for s in reversed(running) if s.request.tenant == giver))
        return True

    def charge(self, batch: Batch) -> None:
        """Count the work of a step; what a tenant alone gets makes up for what others had."""
        work: Counter[Tenant] = Counter()
        for sequence in batch.decodes.sequences:
            work[sequence.request.tenant] += ANSWER_WORK
        for segment in batch.ragged:
            of_answer = segment.num_samples * (ANSWER_WORK - 1)
            work[segment.sequence.request.tenant] += segment.num_tokens + of_answer
        for tenant, count in work.items():
            self.shares.charge(tenant, count)
        self.shares.advance(self._unfinished)

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages for `num_tokens` positions; if need be, the youngest others are preempted.

        If tenants compete, the tenant that holds most for its weight loses them.

        Returns:
            False: the sequence itself was preempted, and waits in the queue again.
        """
        while not self._kv.extend(sequence, num_tokens, everything=len(self.running) == 1):
            assert len(self.running) > 1, "a request that fits alone was admitted"
            tenant = sequence.request.tenant
            others = [other for other in self.running if other is not sequence]
            if self.contested and self._take_from(others, tenant):
                continue
            youngest = next(s for s in reversed(self.running) if s.request.tenant == tenant)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True
