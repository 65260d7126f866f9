"""Random programs: never two of one model, never over the limit, and no request waits for ever."""

import asyncio
import itertools
from typing import Any

from fake_models import MB, Machine
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.errors import MlxinferError
from mlxinfer.server.models import ModelRegistry, State

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
            self.tasks or [asyncio.create_task(asyncio.sleep(0))], timeout=5
        )
        assert not waiting, "a request waits for ever"
        async with asyncio.timeout(5):  # loads and unloads go on where their clients have left
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
        async with self.models.use(name) as model:
            for _ in range(turns):
                await asyncio.sleep(0.0003)
                if model.closed or self.models.find(name).served is not model:
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


@settings(max_examples=60)
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
