"""Keys beside each other: none takes what another has a share of."""

import asyncio
import heapq
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import pytest
from live_server import CHAT, LiveServer, chat, long_chat
from test_documents import MESSAGES, RESPONSES, asked, part_of

from mlxinfer.errors import InvalidRequestError, OverloadedError
from mlxinfer.fair import Tenant
from mlxinfer.server.admission import (
    LONGEST_HOLD_S,
    MAX_RETRY_S,
    MIN_RETRY_S,
    REFUSAL_S,
    Admission,
    WaitingCall,
)
from mlxinfer.server.config import network_of
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.store import ResponseStore
from mlxinfer.server.workers import Workers
from tests.pdf_files import pdf
from tests.waiting import LIMIT_S, until, wait_until
from tests.watching import note_calls

TABLES = {"anna": {"key": "a"}, "bob": {"key": "b"}, "carl": {"key": "c", "weight": 3}}
KEYS = ApiKeys().with_named(TABLES, "keys")

PDF = pdf("A page about caches.")
ANSWERED = [
    (CHAT, asked(CHAT, part_of(CHAT, PDF))),
    (CHAT, chat(guided_regex="[0-9]{8}")),
    (RESPONSES, asked(RESPONSES, part_of(RESPONSES, PDF))),
    (MESSAGES, asked(MESSAGES, part_of(MESSAGES, PDF))),
    ("/v1/completions", {"prompt": "A", "max_tokens": 1}),
    ("/api/generate", {"prompt": "A", "model": "demo"}),
]


def ask(server: LiveServer, key: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return server.post(CHAT, chat(**fields), headers=headers)


def test_a_full_queue_refuses_whoever_filled_it() -> None:
    with (
        LiveServer(engine={"max_batch": 2}, keys=KEYS, max_waiting=4) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        long = {name: long_chat()[name] for name in long_chat() if name != "messages"}
        admission = server.service.admission
        flood = [pool.submit(ask, server, "b", **long) for _ in range(2)]
        wait_until(lambda: server.stats()["running"] == 2 and not admission.num_waiting)
        flood += [pool.submit(ask, server, "b", **long) for _ in range(4)]
        wait_until(lambda: admission.num_waiting == 4)
        refused = ask(server, "b")
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Workers, "run_for", None)  # none of these is read before it is refused
            headers = {"authorization": "Bearer b"}
            for path, body in ANSWERED:
                assert server.post(path, body, headers=headers).status_code == 503, path
        first = ask(server, "a")
        assert first.status_code == 200, "whose key has nothing waiting is let in"
        many = ask(server, "a", n=2)
        assert many.status_code == 200
        for call in list(server.service.calls):
            call.interrupt(InvalidRequestError("enough"))
        statuses = {job.result().status_code for job in flood}
        assert statuses <= {400, 503}
        wait_until(server.is_idle)


def test_who_has_fewer_places_takes_those_of_who_has_more() -> None:
    with (
        LiveServer(engine={"max_batch": 1}, keys=KEYS, max_waiting=4) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        long = {name: long_chat()[name] for name in long_chat() if name != "messages"}
        admission = server.service.admission
        runs = pool.submit(ask, server, "b", **long)
        wait_until(lambda: server.stats()["running"] == 1)
        flood = [pool.submit(ask, server, "b", **long) for _ in range(4)]
        wait_until(lambda: admission.num_waiting >= 4)
        first = pool.submit(ask, server, "a", **long)
        wait_until(lambda: any(call.tenant.name == "anna" for call in admission._calls))
        others = [first, *(pool.submit(ask, server, "a", **long) for _ in range(2))]
        wait_until(lambda: any(job.done() for job in flood))
        gone = next(job for job in flood if job.done()).result()
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "overloaded")
        assert int(gone.headers["retry-after"]) >= 1
        assert not (first.done() and first.result().status_code == 503)
        for call in list(server.service.calls):
            call.interrupt(InvalidRequestError("enough"))
        assert {job.result().status_code for job in [runs, *flood, *others]} <= {400, 503}
        wait_until(server.is_idle)


def test_weights_of_keys_are_read_and_checked() -> None:
    assert [key.weight for key in KEYS.all] == [1, 1, 3]
    for wrong in (0, -1, "2", float("nan"), True, 1e9):
        with pytest.raises(InvalidRequestError, match="weight"):
            ApiKeys().with_named({"anna": {"key": "a", "weight": wrong}}, "keys")


def test_priority_is_within_the_share_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each API passes it on; above 0, and in the background, a request has a smaller share."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat(priority=3)),
        (CHAT, chat(priority=-3)),
        ("/v1/completions", {"prompt": "A", "max_tokens": 1, "priority": 2}),
        ("/api/generate", {"prompt": "A", "model": "demo", "options": {"priority": 4}}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 1, "background": True}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 1, "priority": -1}),
    ]
    with LiveServer(keys=KEYS, store=ResponseStore(None)) as server:
        engine = server.model.session.engine
        asked = note_calls(monkeypatch, engine, "submit", lambda r, *_: (r.tenant, r.priority))
        headers = {"authorization": "Bearer c"}
        for path, body in bodies:
            assert server.post(path, body, headers=headers).status_code == 200, path
        for wrong in ("high", 1.5, 10**6):
            refused = server.post(CHAT, chat(priority=wrong), headers=headers)
            assert refused.json()["error"]["param"] == "priority"
        wait_until(lambda: not server.service.calls)
    carl = Tenant("carl", 3)
    behind = carl.at(1)
    assert asked == [(behind, 3), (carl, -3), (behind, 2), (behind, 4), (behind, 1), (carl, -1)]


