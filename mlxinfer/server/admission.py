"""The places of requests that wait for their first token, shared by those who send them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import OverloadedError
from ..fair import Shares, Tenant

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
REFUSAL_S = 0.04  # from one refusal of a tenant to the next: each costs some 2 ms of a processor
LONGEST_HOLD_S = 4.0  # for which a refusal is held back
SMOOTHING = 0.2  # weight of the newest interval between two first tokens


@dataclass(slots=True, eq=False)
class WaitingCall:
    """The requests of one call that wait.

    Attributes:
        tokens: request -> tokens of its prompt, of those that still wait.
        give_up: ends the call with an error: its places went to others.
        is_whole: none of its requests has a token yet.
    """

    tenant: Tenant
    tokens: dict[int, int]
    give_up: Callable[[OverloadedError], None]
    is_whole: bool = True


class Admission:
    """A limit for waiting requests and the tokens of their prompts.

    A request waits from the time it is handed to the engine until its first token. The engine
    itself would queue any number. A tenant without a waiting call is always let in. Who has fewer
    places than others for its weight takes those of their newest calls.

    Args:
        max_waiting: requests without a token.
        clock: seconds that only grow.
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self._clock = clock
        self._calls: list[WaitingCall] = []  # oldest first
        self._interval_s: float | None = None  # between two that leave the queue, smoothed
        self._left_s = 0.0  # when the last one left
        self._refused_s: dict[Tenant, float] = {}  # when its latest refusal is sent

    @property
    def num_waiting(self) -> int:
        return sum([len(call.tokens) for call in self._calls])

    def require_place(self, tenant: Tenant) -> None:
        """Raise OverloadedError where not even a short request of a tenant could enter."""
        self._victims(WaitingCall(tenant, {0: 1}, lambda _: None))

    def enter(
        self, tenant: Tenant, prompts: Sequence[int], give_up: Callable[[OverloadedError], None]
    ) -> WaitingCall:
        """Count the requests of a call in; `leave` counts each of them out."""
        call = WaitingCall(tenant, dict(enumerate(prompts)), give_up)
        victims = self._victims(call)
        if not self._calls:
            self._left_s = self._clock()
        for victim in victims:
            error = self._full(victim.tenant)
            self._calls.remove(victim)
            victim.tokens.clear()
            victim.give_up(error)
        self._calls.append(call)
        return call

    def _victims(self, call: WaitingCall) -> list[WaitingCall]:
        left = list(self._calls)
        victims: list[WaitingCall] = []
        if all(other.tenant != call.tenant for other in left):
            return victims
        requests, tokens = Counter[Tenant](), Counter[Tenant]()
        for other in self._calls:
            requests[other.tenant] += len(other.tokens)
            tokens[other.tenant] += sum(other.tokens.values())
        new_tokens = sum(call.tokens.values())
        while True:
            too_many = requests.total() + len(call.tokens) > self._max_waiting
            if not too_many and tokens.total() + new_tokens <= self._max_tokens:
                return victims
            held, more = (requests, len(call.tokens)) if too_many else (tokens, new_tokens)
            whole = Counter([other.tenant for other in left if other.is_whole])
            several = {t: n for t, n in held.items() if whole[t] > 1 or t == call.tenant}
            giver = Shares().giver(several, call.tenant, more)
            if giver is None:
                raise self._full(call.tenant)
            victim = next(o for o in reversed(left) if o.tenant == giver and o.is_whole)
            left.remove(victim)
            victims.append(victim)
            requests[giver] -= len(victim.tokens)
            tokens[giver] -= sum(victim.tokens.values())

    def _full(self, tenant: Tenant) -> OverloadedError:
        own = [call for call in self._calls if call.tenant == tenant]
        count, tokens = sum(len(c.tokens) for c in own), sum(sum(c.tokens.values()) for c in own)
        return OverloadedError(
            f"{count} of your requests with {tokens} prompt tokens wait already; try again later.",
            retry_after_s=self.retry_after_s(tenant),
        )

    def hold_s(self, tenant: Tenant) -> float:
        """Seconds to hold back one more refusal, so that clients that do not wait cost little."""
        now_s = self._clock()
        next_s = self._refused_s.get(tenant, 0.0) + REFUSAL_S
        self._refused_s[tenant] = at_s = min(max(now_s, next_s), now_s + LONGEST_HOLD_S)
        over_s = now_s - REFUSAL_S
        self._refused_s = {t: s for t, s in self._refused_s.items() if s > over_s}
        return at_s - now_s

    def leave(self, call: WaitingCall, request: int) -> bool:
        """Count one request out: it has a token, or it ended. False: it was out already."""
        if request not in call.tokens:
            return False
        del call.tokens[request]
        call.is_whole = False
        if not call.tokens:
            self._calls.remove(call)
        now_s, before_s = self._clock(), self._interval_s
        latest_s = now_s - self._left_s
        if before_s is not None:
            latest_s = before_s + SMOOTHING * (latest_s - before_s)
        self._interval_s, self._left_s = latest_s, now_s
        return True

    def retry_after_s(self, tenant: Tenant) -> float:
        """Seconds after which about a quarter of a tenant's waiting requests should have gone.

        None has gone since the last one did, so that time is the shortest that the next may take.
        Before any has gone it is all that is known. Then the result is never longer than the truth,
        and grows from one try to the next.
        """
        interval_s = max(self._interval_s or 0.0, self._clock() - self._left_s)
        tenants = {call.tenant for call in self._calls} | {tenant}
        share = tenant.weight / sum(other.weight for other in tenants)
        count = sum(len(call.tokens) for call in self._calls if call.tenant == tenant)
        return min(max(interval_s / share * count / 4, MIN_RETRY_S), MAX_RETRY_S)
