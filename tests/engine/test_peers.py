"""Pages of peers: they spare a prompt's work, and whatever peers do, no token changes."""

import json
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from engine.harness import PAGE, alone, config, model_of, prompt
from models.runs import alike, every

from benchmarks.processes import free_port
from mlxinfer.cache.disk import entry_bytes
from mlxinfer.config import KVOptions, PeerOptions
from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.engine import peers
from mlxinfer.engine.engine import Engine, generation
from mlxinfer.engine.page_server import PageServer
from tests.waiting import LIMIT_S

CASES = (  # full attention, windows, windows and sinks, a latent, recurrent states
    "qwen3-v4", "gemma3_text-v4", "gpt_oss-v4", "deepseek_v3-v4",
    "hybrid qwen3-v4", "hybrid gemma3_text-v4",
)  # fmt: skip
SEEDS = int(os.environ.get("MLXINFER_PEER_SEEDS", "6"))
FEW = SamplingParams(max_tokens=4)


@contextmanager
def engine(
    case: str, urls: tuple[str, ...] = (), prefill_at: str | None = None, **changes: Any
) -> Iterator[Engine]:
    """An engine that asks some peers; those of one case have the same weights."""
    options = PeerOptions(urls=urls, prefill_at=prefill_at, identity=lambda timeout_s: case)
    sizes = config(num_pages=200, peers=options, **changes)
    made = Engine(generation(lambda: (model_of(case), sizes, None)))
    try:
        yield made
    finally:
        made.close()


def answer(
    made: Engine, ids: list[int], salt: str | None = None, *, from_peer: bool = False
) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    request = Request(str(random.random()), ids, FEW)
    request.cache_salt, request.from_peer = salt, from_peer
    made.submit(request, events.put)
    tokens, cached = [], 0
    while True:
        event = events.get(timeout=60)
        assert event.error is None, event.error
        cached = max(cached, event.cached_tokens)
        tokens += [] if event.token_id is None else [event.token_id]
        if event.finish_reason is not None:
            return tokens, cached


