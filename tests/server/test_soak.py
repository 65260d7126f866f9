"""Minutes of mixed traffic with clients that leave: nothing may grow. Not in the default run."""

import asyncio
import contextlib
import os
import random
from typing import Any

import httpx2 as httpx
import pytest
from live_server import CHAT, LiveServer, chat, num_threads

ROUNDS = 6
REQUESTS = 60  # a round, 16 of them at once
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Some request: short, long, constrained, wrong, streamed or not."""
    words = " ".join(
        rng.choice(["page", "token", "cache", "two"]) for _ in range(rng.randint(1, 300))
    )
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice([0, 1.0]),
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.3,
    }
    kind = rng.random()
    if kind < 0.15:
        fields["guided_json"] = PERSON
    elif kind < 0.25:
        fields["top_p"] = 7
    elif kind < 0.35:
        fields |= {"logprobs": True, "top_logprobs": 3}
    elif kind < 0.5:
        plain = {"prompt": words, "echo": True, "logprobs": 1, "max_tokens": 2}
        return "/v1/completions", plain
    return CHAT, chat(words, **fields)


async def traffic(server: LiveServer, seed: int) -> None:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, path: str, request: Any, patience_s: float) -> None:
        async with gate:
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(client.post(path, json=request), patience_s)
                assert answer.status_code in (200, 400, 503), answer.text

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        jobs = [(*body(rng), rng.choice([0.05, 0.3, 120.0, 120.0])) for _ in range(REQUESTS)]
        await asyncio.gather(*(one(client, *job) for job in jobs))


def measured(server: LiveServer) -> dict[str, int]:
    """What must not grow with traffic."""
    return {
        "files": len(os.listdir("/dev/fd")),
        "threads": num_threads(),
        "connections": server.connections(),
    }


@pytest.mark.slow
def test_nothing_grows() -> None:
    with LiveServer(engine={"max_memory": "20MB"}) as server:
        asyncio.run(traffic(server, 0))  # grammars' process, text threads: made once
        server.check_idle()
        before = measured(server)
        for seed in range(1, ROUNDS):
            asyncio.run(traffic(server, seed))
            server.check_idle()
        assert measured(server) == before
