"""Who waits, who runs and with which slot: from arrival to the end. Pure Python; plans no step.

Whoever looks at a sequence through the queues finds it as it is: what `unwritten` has of a steady
batch is written first.
"""

import heapq
from collections import deque
from collections.abc import Sequence as Seq

from ..cache.pages import OutOfPages
from ..core import Request
from .batch import PartialCopy
from .counters import Counters
from .kv_manager import KVManager
from .sequence import Sequence
from .unwritten import Unwritten


class RequestQueues:
    """Every unfinished request: waiting in order of arrival, or running with a slot and pages.

    Args:
        kv_manager: what those that run hold.
        counters: of requests and preemptions.
        max_batch: sequences that may run at once.
    """

    def __init__(self, kv_manager: KVManager, counters: Counters, *, max_batch: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.unwritten = Unwritten([])  # of the batch that nobody has joined or left
        self._kv = kv_manager
        self._counters = counters
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_batch))  # a heap: low slots first keeps tails small
        self._admitted: list[Sequence] = []
        self._restores: list[PartialCopy] = []

    @property
    def idle(self) -> bool:
        """Every request has ended."""
        return not self._by_id

    @property
    def num_running(self) -> int:
        """How many hold a slot."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """Those that hold a slot, in order of admission."""
        self.unwritten.write()
        return self._running

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits and a slot is free."""
        return bool(self.waiting and self._free_slots)

    # -- arrivals and departures ----------------------------------------------------------------

    def add(self, request: Request, *, max_output: int) -> Sequence:
        """Queue a request that was found valid."""
        sequence = Sequence(
            request=request,
            max_known=len(request.prompt_ids) + max_output,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
        )
        self._by_id[request.id] = sequence
        self.waiting.append(sequence)
        self._counters.requests += 1
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of a request."""
        self.unwritten.write()
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All that run or wait."""
        self.unwritten.write()
        return list(self._by_id.values())

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence and give back what it holds; a launched step of it is ignored later.

        With `keep` later requests may use what was computed.
        """
        assert not sequence.finished
        sequence.finished = True
        del self._by_id[sequence.request.id]
        if sequence.slot >= 0:
            self._release(sequence, keep)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Back to the head of the queue; what of it is evicted meanwhile is computed again."""
        self._release(sequence, keep)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_preempted += 1
        self.waiting.appendleft(sequence)
        self._counters.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        self.unwritten.write()
        self.unwritten = Unwritten([])
        self._running.remove(sequence)
        self._kv.end(sequence, keep=keep)
        self._restores = [r for r in self._restores if r.sequence is not sequence]
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.started = False

    # -- slots and pages ------------------------------------------------------------------------

    def admit(self, prefilling: Seq[Sequence]) -> Sequence | None:
        """Start the first in the queue for which there is room, in order of arrival.

        One that will soon share what another computes waits for it, and is passed by.
        """
        if not self._free_slots:
            return None
        for sequence in self.waiting:
            if sequence.num_pending:
                return None  # preempted with a step in flight, whose token it gets first
            if self._kv.shares_later(sequence, prefilling):
                continue
            try:
                restore = self._kv.begin(sequence, spare=len(self._running))
            except OutOfPages:
                return None
            self.waiting.remove(sequence)
            sequence.slot = heapq.heappop(self._free_slots)
            self._running.append(sequence)
            self._admitted.append(sequence)
            self._restores += [restore] if restore else []
            return sequence
        return None

    def take_admitted(self) -> tuple[list[Sequence], list[PartialCopy]]:
        """Who was admitted since the last step, and the copies to be made before their first."""
        admitted, self._admitted = self._admitted, []
        restores, self._restores = self._restores, []
        return admitted, restores

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages for `num_tokens` positions, from the youngest others if need be.

        False: the sequence itself is the youngest and went back to the queue.
        """
        while True:
            try:
                self._kv.extend(sequence, num_tokens)
                return True
            except OutOfPages:
                youngest = self._running[-1]
                assert len(self._running) > 1, "a request that fits alone was admitted"
                self.preempt(youngest)
                if youngest is sequence:
                    return False
