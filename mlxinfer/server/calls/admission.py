"""How many requests may wait. Knows counts and times; no requests, no engine.

Waiting is: handed to the engine, and no token yet. The engine itself would queue without end.
"""

import time

from ...errors import OverloadedError

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
SMOOTHING = 0.2  # weight of the newest interval between two first tokens


class Admission:
    """A bound on waiting requests and on the tokens of their prompts.

    Args:
        max_waiting: requests without a token.
        max_waiting_tokens: of their prompts together; a single longer one is let in when nothing
            else waits.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._interval_s = 1.0  # between two requests that leave the queue, smoothed
        self._left_s = 0.0  # when the last one did

    def enter(self, num_requests: int, num_tokens: int) -> None:
        """Count requests in.

        Raises:
            OverloadedError: the queue is full; it says when to try again.
        """
        tokens = self.num_waiting_tokens + num_tokens
        full = self.num_waiting + num_requests > self._max_waiting or tokens > self._max_tokens
        if full and self.num_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests with {self.num_waiting_tokens} prompt tokens wait "
                "already; try again later.",
                retry_after_s=self.retry_after_s,
            )
        if not self.num_waiting:
            self._left_s = time.monotonic()
        self.num_waiting += num_requests
        self.num_waiting_tokens = tokens

    def leave(self, num_tokens: int) -> None:
        """Count one request out: it has a token, or it ended."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= num_tokens
        assert self.num_waiting >= 0
        assert self.num_waiting_tokens >= 0
        now = time.monotonic()
        self._interval_s += SMOOTHING * (now - self._left_s - self._interval_s)
        self._left_s = now

    @property
    def retry_after_s(self) -> float:
        """Seconds after which about a quarter of the queue should have gone."""
        return min(max(self._interval_s * self.num_waiting / 4, MIN_RETRY_S), MAX_RETRY_S)
