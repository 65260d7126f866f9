"""A key with 64 clients beside one that asks something short each second: real HTTP.

MLXINFER_LOAD_SECONDS: how long. MLXINFER_LOAD_ONE_KEY: all clients have one key; then nothing is
promised, and only times are printed.
"""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from live_server import ANNA_AND_BOB, CHAT, SeveralServer, chat
from storm_client import FORM, Plan, exchange
from test_documents import asked, part_of
from test_server_pictures import URL, chat_with

from mlxinfer import hub
from mlxinfer.core import Request, TokenEvent
from tests.pdf_files import pdf
from tests.seeing_folder import seeing_folder
from tests.waiting import wait_until

LOAD_S = float(os.environ.get("MLXINFER_LOAD_SECONDS", "25"))
ONE_KEY = "MLXINFER_LOAD_ONE_KEY" in os.environ
NUM_CLIENTS = 64
LEAVE = 0.3  # share of clients that hang up
ON_DEMO = {"model": "demo", "temperature": 0, "max_tokens": 8}
LIGHT = [chat(f"What is {n} + 38", max_tokens=4, model="demo") for n in range(5)]
HEAVY = [
    *(chat(f"Tell me about {n} pages", max_tokens=15 * n, model="demo") for n in (1, 2, 3, 4)),
    chat("red number fact of " * 20, max_tokens=12, model="demo"),
    chat("Give me JSON", max_tokens=24, model="demo", guided_json=FORM),
    chat("Give me a number", max_tokens=24, model="demo", guided_regex="[0-9]{8}"),
    {**asked(CHAT, part_of(CHAT, pdf(*["A page about caches."] * 20))), **ON_DEMO},
    {**chat_with(URL), "model": "see"},
]


class Shared(SeveralServer):
    """The demo and other models, for two keys; counts steps to first tokens.

    Args:
        folders: of the other models, by name.
        demo: arguments of the demo's EngineOptions.
    """

    def __init__(self, folders: dict[str, Path], demo: Any = None, **config: Any) -> None:
        engine = {"demo": {"max_batch": 16, **(demo or {})}}
        super().__init__(
            {"demo": hub.resolve("demo-draft"), **folders}, engine, keys=ANNA_AND_BOB, **config
        )
        self.steps: list[int] = []  # of a light request to its first token, beyond its pages
        loop: Any = self.model.session.engine._loop
        queues, emit = loop.scheduler.queues, loop._emit
        add, began = queues.add, dict[str, int]()

        def add_and_note(request: Request, **given: Any) -> Any:
            if request.tenant.name == "anna":
                pages = -(-len(request.prompt_ids) // loop.scheduler.page_size)
                began[request.id] = loop.scheduler.counters.steps + pages
            return add(request, **given)

        def emit_and_note(events: list[TokenEvent]) -> None:
            for event in events:
                if event.request_id in began:
                    steps = loop.scheduler.counters.steps - began.pop(event.request_id)
                    self.steps.append(steps)
            emit(events)

        queues.add, loop._emit = add_and_note, emit_and_note


def said(body: bytes) -> Any:
    return json.loads(body)["choices"]


async def heavy(
    server: Shared, rng: random.Random, right: list[Any], until_s: float
) -> "Counter[str]":
    """One client after another of the heavy key; what became of them."""
    ended: Counter[str] = Counter()
    while time.monotonic() < until_s:
        index = rng.randrange(len(HEAVY))
        if rng.random() < LEAVE:
            moments: list[dict[str, Any]] = [{"sent": 0.5}, {"patience_s": rng.random()}]
            moment = rng.choice([*moments, {"events": 2}])
            streamed, abrupt = {**HEAVY[index], "stream": True}, rng.random() < 0.5
            await exchange(server.port, Plan(CHAT, streamed, key="b", abrupt=abrupt, **moment))
            ended["left"] += 1
            continue
        status, body = await exchange(server.port, Plan(CHAT, HEAVY[index], key="b"))
        ended[str(status)] += 1
        if status == 200:
            assert said(body) == right[index], HEAVY[index]
        else:
            await asyncio.sleep(0.2)
    return ended


async def light(
    server: Shared, right: list[Any], until_s: float
) -> tuple[list[float], Counter[int | None]]:
    """Seconds of each whole answer, and the statuses."""
    seconds = list[float]()
    statuses = Counter[int | None]()
    for index in itertools.cycle(range(len(LIGHT))):
        if time.monotonic() > until_s:
            return seconds, statuses
        began_s = time.monotonic()
        plan = Plan(CHAT, LIGHT[index], key="b" if ONE_KEY else "a")
        status, body = await exchange(server.port, plan)
        seconds.append(time.monotonic() - began_s)
        statuses[status] += 1
        assert status != 200 or said(body) == right[index]
        await asyncio.sleep(1)
    raise AssertionError


async def load(server: Shared, seed: int) -> tuple[list[float], Counter[int | None], Counter[str]]:
    """First each request on an idle server, then all at once."""
    right = [
        [said((await exchange(server.port, Plan(CHAT, body, key="b")))[1]) for body in bodies]
        for bodies in (HEAVY, LIGHT)
    ]
    until_s = time.monotonic() + LOAD_S
    clients = [
        heavy(server, random.Random(f"{seed} {n}"), right[0], until_s) for n in range(NUM_CLIENTS)
    ]
    others = asyncio.gather(*clients)
    seconds, statuses = await light(server, right[1], until_s)
    return seconds, statuses, sum(await others, Counter())


@pytest.mark.ci  # 25 seconds, and as long to start and come to rest on a busy machine
def test_a_light_key_is_served_beside_64_clients_of_another(tmp_path: Path) -> None:
    seed = time.time_ns() % 10**6
    print(f"\nseed {seed}")
    with Shared({"see": seeing_folder(tmp_path)}, max_waiting=48) as server:
        idle = [seconds_of(server) for _ in range(5)]
        server.steps.clear()
        seconds, statuses, ended = asyncio.run(load(server, seed))
        p50, p95 = (sorted(seconds)[int(len(seconds) * p)] for p in (0.5, 0.95))
        print(f"idle {sorted(idle)[2]:.2f} s; p50 {p50:.2f}, p95 {p95:.2f}, max {max(seconds):.2f}")
        print(f"light {dict(statuses)}, heavy {dict(ended)}, steps {sorted(server.steps)}")
        wait_until(server.is_idle)
        stats = [m.session.engine.stats() for m in (server.model,)]
        assert all(s["running"] == s["waiting"] == 0 for s in stats)
        pools = server.service.workers, server.service.long_workers, server.service.pdf_workers
        wait_until(lambda: not any(pool.num_pending for pool in pools))
        if not ONE_KEY:
            assert set(statuses) == {200}
            assert server.steps
            assert max(server.steps) <= 4


def seconds_of(server: Shared) -> float:
    began_s = time.monotonic()
    asyncio.run(exchange(server.port, Plan(CHAT, LIGHT[0], key="a")))
    return time.monotonic() - began_s
