"""Memory of models: sums that people can do themselves, pauses after failures, random programs."""

import asyncio
import itertools
from typing import Any

import pytest
from fake_models import MB, Machine
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError, MlxinferError
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import (
    MAX_PAUSE_S,
    MIN_KV_BYTES,
    ModelSlot,
    RegistryEntry,
    State,
    kv_budgets,
)

NAMES = "abcd"
names = st.sampled_from(NAMES)
operations = st.lists(
    st.one_of(
        *[st.tuples(st.just("use"), names, st.integers(0, 5))] * 4,
        *[st.tuples(st.just("pause"), names, st.integers(1, 3))] * 3,
        st.tuples(st.just("load"), names, st.just(0)),
        st.tuples(st.just("unload"), names, st.sampled_from([0, 1])),
        st.tuples(st.just("leave"), names, st.integers(0, 3)),
        st.tuples(st.just("time"), names, st.integers(0, 40)),
        st.tuples(st.just("break"), names, st.just(0)),
        *[st.tuples(st.just("mend"), names, st.just(0))] * 3,
    ),
    min_size=1,
    max_size=40,
)
GB = 10**9


class Scene:
    """One program on a registry, and what went wrong."""

    def __init__(self, sizes: list[int], spare: int, pinned: int, ttl: list[float | None]) -> None:
        rock = sizes[pinned] if pinned < len(sizes) else 0
        limit = max(sizes) + rock + spare + 4  # one, beside the pinned one, and seldom a second
        self.machine = Machine(limit_bytes=limit * MB)
        self.models: ModelRegistry = self.machine.registry(
            self.machine.entry(n, s * MB, pinned=i == pinned, ttl_s=t)
            for i, (n, s, t) in enumerate(zip(NAMES, sizes, ttl, strict=True))
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.wrong: list[str] = []

    async def play(self, steps: list[tuple[str, str, int]]) -> None:
        for kind, name, number in steps:
            await self.step(kind, name, number)
            self.look()
        done, waiting = await asyncio.wait(
            self.tasks or [asyncio.create_task(asyncio.sleep(0))], timeout=60
        )
        assert not waiting, "a request waits for ever"
        async with asyncio.timeout(60):  # loads and unloads go on where their clients have left
            while any(
                slot.state in (State.LOADING, State.UNLOADING) for slot in self.models.slots()
            ):
                await asyncio.sleep(0.001)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), MlxinferError), task.exception()

    async def step(self, kind: str, name: str, number: int) -> None:
        match kind:
            case "use":
                self.spawn(self.use(name, number))
            case "load":
                self.spawn(self.models.load(name))
            case "unload":
                self.spawn(self.models.unload(name, number * 0.002))
            case "leave":
                if self.tasks:
                    self.tasks[-1 - number % len(self.tasks)].cancel()
            case "time":
                self.machine.clock += number
                self.spawn(self.models.unload_idle())
            case "break":
                self.machine.failing.add(name)
            case "mend":
                self.machine.failing.discard(name)
            case "pause":
                await asyncio.sleep(0.0005 * number)

    def spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def use(self, name: str, turns: int) -> None:
        async with self.models.use(self.models.find(name)) as model:
            for _ in range(turns):
                await asyncio.sleep(0.0003)
                if model.session.closed or self.models.find(name).served is not model:
                    self.wrong.append(f"{name} went while it was used")

    def look(self) -> None:
        if self.models.held_bytes > self.machine.limit_bytes:
            self.wrong.append("over the limit")

    def end(self) -> None:
        assert self.wrong == []
        assert self.machine.problems == []
        assert all(slot.users == 0 for slot in self.models.slots())
        loaded = {model.name for model in self.models.running()}
        assert loaded == set(self.machine.there)
        pinned = [s for s in self.models.slots() if s.entry.pinned]
        assert all(slot.unloads == {} for slot in pinned)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    spare=st.integers(0, 20),
    pinned=st.integers(0, 8),
    ttl=st.lists(st.sampled_from([None, 0.0, 10.0]), min_size=4, max_size=4),
    steps=operations,
)
def test_random_programs_keep_the_limits_and_answer_every_request(
    sizes: list[int], spare: int, pinned: int, ttl: list[float | None], steps: Any
) -> None:
    scene = Scene(sizes, spare, pinned, ttl)
    slow = itertools.cycle([0.0, 0.001, 0.0, 0.002])
    scene.machine.slow.update(zip(NAMES, slow, strict=False))
    asyncio.run(scene.play(steps))
    scene.end()


