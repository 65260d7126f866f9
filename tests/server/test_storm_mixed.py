"""300 clients at once: chats with and without adapters, embeddings and reranking.

Nothing is lost: every client that stays gets a whole answer, whatever leaves or fails beside it.
"""

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.drawn import dense_tensors, draw, write_peft
from live_server import CHAT, LiveServer, SeveralServer, chat
from pooling.tiny_pooling import pooling_folder
from storm_client import Plan, draw_body, draw_leaver, perform
from test_storm import held, resident_kb

from mlxinfer import hub

ADAPTERS = ("pirate", "poet")
GENERATING = ("demo", *(f"demo:{name}" for name in ADAPTERS))
NUM_CLIENTS = 300
NUM_REQUESTS = int(os.environ.get("MLXINFER_STORM_REQUESTS", "1500"))
MOST_GROWTH_KB = 60_000  # of memory, in the second half


def mixed_server(folder: Path) -> SeveralServer:
    """The demo model with few pages and two adapters, an embedding model and a reranker."""
    folders = {
        "demo": hub.resolve("demo-draft"),
        "embedder": pooling_folder(folder / "embedder", "bert"),
        "reranker": pooling_folder(folder / "reranker", "bert-scores"),
    }
    tensors = dense_tensors(hub.resolve("demo-draft"))
    for seed, name in enumerate(ADAPTERS):
        write_peft(folder / "adapters" / name, draw(tensors, seed, strength=1.5))
    return SeveralServer(
        folders,
        {"demo": {"max_memory": "32MB", "max_batch": 8}, "embedder": {}, "reranker": {}},
        max_waiting=4 * NUM_CLIENTS,
        adapter_folders=(str(folder / "adapters"),),
    )


def pooling_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    texts = [
        " ".join(f"w{rng.randint(5, 20)}" for _ in range(rng.randint(1, 12)))
        for _ in range(rng.randint(1, 20))
    ]
    if rng.random() < 0.6:
        form = rng.choice(["float", "base64"])
        return "/v1/embeddings", {"model": "embedder", "input": texts, "encoding_format": form}
    return "/v1/rerank", {"model": "reranker", "query": "w5 w6", "documents": texts}


def plans(seed: int, count: int) -> Iterator[Plan]:
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.15:
            yield draw_leaver(rng)
            continue
        path, body = pooling_body(rng) if rng.random() < 0.35 else draw_body(rng)
        yield Plan(path, {"model": rng.choice(GENERATING), **body})


async def storm(server: LiveServer, given: Iterator[Plan]) -> "Counter[tuple[bool, int | None]]":
    collected: Counter[tuple[bool, int | None]] = Counter()

    async def client() -> None:
        for plan in given:
            wrong = plan.body.get("top_p") == 7
            try:
                while (status := await asyncio.wait_for(perform(server.port, plan), 600)) == 503:
                    collected[plan.stays, 503] += 1
                    await asyncio.sleep(0.5)  # as clients do
            except ConnectionError:
                assert not plan.stays, "the server hung up on a client that waited"
                status = None
            if plan.stays:
                assert status == (400 if wrong else 200), (plan, status)
            collected[plan.stays, status] += 1

    await asyncio.gather(*(client() for _ in range(min(NUM_CLIENTS, NUM_REQUESTS))))
    return collected


def answers_of(server: LiveServer) -> list[Any]:
    """Of the model and of each adapter."""
    return [server.post(CHAT, chat("Hello", model=m)).json()["choices"] for m in GENERATING]


@pytest.mark.slow
def test_nothing_is_lost_in_a_storm_of_everything(tmp_path: Path) -> None:
    seed = int(time.time())
    print(f"\nseed {seed}")
    with mixed_server(tmp_path) as server:
        for name in ADAPTERS:
            asked = {"lora_name": name, "lora_path": name}
            assert server.post("/v1/load_lora_adapter", asked).status_code == 200
        before = answers_of(server)
        assert len({str(item) for item in before}) == 3
        began_s, half = time.monotonic(), NUM_REQUESTS // 2
        given = plans(seed, NUM_REQUESTS)
        counted = asyncio.run(storm(server, itertools.islice(given, half)))
        middle_kb = resident_kb()
        counted += asyncio.run(storm(server, given))
        growth_kb = resident_kb() - middle_kb
        took_s = time.monotonic() - began_s
        assert answers_of(server) == before
        held(server)
        print(f"{counted.total()} requests in {took_s:.0f} s, {growth_kb / 1000:.1f} MB: {counted}")
        assert growth_kb < MOST_GROWTH_KB
