"""A client that hangs up at any point of its request: all that the request held comes back at once.

A request is kept at a point: processes for grammars, pictures and PDFs end only when the client has
left, and steps and towers are slow. Seeds are printed.
"""

import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import ANNA_AND_BOB, CHAT, SeveralServer, chat, long_chat
from raw_http import connect, post
from test_documents import asked, part_of
from test_server_pictures import URL, chat_with

from mlxinfer import hub
from mlxinfer.killable import KillableProcess, Packet
from tests.pdf_files import pdf
from tests.seeds import seeded
from tests.seeing_folder import seeing_folder
from tests.waiting import LIMIT_S, wait_until

STEP_S = 0.03  # that each step takes at least
MOST_TOKENS = 1000  # of all answers that are left; each would have more


class Held(SeveralServer):
    """The demo and a tiny model that sees, with two slots each; steps and towers are slow.

    Attributes:
        holds: whether processes for grammars, pictures and PDFs wait for clients to leave.
    """

    holds = True

    def __init__(self, folder: Path) -> None:
        super().__init__(
            {"demo": hub.resolve("demo-draft"), "see": seeing_folder(folder)},
            {"demo": {"max_batch": 2, "prefill_chunk": 64}, "see": {"max_batch": 2}},
            keys=ANNA_AND_BOB,
        )
        self.sees = self.by_name["see"]
        self.loops: list[Any] = [model.session.engine._loop for model in self.by_name.values()]
        for loop in self.loops:
            loop.runner.launch = slowed(loop.runner.launch, STEP_S)
            loop.features.work = slowed(loop.features.work, 10 * STEP_S)

    @property
    def sampled(self) -> int:
        return sum(loop.scheduler.counters.tokens_sampled for loop in self.loops)

    def has_all_back(self) -> bool:
        """Places in the queue, workers, slots, pages, the tower, and shares."""
        service = self.service
        pools = [service.workers, service.long_workers, service.picture_workers]
        pools += [service.pdf_workers, service.grammar_workers]
        return (
            not service.calls
            and not any(pool.num_pending for pool in pools)
            and self.is_idle()
            and not self.sees.session.engine.stats()["running"]
            and not any(loop.scheduler.queues.tenants for loop in self.loops)
            and not any(loop.features.wanted or loop.features._passes for loop in self.loops)
            and not sum(g["pages_held"] for g in self.sees.session.engine.stats()["groups"])
        )


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return function(*args)

    return slow


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    reply = KillableProcess.reply
    with pytest.MonkeyPatch.context() as patch, Held(tmp_path_factory.mktemp("see")) as server:

        def reply_late(self: Any, job: Packet, abandoned: Callable[[], bool]) -> Packet:
            until_s = time.monotonic() + LIMIT_S
            while server.holds and not abandoned() and time.monotonic() < until_s:
                time.sleep(0.01)
            return reply(self, job, abandoned)

        patch.setattr(KillableProcess, "reply", reply_late)
        yield server


# A point -> its request, and whether the server is there. Tokens: sampled since the client came.
Reached = Callable[[Held, int], Any]
MANY = "red number fact of " * 500
POINTS: dict[str, tuple[dict[str, Any], Reached]] = {
    "body": (chat(MANY), lambda server, _: server.connections()),
    "text": (chat(MANY * 30), lambda server, _: server.service.long_workers.num_pending),
    "pdf": (
        asked(CHAT, part_of(CHAT, pdf("A page about caches."))),
        lambda server, _: server.service.pdf_workers.num_pending,
    ),
    "picture": (
        {**chat_with(URL), "model": "see"},
        lambda server, _: server.service.picture_workers.num_pending,
    ),
    "tower": (
        {**chat_with(URL), "model": "see"},
        lambda server, _: server.loops[1].features.wanted,
    ),
    "grammar": (
        chat("Give me a number", guided_regex="[0-9]{8}"),
        lambda server, _: server.service.grammar_workers.num_pending,
    ),
    "queue": (long_chat(n=4), lambda server, _: server.stats()["waiting"]),
    "prefill": (
        chat("red number fact of " * 200, max_tokens=800, ignore_eos=True),
        lambda server, _: any(s.num_computed for s in server.loops[0].scheduler.queues.running),
    ),
    "decode": (long_chat(), lambda _, tokens: tokens > 2),
    "stream": (long_chat(stream=True), lambda _, tokens: tokens > 2),
}


def leave(server: Held, point: str, rng: random.Random, key: str, *, is_alone: bool = True) -> None:
    """Send a request, wait until it is at the point, and hang up: in an orderly way or not.

    Among others a short point may be missed; then the client leaves when its answer begins.
    """
    body, reached = POINTS[point]
    data = post(CHAT, json.dumps(body).encode(), f"authorization: Bearer {key}")
    before = server.sampled
    with connect(server) as connection:
        connection.sendall(data[: len(data) // 2] if point == "body" else data)
        wait_until(
            lambda: (
                reached(server, server.sampled - before)
                or (not is_alone and select.select([connection], [], [], 0)[0])
            )
        )
        time.sleep(rng.choice([0, 0.01, 0.1]))
        if rng.random() < 0.5:
            linger = struct.pack("ii", 1, 0)  # a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def rests(server: Held, before: int) -> None:
    wait_until(server.has_all_back)
    assert server.sampled - before < MOST_TOKENS
    answer = server.post(CHAT, chat("Hello", max_tokens=4), headers={"authorization": "Bearer a"})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello! I am"
    wait_until(server.has_all_back)


@pytest.mark.alike
@pytest.mark.parametrize("point", POINTS)
def test_all_comes_back_from_a_client_that_leaves(held: Held, point: str) -> None:
    before, held.holds = held.sampled, point != "tower"
    leave(held, point, seeded(), "b")
    rests(held, before)


@pytest.mark.ci  # ten seconds of slow steps
def test_all_comes_back_from_clients_that_leave_at_once(held: Held) -> None:
    """Of two keys, at random points."""
    draw, held.holds = seeded(), True
    near = [point for point in POINTS if point != "tower"]
    points = [(draw.choice(near), draw.random()) for _ in range(30)]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(leave, held, point, random.Random(x), draw.choice("ab"), is_alone=False)
            for point, x in points
        ]
        for job in jobs:
            job.result()
    rests(held, held.sampled)