def test_addresses_share_only_where_the_owner_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tenant] = []
    for by_address in (False, True):
        with LiveServer(share_by_address=by_address) as server:
            engine = server.model.session.engine
            tenants = note_calls(monkeypatch, engine, "submit", lambda request, *_: request.tenant)
            assert server.post(CHAT, chat()).status_code == 200
        seen += tenants
    assert seen == [Tenant(), Tenant("127.0.0.1")]
    assert network_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3") != network_of("2001:db9::1")


async def test_a_key_waits_for_no_work_of_another() -> None:
    """20 slow functions of one tenant; another's begins while two of them have the threads."""
    begun: list[str] = []
    workers, go_on = Workers(2), threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        go_on.wait()

    tasks = [
        asyncio.create_task(workers.run_for(Tenant(name), work, name))
        for name in [*["heavy"] * 20, "light"]
    ]
    while len(begun) < 3:
        await asyncio.sleep(0.001)
    assert sorted(begun) == ["heavy", "heavy", "light"]
    go_on.set()
    await asyncio.gather(*tasks)
    workers.close()


@pytest.mark.parametrize("seed", range(8))
async def test_a_tenant_without_work_gets_a_thread_at_once(seed: int) -> None:
    """Whatever others do: one thread more than a tenant may have. Alone it may have all others."""
    rnd = random.Random(seed)
    num_threads = rnd.randint(1, 3)
    workers, running = Workers(num_threads), Counter[str]()

    async def work(name: str) -> None:
        await workers.run_for(Tenant(name), hold, name)

    def hold(name: str) -> None:
        running[name] += 1
        go_on.wait(LIMIT_S)
        running[name] -= 1

    for _ in range(10):
        go_on = threading.Event()
        heavy = [asyncio.create_task(work("heavy")) for _ in range(rnd.randint(0, 9))]
        most = min(num_threads, len(heavy))
        await until(lambda count=most: running["heavy"] == count)  # type: ignore[misc]
        jobs = [asyncio.create_task(work("light")) for _ in range(rnd.randint(1, 5))]
        await until(lambda: running["light"] >= 1)
        assert running.total() <= num_threads + 1
        if rnd.random() < 0.5:
            rnd.choice([*heavy, *jobs]).cancel()
        go_on.set()
        await asyncio.gather(*heavy, *jobs, return_exceptions=True)
        await until(lambda: not workers.num_pending)
    workers.close()


async def test_threads_come_back_from_whoever_leaves() -> None:
    """Callers that are cancelled while they wait, run, or have just got a thread."""
    workers = Workers(2, max_waiting=4)
    for i in range(50):
        jobs = [asyncio.create_task(workers.run(time.sleep, 0.001)) for _ in range(5)]
        for _ in range(i % 5):
            await asyncio.sleep(0)
        for job in jobs[i % 3 :]:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    for _ in range(1000):
        if workers.num_pending == 0:
            break
        await asyncio.sleep(0.01)
    assert not workers.num_pending
    assert await workers.run(len, "abc") == 3
    workers.close()


