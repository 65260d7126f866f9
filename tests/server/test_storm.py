"""Clients that leave at random moments: nothing may be left of them.

Drawn from fixed seeds. All of them are slow; the checks of a checkout run the shortest.
"""

import asyncio
import gc
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_input import tokens
from live_server import LiveServer, chat, num_threads
from storm_client import Plan, draw_body, draw_leaver, perform

from tests.waiting import wait_until

AT_ONCE = 16
DISCONNECTS = 1000
STATUSES = {None, 200, 400, 503}


@pytest.fixture
def stormy() -> Iterator[LiveServer]:
    """A server with a tight pool of pages, so that requests wait and are preempted."""
    with LiveServer(engine={"max_memory": "24MB", "max_batch": 8}, max_waiting=64) as server:
        yield server


def answers(server: LiveServer) -> list[Any]:
    requests = [
        chat("What is 47 + 38", max_tokens=24),
        chat("Tell me about pages", max_tokens=24, temperature=2.0, seed=7),
        chat("Give me JSON", max_tokens=24, guided_regex="[0-9]{8}"),
    ]
    return [tokens(server, request) for request in requests]


def held(server: LiveServer) -> dict[str, int]:
    """What must not grow."""
    wait_until(server.is_idle, 60)
    wait_until(lambda: server.connections() <= 1, 60)
    gc.collect()
    return {
        "files": len(os.listdir("/dev/fd")),
        "threads": num_threads(),
        "calls": len(server.service.calls),
        "pages": sum(group["pages_held"] for group in server.stats()["groups"]),
    }


async def storm(server: LiveServer, plans: Iterator[Plan]) -> "Counter[int | None]":
    """Perform plans, AT_ONCE of them at a time; what became of them, by status."""
    collected: Counter[int | None] = Counter()

    async def client() -> None:
        for plan in plans:
            try:
                status = await asyncio.wait_for(perform(server.port, plan), 120)
            except ConnectionError:
                assert not plan.stays, "the server hung up on a client that waited"
                status = None
            collected[status] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return collected


def survive(server: LiveServer, plans: Iterator[Plan]) -> "Counter[int | None]":
    """A storm; afterwards the server is idle, holds nothing, and answers as before."""
    before = answers(server)
    asyncio.run(storm(server, warm_up()))  # threads and the grammars' process: made once
    holds = held(server)
    counted = asyncio.run(storm(server, plans))
    assert set(counted) <= STATUSES
    assert all(now <= holds[name] for name, now in held(server).items())
    assert answers(server) == before
    return counted


def warm_up() -> Iterator[Plan]:
    rng = random.Random(1)
    return (Plan(*draw_body(rng)) for _ in range(8))


def leavers(count: int) -> Iterator[Plan]:
    rng = random.Random(2)
    return (draw_leaver(rng) for _ in range(count))


@pytest.mark.ci
def test_some_disconnects_leave_nothing(stormy: LiveServer) -> None:
    statuses = survive(stormy, leavers(8))
    assert statuses[None] > 4


@pytest.mark.slow
def test_a_thousand_disconnects_leave_nothing(stormy: LiveServer) -> None:
    began_s = time.monotonic()
    statuses = survive(stormy, leavers(DISCONNECTS))
    assert statuses[None] > DISCONNECTS / 2
    print(f"{statuses.total()} requests in {time.monotonic() - began_s:.0f} s: {dict(statuses)}")


def resident_kb() -> float:
    """Memory of this process now; where the system does not show that, its peak."""
    if (statm := Path("/proc/self/statm")).exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
