"""A key that floods the server, one kind of work at a time, beside a key that asks something short.

Counts only, no times: the steps to the other key's first tokens, and that none of it is refused.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import CHAT, chat
from pooling.tiny_pooling import pooling_folder
from storm_client import Plan, exchange
from test_documents import asked, part_of
from test_light_key import LIGHT, Shared
from test_server_pictures import URL, chat_with

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.store import ResponseStore
from mlxinfer.session.saved import NamedSessions
from tests.pdf_files import pdf
from tests.seeing_folder import seeing_folder
from tests.waiting import wait_until

NUM_CLIENTS, NUM_ASKED = 24, 3
DEMO = {"model": "demo"}
MOST_STEPS = 6  # to a first token, beyond those of the pages of its prompt
Calls = list[tuple[str, dict[str, Any]]]


def calls_of(kind: str, rnd: random.Random, number: int) -> Calls:
    """What one client of the flood sends, in order; texts differ each time."""
    words = " ".join(f"{rnd.randrange(1000)}" for _ in range(30))
    field = f"f{rnd.randrange(10**6)}"
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    name = f"s{number}"
    floods: dict[str, Calls] = {
        "n": [(CHAT, chat(words, n=8, max_tokens=30, **DEMO))],
        "background": [("/v1/responses", {"input": words, "background": True, **DEMO})],
        "schemas": [(CHAT, chat(words, guided_json=schema, **DEMO))],
        "tokenize": [("/tokenize", {"prompt": words * 2000, **DEMO})],
        "texts": [(CHAT, chat(words * 2000, **DEMO))],
        "embeddings": [("/v1/embeddings", {"model": "embed", "input": ["w5 w6 w7"] * 64})],
        "pictures": [(CHAT, {**chat_with(URL), "model": "see"})],
        "documents": [(CHAT, {**asked(CHAT, part_of(CHAT, pdf(*[words] * 20))), **DEMO})],
        "sessions": [
            (CHAT, chat(words, id_slot=number, **DEMO)),
            ("/v1/sessions", {"name": name, "id_slot": number}),
            (f"/v1/sessions/{name}/load", {"id_slot": number}),
        ],
        "batches": [("/v1/completions", {"prompt": [words] * 32, "max_tokens": 20, **DEMO})],
    }
    return floods[kind]


KINDS = ["n", "background", "schemas", "tokenize", "texts", "embeddings", "pictures", "documents"]
KINDS += ["sessions", "batches"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The demo with a disk cache, a tiny model that sees and one that embeds, for two keys."""
    folder = tmp_path_factory.mktemp("flooded")
    others = {
        "see": seeing_folder(folder / "see"),
        "embed": pooling_folder(folder / "embed", "bert"),
    }
    disk = {"disk_cache": "20MB", "disk_cache_dir": folder / "disk"}
    with Shared(others, disk, store=ResponseStore(None), max_waiting=32) as live:
        live.service.sessions = NamedSessions(folder / "disk", 1 << 30)
        yield live


async def flood(server: Shared, kind: str, number: int, statuses: "Counter[int | None]") -> None:
    """One client: a request after the other, without a pause, until it is cancelled."""
    rnd = random.Random(f"{kind} {number}")
    while True:
        for path, body in calls_of(kind, rnd, number):
            status, _ = await exchange(server.port, Plan(path, body, key="b"))
            statuses[status] += 1


async def beside(server: Shared, kind: str) -> tuple[list[int | None], "Counter[int | None]"]:
    """Statuses of the light key's requests, and of those of the flood."""
    heavy: Counter[int | None] = Counter()
    clients = [asyncio.create_task(flood(server, kind, n, heavy)) for n in range(NUM_CLIENTS)]
    for _ in range(10):  # 1 second, or less
        await asyncio.sleep(0.1 * (heavy.total() < NUM_CLIENTS))
    bodies = itertools.islice(itertools.cycle(LIGHT), NUM_ASKED)
    light = [(await exchange(server.port, Plan(CHAT, body, key="a")))[0] for body in bodies]
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return light, heavy


@pytest.mark.alike
@pytest.mark.ci  # 30 seconds together
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_request_begins_at_once_beside_any_flood(server: Shared, kind: str) -> None:
    server.steps.clear()
    light, heavy = asyncio.run(beside(server, kind))
    print(f"\n{kind}: light {server.steps}, heavy {dict(heavy)}")
    assert light == [200] * NUM_ASKED
    assert len(server.steps) == NUM_ASKED
    assert max(server.steps) <= MOST_STEPS
    for call in list(server.service.calls):
        call.interrupt(InvalidRequestError("enough"))
    wait_until(server.is_idle)