async def test_the_tenant_with_most_functions_waiting_is_refused() -> None:
    workers, go_on = Workers(1, max_waiting=3), threading.Event()
    heavy = [asyncio.create_task(workers.run_for(Tenant("b"), go_on.wait)) for _ in range(4)]
    await asyncio.sleep(0)
    light = [asyncio.create_task(workers.run_for(Tenant("a"), go_on.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    outcomes = await asyncio.gather(*heavy, *light, return_exceptions=True)
    assert isinstance(outcomes.pop(3), OverloadedError)
    assert outcomes == [True] * 5
    workers.close()


def test_each_key_sees_its_waits_in_the_metrics() -> None:
    with LiveServer(keys=KEYS, open_metrics=True) as server:
        for key in "aab":
            assert ask(server, key).status_code == 200
        wait_until(lambda: not server.service.calls)
        shown = server.service.key_metrics
        assert {name: metrics.num_first for name, metrics in shown.items()} == {"anna": 2, "bob": 1}
        assert all(m.waited_s > 0 and not m.num_waiting + m.num_running for m in shown.values())
        text = server.get("/metrics").text
        assert 'mlxinfer:key_time_to_first_token_seconds_count{key="anna"} 2.0' in text
        assert 'mlxinfer:key_requests_waiting{key="bob"} 0.0' in text


@pytest.mark.parametrize("seed", range(5))
def test_refusals_of_a_key_come_at_a_pace_that_others_do_not_feel(seed: int) -> None:
    """However many clients ask again at once; another key's first refusal is not held back."""
    rnd, now_s = random.Random(seed), 0.0
    admission, sent_s = Admission(8, 100, lambda: now_s), list[float]()
    asks_s = [100.0] * rnd.randint(1, int(LONGEST_HOLD_S / REFUSAL_S) - 1)  # of the clients
    for number in range(500):
        now_s = heapq.heappop(asks_s)
        sent_s.append(now_s + admission.hold_s(Tenant("heavy")))
        heapq.heappush(asks_s, sent_s[-1] + rnd.choice([0, 0.001]))
        assert not admission.hold_s(Tenant(f"light {number}"))
    assert min(late - early for early, late in pairwise(sent_s)) >= REFUSAL_S - 1e-9
    assert len(admission._refused_s) < 500, "it forgets"
    holds_s = [admission.hold_s(Tenant("heavy")) for _ in range(200)]
    assert max(holds_s) == pytest.approx(LONGEST_HOLD_S)


@pytest.mark.parametrize("seed", range(20))
def test_retry_after_is_true(seed: int) -> None:
    """Whatever the pace: a quarter of what waits has gone by then; early tries are never too late.

    Requests of several keys go one after the other, each key in its turn.
    """
    rnd = random.Random(seed)
    now_s, pace_s = 0.0, rnd.choice([0.02, 0.3, 2, 20])  # seconds from one that goes to the next
    names, places = [f"key{i}" for i in range(rnd.randint(1, 3))], rnd.randint(24, 64)
    admission = Admission(places * len(names), 10**9, lambda: now_s)
    waiting = {name: deque[WaitingCall]() for name in names}

    def send(name: str) -> None:
        while True:
            waiting[name].append(admission.enter(Tenant(name), [5], lambda _: None))

    def fill() -> float:
        """Send requests of each key until one is refused; when that one may come again."""
        for name in names:
            with pytest.raises(OverloadedError) as refused:
                send(name)
        for name, calls in waiting.items():  # without those that lost their places
            waiting[name] = deque([call for call in calls if call.tokens])
            assert len(waiting[name]) == places
        assert refused.value.retry_after_s is not None
        return refused.value.retry_after_s

    fill()
    quarter_s, tries_s = places / 4 * len(names) * pace_s, [fill()]
    while now_s + tries_s[-1] < pace_s:  # none has gone
        now_s += tries_s[-1]
        tries_s.append(fill())
        assert tries_s[-1] <= max(quarter_s, MIN_RETRY_S)
        assert tries_s[-1] >= min(now_s, MAX_RETRY_S)
    now_s = 0.0
    for gone in range(places * len(names)):
        now_s += pace_s
        assert admission.leave(waiting[names[gone % len(names)]].popleft(), 0)
        if gone > 2 * len(names):
            expected_s = min(max(quarter_s, MIN_RETRY_S), MAX_RETRY_S)
            assert fill() == pytest.approx(expected_s, rel=0.2)
