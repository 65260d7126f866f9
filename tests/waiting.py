"""Waiting for what another thread or process does, never for ever."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0  # no test of this length is normal; a full machine needs some of it


def wait_until(
    condition: Callable[[], Any], limit_s: float = LIMIT_S, pause_s: float = 0.01
) -> None:
    """Poll until the condition holds; polls that are requests need a longer pause."""
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(pause_s)


async def until(
    condition: Callable[[], Any], limit_s: float = LIMIT_S, pause_s: float = 0.001
) -> None:
    """As `wait_until`, in an event loop."""
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        await asyncio.sleep(pause_s)
