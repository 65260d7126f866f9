"""Two servers that exchange pages, either of which is killed at any time: no request is lost."""

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import httpx2 as httpx
import pytest
from engine.harness import prompt
from engine.test_peers import PeerServer, answer, engine, plain

from benchmarks.processes import free_port
from mlxinfer.engine import pagestore, peers

KILLS = int(os.environ.get("MLXINFER_PEER_KILLS", "6"))
CASES = ("qwen3-v4", "hybrid gemma3_text-v4")
PATIENCE_S = 120.0  # that a client goes on to try


class Server(PeerServer):
    """A peer that also answers clients, at /ask."""

    allow_reuse_address = True

    def reply(self, path: str, body: dict[str, Any]) -> bytes | None:
        if path != "ask":
            return super().reply(path, body)
        tokens, _ = answer(self.engine, body["ids"])
        return str([tokens, self.engine.stats()["peers"]["pages"]]).encode()


def serve(paths: list[str], case: str, port: int, other: int) -> None:
    """A process that is killed: it asks its peer for pages, and lets it compute prompts."""
    sys.path[:] = paths
    peers.FIRST_PAUSE_S = peers.MAX_PAUSE_S = 0.1
    pagestore.PageStore.computing_s = lambda *_: 2.0  # type: ignore[method-assign]
    url = f"http://127.0.0.1:{other}"
    with engine(case, (url,), url) as made, Server(made, port=port) as server:
        server.serve_forever()


def ask(client: httpx.Client, port: int, ids: list[int]) -> tuple[list[int], int]:
    """Tokens, and pages that had come from the peer; a client that tries until it is answered."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            reply = client.post(f"http://127.0.0.1:{port}/ask", json={"ids": ids}, timeout=60)
            tokens, pages = reply.json()
            return tokens, pages
        except httpx.TransportError:
            assert time.monotonic() < until_s, "the request is lost"
            time.sleep(0.05)


class Pair:
    """Two servers, each the peer of the other."""

    def __init__(self, case: str) -> None:
        self._case = case
        self.ports = [free_port(), free_port()]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["engine.test_peers"])
        self._running = [self._start(0), self._start(1)]

    def _start(self, side: int) -> BaseProcess:
        port, other = self.ports[side], self.ports[1 - side]
        arguments = (sys.path, self._case, port, other)
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        return process

    def kill(self, side: int) -> None:
        """SIGKILL, and another in its place."""
        self.end(side)
        self._running[side] = self._start(side)

    def end(self, side: int) -> None:
        self._running[side].kill()
        self._running[side].join()


@contextmanager
def pair(case: str) -> Iterator[Pair]:
    made = Pair(case)
    try:
        yield made
    finally:
        made.end(0)
        made.end(1)


@pytest.mark.alike
@pytest.mark.ci  # processes
@pytest.mark.parametrize("case", CASES)
def test_killed_servers_lose_no_request_and_change_no_token(case: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, came, asked = random.Random(seed), 0, 0
    prompts = [prompt(rng.randrange(100, 300), n) for n in range(8)]
    with (
        pair(case) as servers,
        httpx.Client(verify=False) as client,
        ThreadPoolExecutor() as threads,
    ):
        for n in range(KILLS):
            given = [rng.choice(prompts) for _ in range(3)]
            answers = [threads.submit(ask, client, rng.choice(servers.ports), ids) for ids in given]
            time.sleep(rng.random())
            servers.kill(rng.randrange(2))
            for ids, expected in zip(given, answers, strict=True):
                tokens, pages = expected.result()
                assert tokens == plain(case, ids), seed
                came, asked = came + (pages > 0), asked + 1
            print(f"{n + 1} kills, {asked} requests answered, {came} where pages had come")
    assert came
