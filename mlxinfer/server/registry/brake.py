"""How long a model that cannot be loaded is left alone. Knows times; no models, no errors.

A load that fails may have read hundreds of gigabytes, and unloaded other models to make room. So
requests do not try it again and again: the pause doubles with each failure in a row. A load that
succeeds, and somebody who asks for one by hand, begin anew.
"""

from dataclasses import dataclass

FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0


@dataclass(slots=True)
class Brake:
    """Of one model. Times are of one monotonic clock.

    Attributes:
        num_failures: in a row.
        until_s: before which it is not tried.
    """

    num_failures: int = 0
    until_s: float = 0.0

    def fail(self, now_s: float) -> float:
        """Note that a try has just failed; returns the seconds until the next one."""
        self.num_failures += 1
        doublings = min(self.num_failures - 1, 30)  # far past the longest pause
        pause_s = min(FIRST_PAUSE_S * 2**doublings, MAX_PAUSE_S)
        self.until_s = now_s + pause_s
        return pause_s

    def release(self) -> None:
        """Forget what failed."""
        self.num_failures, self.until_s = 0, 0.0

    def left_s(self, now_s: float) -> float:
        """Seconds until it may be tried again; 0: now."""
        return max(self.until_s - now_s, 0.0) if self.num_failures else 0.0