def need(name: str, weights: int, kv_bytes: int | None = None, pinned: bool = False) -> ModelSlot:
    def load(num_bytes: int) -> Any:
        raise AssertionError

    return ModelSlot(
        RegistryEntry(name=name, load=load, kv_bytes=kv_bytes, pinned=pinned), 0, weights
    )


FOUR_TENTHS = 0.4  # of what all but the weights leave, where models take turns
SHARES: list[tuple[list[ModelSlot], int, list[int]]] = [
    ([need("a", 8 * GB)], 20 * GB, [12 * GB]),
    (
        [need("a", 4 * GB), need("b", 6 * GB), need("c", 2 * GB, kv_bytes=2 * GB)],
        20 * GB,
        [3 * GB, 3 * GB, 2 * GB],
    ),
    ([need("a", 10 * GB), need("b", 5 * GB), need("c", 12 * GB)], 22 * GB, [4 * GB] * 3),
    ([need(f"m{i}", GB) for i in range(19)], 20 * GB, [int(FOUR_TENTHS * 19 * GB)] * 19),
    (
        [need("a", 10 * GB, pinned=True), need("b", 5 * GB), need("c", 6 * GB)],
        20 * GB,
        [int(FOUR_TENTHS * 2 * GB)] * 3,
    ),
]
UNFIT = [
    [need("x", 20 * GB)],
    [need("x", 5 * GB, kv_bytes=6 * GB)],
    [need("x", 5 * GB), need("y", 6 * GB, pinned=True)],
    [need("x", 10 * GB - 10**6)],
]


def test_shares_are_those_that_people_can_work_out() -> None:
    for needs, limit, shares in SHARES:
        assert [*kv_budgets(needs, limit).values()] == shares
    for needs in UNFIT:
        with pytest.raises(InvalidRequestError, match="model x does not fit"):
            kv_budgets(needs, 10 * GB)


sizes = st.integers(0, 100).map(lambda n: n * MIN_KV_BYTES)
some = st.lists(st.tuples(sizes, st.none() | sizes, st.booleans()), min_size=1, max_size=5)


@given(some=some, limit=sizes)
def test_budgets_keep_to_the_limit(some: list[tuple[int, int | None, bool]], limit: int) -> None:
    needs = [need(f"m{i}", *item) for i, item in enumerate(some)]
    try:
        budgets = kv_budgets(needs, limit)
    except InvalidRequestError:
        return
    for item in needs:
        at_once = [n for n in needs if n.pinned or n is item]
        assert sum(n.weights_bytes + budgets[n.entry.name] for n in at_once) <= limit
        assert item.entry.kv_bytes in (None, budgets[item.entry.name])
    if sum(n.weights_bytes + (n.entry.kv_bytes or 0) for n in needs) > limit:
        return
    free = [budgets[n.entry.name] for n in needs if n.entry.kv_bytes is None]
    assert len(set(free)) <= 1
    assert all(share >= MIN_KV_BYTES for share in free)


@given(st.lists(st.floats(0, 1000)))
def test_a_pause_ends_after_its_announced_length(later: list[float]) -> None:
    slot, now = need("a", GB), [0.0]
    slot.clock = lambda: now[0]
    for in_a_row, later_s in enumerate(later, start=1):
        now[0] += later_s
        pause_s = slot.fail()
        assert slot.failures_in_a_row == in_a_row
        before_s = now[0]
        now[0] = before_s + pause_s / 2
        assert 0 < slot.retry_left_s <= MAX_PAUSE_S
        now[0] = before_s + pause_s
        assert slot.retry_left_s == 0.0
