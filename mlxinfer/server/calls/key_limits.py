"""Limits of API keys: requests and tokens a minute, and requests at once."""

import time
from collections.abc import Callable, Mapping

from ..errors import RateLimitedError
from ..keys import KeyLimits

WINDOW_S = 60.0
MIN_RETRY_S = 1.0


class Bucket:
    """A budget that refills evenly, full at the start (a token bucket).

    Args:
        per_minute: its size, and what comes back in a minute; None: no limit.
        clock: monotonic seconds.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._size = per_minute
        self._left = float(per_minute or 0)
        self._clock = clock
        self._seen_s = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until so much is left; more than the whole size needs a full bucket."""
        if self._size is None:
            return 0.0
        now_s = self._clock()
        self._left = min(self._size, self._left + (now_s - self._seen_s) * self._size / WINDOW_S)
        self._seen_s = now_s
        return max(min(amount, self._size) - self._left, 0.0) * WINDOW_S / self._size

    def take(self, amount: int) -> None:
        """Take so much, even if less is left: what follows waits for it."""
        self._left -= amount


class KeyUse:
    """What one key has used of its limits."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, clock)
        self.tokens = Bucket(limits.tokens_per_minute, clock)
        self.num_running = 0


class KeyLimiter:
    """Admits the requests of keys within their limits. Lives on one event loop.

    Args:
        limits: by the name of the key; other keys have none.
        clock: monotonic seconds.
    """

    def __init__(
        self, limits: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._uses = {name: KeyUse(each, clock) for name, each in limits.items()}

    def enter(self, name: str | None, num_requests: int, num_tokens: int) -> None:
        """Count requests and the tokens of their prompts.

        Raises:
            RateLimitedError: a limit is reached; it says when to try again.
        """
        use = self._uses.get(name or "")
        if use is None:
            return
        limits = use.limits
        if limits.max_running is not None and use.num_running + num_requests > limits.max_running:
            raise RateLimitedError(
                f"The key {name} may have {limits.max_running} requests at once, and has "
                f"{use.num_running}; wait for one of them.",
                retry_after_s=MIN_RETRY_S,
            )
        for bucket, amount, what in (
            (use.requests, num_requests, f"{limits.requests_per_minute} requests"),
            (use.tokens, num_tokens, f"{limits.tokens_per_minute} tokens"),
        ):
            wait_s = bucket.wait_s(amount)
            if wait_s > 0:
                raise RateLimitedError(
                    f"The key {name} may use {what} a minute; try again in {wait_s:.0f} s.",
                    retry_after_s=max(wait_s, MIN_RETRY_S),
                )
        use.requests.take(num_requests)
        use.tokens.take(num_tokens)
        use.num_running += num_requests

    def leave(self, name: str | None, num_requests: int, num_tokens: int) -> None:
        """Count requests out, and the tokens of their answers."""
        use = self._uses.get(name or "")
        if use is not None:
            use.num_running -= num_requests
            use.tokens.take(num_tokens)
