"""Which requests wait and which run, from arrival to the last event. Plans no step."""

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..cache.pages import OutOfPages
from ..core import FinishReason, Request, TokenEvent
from ..errors import GrammarFailedError, RanksFailedError, RequestFailedError
from .batch import Sequence
from .kv_manager import KVManager


@dataclass(slots=True)
class Counters:
    """What happened since the engine started; only ever grows."""

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


class RequestQueues:
    """Every unfinished request: waiting in order of arrival, or running with a slot and pages.

    Args:
        kv_manager: what running sequences hold.
        counters: of requests and preemptions.
        max_batch: sequences that may run at once.
    """

    def __init__(self, kv_manager: KVManager, counters: Counters, *, max_batch: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._kv = kv_manager
        self._counters = counters
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_batch))  # a heap: low slots first keeps tails small
        self.admitted: list[Sequence] = []  # since the last step, which takes them

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return not self._by_id

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
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All running and waiting sequences."""
        return list(self._by_id.values())

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence and release what it holds; tokens of a launched step are discarded.

        Args:
            keep: whether later requests may use what was computed.
        """
        assert not sequence.finished
        sequence.finished = True
        del self._by_id[sequence.request.id]
        if sequence.slot >= 0:
            self._release(sequence, keep)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Put a running sequence back at the head of the queue, with its tokens.

        Its pages stay in the prefix tree until they are evicted; only those are computed again.
        """
        self._release(sequence, keep)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_preempted += 1
        self.waiting.appendleft(sequence)
        self._counters.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        self.running.remove(sequence)
        self._kv.end(sequence, keep=keep)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.started = False

    # -- slots and pages ------------------------------------------------------------------------

    def admit(self, prefilling: Seq[Sequence], most: int, *, again: bool = True) -> Sequence | None:
        """Start the first waiting sequence for which there is room, in order of the queue.

        A sequence that will soon share what another computes waits for it, and later ones may pass.

        Args:
            prefilling: running sequences with prompts to compute.
            most: how many of these there may be.
            again: whether what was preempted may start: not in the step that preempted it: its
                plan may have a token of it.
        """
        if not self._free_slots or len(prefilling) >= most:
            return None
        for sequence in self.waiting:
            if sequence.num_pending:
                return None  # preempted with a step in flight: it gets that step's token first
            if sequence.num_preempted and not again:
                return None
            if self._kv.shares_later(sequence, prefilling):
                continue
            try:
                self._kv.begin(sequence, slot=self._free_slots[0], spare=len(self.running))
            except OutOfPages:
                return None
            self.waiting.remove(sequence)
            sequence.slot = heapq.heappop(self._free_slots)
            self.running.append(sequence)
            self.admitted.append(sequence)
            return sequence
        return None

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the pages for `num_tokens` positions, preempting the youngest others if need be.

        Returns:
            False: the sequence itself is the first to go, and went back to the queue.
        """
        while True:
            try:
                self._kv.extend(sequence, num_tokens)
                return True
            except OutOfPages:
                youngest = self.running[-1]
                assert len(self.running) > 1, "a request that fits alone was admitted"
                self.preempt(youngest)
                if youngest is sequence:
                    return False


def last_events(
    sequence: Sequence, token: TokenEvent, end: FinishReason | BaseException
) -> list[TokenEvent]:
    """The events of a sequence that ends with this token."""
    if isinstance(end, BaseException):
        return [token, failed_event(sequence, end)]
    if end is FinishReason.STOP and token.token_id not in sequence.request.stop_ids:
        # The grammar is finished: this token is text, and an event of its own ends it.
        return [token, TokenEvent.without_token(token.request_id, end)]
    return [token._replace(finish_reason=end)]


def failed_event(sequence: Sequence, error: BaseException) -> TokenEvent:
    """The last event of a request of which a step, or the planning of one, raised an error."""
    if isinstance(error, RanksFailedError):
        return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=error)
    failure = RequestFailedError(
        f"A step of this request failed after {sequence.num_answered} tokens: "
        f"{type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)


def not_finite_event(sequence: Sequence) -> TokenEvent:
    """The last event of a request with logits that are NaN or infinite."""
    failure = RequestFailedError(
        f"The model's logits are NaN or infinite after {sequence.num_known} tokens. Its weights "
        "may be damaged: download it again; or numbers outgrew float16: try dtype='float32'."
    )
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)


def stuck_in_grammar(sequence: Sequence, problem: str) -> TokenEvent:
    """The last event of a request with a grammar that allows no token."""
    grammar = sequence.request.grammar
    failure = GrammarFailedError(
        f"The grammar of this request cannot go on after {sequence.num_answered} tokens: {problem}",
        param=grammar.place if grammar is not None else None,
    )
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)