class PeerServer(ThreadingHTTPServer):
    """The three paths over an engine, and what goes wrong: `fault` may change a reply.

    Args:
        made: the engine.
        fault: gets the path, the keys and the reply; returns the reply, or None to hang up.
        port: 0: any free one.
    """

    daemon_threads = True

    def __init__(self, made: Engine, fault: Any = None, port: int = 0) -> None:
        self.pages, self.engine = PageServer(made.call), made
        self.fault = fault or (lambda path, keys, reply: reply)
        self.asked: list[str] = []
        self.num_bytes = 0  # of requests and replies, heads included
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """An asker that is gone is no news."""

    def reply(self, path: str, body: dict[str, Any]) -> bytes | Iterable[bytes] | None:
        """The body of a reply, or parts of one; None: the connection ends without."""
        assert body["namespace"] == (self.pages.namespace() or b"").hex()
        if path == "compute":
            answer(self.engine, body["token_ids"], body["cache_salt"], from_peer=True)
            return self.fault(path, [], b"{}")
        digits = body["keys"]
        keys = [bytes.fromhex(digits[i : i + 40]) for i in range(0, len(digits), 40)]
        return self.fault(path, keys, getattr(self.pages, path)(keys))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PeerServer

    def do_POST(self) -> None:
        path = self.path.rpartition("/")[2]
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(path)
        reply = self.server.reply(path, json.loads(raw))
        if reply is None:
            self.close_connection = True
            return
        parts = [reply] if isinstance(reply, bytes) else reply
        self.send_response(200)
        if isinstance(reply, bytes):
            self.send_header("content-length", str(len(reply)))
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.server.num_bytes += len(part)
        self.close_connection |= not isinstance(reply, bytes)
        self.server.num_bytes += len(raw) + len(str(self.headers)) + 200

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def served(made: Engine, fault: Any = None, port: int = 0) -> Iterator[PeerServer]:
    """An engine as a peer."""
    with PeerServer(made, fault, port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def pair(
    case: str = "qwen3-v4", fault: Any = None, **changes: Any
) -> Iterator[tuple[Engine, PeerServer, Engine]]:
    """An engine, itself as a peer, and an engine that asks it."""
    with (
        engine(case, **changes) as first,
        served(first, fault) as peer,
        engine(case, (peer.url,), **changes) as second,
    ):
        yield first, peer, second


def of(path: str, change: Callable[[list[bytes], bytes], Any]) -> Any:
    """A fault of a peer: what it makes of the keys and the reply of one path."""
    return lambda asked, keys, reply: change(keys, reply) if asked == path else reply


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are long enough for a busy machine, and no prompt is too short to ask for."""
    monkeypatch.setattr(peers, "UNMEASURED_S", 20.0)
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: None)


def plain(case: str, ids: list[int], **kv: Any) -> list[int]:
    return alone(model_of(case), ids, FEW, **kv).token_ids


@pytest.mark.alike
@pytest.mark.parametrize("case", every(2, CASES))
def test_a_prompt_that_a_peer_has_is_not_computed(case: str) -> None:
    ids = prompt(140)
    with pair(case) as (first, _, second):
        assert answer(first, ids)[0] == plain(case, ids)
        assert answer(second, ids) == (plain(case, ids), 128)
        longer = ids[:100] + prompt(60, 3)
        tokens, cached = answer(second, longer)
        assert tokens == plain(case, longer)
        assert cached <= 100
        assert second.stats()["peers"]["failures"] == 0


def test_stored_bits_travel_as_they_are() -> None:
    ids, kv = prompt(140), KVOptions(bits=(8, 4))
    with pair(kv=kv) as (first, _, second):
        tokens, _ = answer(first, ids)
        assert answer(second, ids) == (tokens, 128)


def test_only_requests_of_one_salt_share_pages() -> None:
    ids = prompt(140)
    with pair() as (first, _, second):
        answer(first, ids, "a")
        assert answer(second, ids, "b")[1] == answer(second, ids)[1] == 0
        assert answer(second, ids, "a")[1] == 128


def test_what_is_sent_is_hardly_more_than_the_pages() -> None:
    ids = prompt(1000)
    with pair() as (first, peer, second):
        answer(first, ids)
        page_bytes = first.call(lambda loop: loop.store.page_bytes)
        assert answer(second, ids)[1] == 992
        beside = peer.num_bytes - 62 * sum(page_bytes)
        # of a page: its entry's head, its key in both requests; and what three requests cost
        assert beside <= 62 * (entry_bytes(PAGE, 0) + 100) + 3000


# -- prompts that another computes ----------------------------------------------------------------


@pytest.mark.alike
@pytest.mark.parametrize("case", every(2, CASES))
def test_a_prompt_is_computed_elsewhere(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 20.0)
    ids = prompt(300)
    with engine(case) as first, served(first) as peer, engine(case, (), peer.url) as second:
        assert answer(second, ids) == (plain(case, ids), 288)
        assert answer(second, ids, "salt") == (plain(case, ids), 288)
        assert peer.asked.count("compute") == 2
        assert second.stats()["prompt_tokens_computed"] == 24


def test_a_peer_that_is_slower_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 1.0)
    slow = threading.Event()
    fault = of("compute", lambda _, reply: (slow.wait(5), reply)[1])
    with (
        engine("qwen3-v4") as first,
        served(first, fault) as peer,
        engine("qwen3-v4", (), peer.url) as second,
    ):
        for seed in range(3):
            ids = prompt(100, seed)
            assert answer(second, ids)[0] == plain("qwen3-v4", ids)
        assert peer.asked.count("compute") == 1
        slow.set()


def test_two_servers_never_send_a_prompt_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 20.0)
    ids, ports = prompt(300), [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        made = [stack.enter_context(engine("qwen3-v4", (), url)) for url in urls[::-1]]
        servers = [
            stack.enter_context(served(server, port=port))
            for server, port in zip(made, ports, strict=True)
        ]
        assert answer(made[0], ids) == (plain("qwen3-v4", ids), 288)
        assert servers[1].asked.count("compute") == 1
        assert not servers[0].asked


# -- peers that fail ------------------------------------------------------------------------------


class Faults:
    """Goes wrong in a way that a seed decides, at each request anew."""

    def __init__(self, seed: int, other: PageServer) -> None:
        self._rng, self._other = random.Random(seed), other
        self._before = b""  # the last reply of entries

    def __call__(self, path: str, keys: list[bytes], reply: bytes) -> bytes | None:
        wrong = self._rng.choice(FAULTS) if self._rng.random() < 0.3 else ""
        before, self._before = self._before, reply
        match wrong:
            case "drop":
                return None
            case "delay":
                time.sleep(self._rng.random() / 5)
            case "corrupt" if reply:
                bit = self._rng.randrange(8 * len(reply))
                changed = bytearray(reply)
                changed[bit // 8] ^= 1 << bit % 8
                return bytes(changed)
            case "cut":
                return reply[: self._rng.randrange(len(reply) + 1)]
            case "noise":
                return self._rng.randbytes(self._rng.randrange(1 << 17))
            case "claim" if path == "held":
                return b"1" * len(keys)
            case "replay":
                return before
            case "impersonate" if path == "entries":
                return self._other.entries(keys) or before
        return reply


FAULTS = ("drop", "delay", "corrupt", "cut", "noise", "claim", "replay", "impersonate")


@pytest.mark.parametrize("case", alike(CASES))
def test_whatever_peers_do_tokens_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(peers, "MAX_PAUSE_S", 0.0)
    monkeypatch.setattr(peers, "BATCH_BYTES", 1 << 17)
    monkeypatch.setattr(peers, "UNMEASURED_S", 2.0)
    other_case = "mistral-v4" if case == "qwen3-v4" else "qwen3-v4"
    came = 0
    for seed in range(SEEDS):
        print(f"MLXINFER_PEER_SEEDS, seed {seed}")
        with ExitStack() as stack:
            first, other = (stack.enter_context(engine(name)) for name in (case, other_case))
            stranger = PageServer(other.call)
            stranger.namespace()
            faulty = [
                stack.enter_context(served(first, Faults(seed + i, stranger))) for i in (0, 1)
            ]
            urls = tuple(server.url for server in faulty)
            second = stack.enter_context(engine(case, urls))
            for n in range(4):
                ids = prompt(160 + 16 * n, n % 2)
                answer(first, ids)
                tokens, cached = answer(second, ids)
                assert tokens == plain(case, ids), (seed, n)
                came += cached > 0
    assert came, "no page ever came"


def test_a_silent_peer_costs_one_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "UNMEASURED_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connects, and says nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with engine("qwen3-v4", (url,)) as asking:
            waits = []
            for seed in range(3):
                ids, began_s = prompt(140, seed), time.monotonic()
                assert answer(asking, ids)[0] == plain("qwen3-v4", ids)
                waits.append(time.monotonic() - began_s)
            assert asking.stats()["peers"]["failures"] == 1
    assert waits[0] >= 1.0 / peers.LOOK_SHARE


@pytest.mark.parametrize("path", ["held", "entries"])
def test_a_slow_peer_costs_one_bounded_wait(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "UNMEASURED_S", 1.0)

    def drips(_: list[bytes], reply: bytes) -> Iterator[bytes]:
        for i in range(min(len(reply), 60)):
            time.sleep(0.1)
            yield reply[i : i + 1]

    with pair(fault=of(path, drips)) as (first, peer, asking):
        for seed in range(3):
            answer(first, prompt(140, seed))
        for seed in range(3):
            ids = prompt(140, seed)
            assert answer(asking, ids) == (plain("qwen3-v4", ids), 0)
        assert asking.stats()["peers"]["failures"] == 1
        assert peer.asked.count(path) == 1


def test_a_slow_peer_gives_what_it_can_and_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "UNMEASURED_S", 5.0)

    def pages(keys: list[bytes], reply: bytes) -> Iterator[bytes]:
        size = len(reply) // len(keys)
        for at in range(0, len(reply), size):
            if at == 4 * size:
                time.sleep(8)
            yield reply[at : at + size]

    ids = prompt(140)
    with pair(fault=of("entries", pages)) as (first, _, asking):
        answer(first, ids)
        assert answer(asking, ids) == (plain("qwen3-v4", ids), 4 * PAGE)
        assert asking.stats()["peers"]["failures"] == 0


def test_requests_that_fail_together_are_one_failure() -> None:
    with engine("qwen3-v4", (f"http://127.0.0.1:{free_port()}",)) as asking:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        asking.call(
            lambda _: [
                asking.submit(Request(f"{n}", prompt(140, n), FEW), events.put) for n in range(8)
            ]
        )
        ended = 0
        while ended < 8:
            ended += events.get(timeout=60).finish_reason is not None
        assert asking.stats()["peers"]["failures"] == 1


def test_endless_bytes_are_read_no_further_than_what_was_asked_for() -> None:
    num_sent = 0

    def noise() -> Iterator[bytes]:
        nonlocal num_sent
        while True:
            yield bytes(1 << 16)
            num_sent += 1 << 16

    ids = prompt(140)
    with pair(fault=of("held", lambda *_: noise())) as (_, _, asking):
        assert answer(asking, ids) == (plain("qwen3-v4", ids), 0)
    assert num_sent < peers.MAX_HEAD_BYTES + (16 << 20), "what the system's buffers take"


def test_a_request_gets_no_more_pages_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("qwen3-v4") as made:
        pages = PageServer(made.call)
        pages.namespace()
        answer(made, prompt(300))
        size = made.call(lambda loop: loop.store.page_bytes[0])
        monkeypatch.setattr(peers, "BATCH_BYTES", 4 * size)
        held = made.call(
            lambda loop: [
                transfer.entry.key
                for page in loop.scheduler.kv_manager.prefix.page_of.values()
                for transfer in loop.store.transfers(page, range(len(page.ids)))
            ]
        )
        assert len(held) > 4
        assert len(pages.entries(held)) == 4 * entry_bytes(PAGE, size)
        assert len(pages.entries(held[:1] * 1000)) == 4 * entry_bytes(PAGE, size)


def held_by(gate: threading.Event) -> Callable[[str, list[bytes], bytes], bytes]:
    """A fault of a peer: its replies wait."""
    return lambda path, keys, reply: reply if gate.wait(LIMIT_S) else b""


def test_clients_that_leave_cost_a_peer_nothing() -> None:
    ids, gate = prompt(140), threading.Event()
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with pair(fault=held_by(gate)) as (first, _, second):
        answer(first, ids)
        for n in range(8):  # more than may ask at once
            second.submit(Request(f"gone {n}", prompt(140, n), FEW), events.put)
        time.sleep(0.3)
        for n in range(8):
            second.abort(f"gone {n}")
        gate.set()
        assert answer(second, ids) == (plain("qwen3-v4", ids), 128)
        assert second.stats()["peers"]["failures"] == 0


def test_requests_go_on_while_one_waits_for_peers() -> None:
    ids, gate = prompt(140), threading.Event()
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with pair(fault=held_by(gate)) as (first, _, second):
        answer(first, ids)
        second.submit(Request("waits", ids, FEW), events.put)
        second.submit(Request("gone", prompt(140, 5), FEW), events.put)
        assert answer(second, prompt(20))[0] == plain("qwen3-v4", prompt(20))
        assert second.stats()["waiting"] == 0
        second.abort("gone")
        assert events.get(timeout=60).request_id == "gone"
        gate.set()
        assert events.get(timeout=60).cached_tokens == 128


def test_a_namespace_that_differs_gets_nothing() -> None:
    ids = prompt(140)
    with engine("qwen3-v4") as first, served(first) as peer:
        answer(first, ids)
        with engine("qwen3-v4", (peer.url,), kv=KVOptions(bits=(8, 8))) as second:
            assert answer(second, ids)[1] == 0
            assert second.stats()["peers"]["failures"] == 1
