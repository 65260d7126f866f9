"""The registry with models that take no time: loads, unloads, and what callers get."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_models import MB, Machine

from mlxinfer.errors import (
    CheckpointError,
    DeviceLostError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from mlxinfer.server import models as registry_module
from mlxinfer.server import workers
from mlxinfer.server.errors import HttpError, ModelLoadError
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import FIRST_PAUSE_S, MAX_PAUSE_S, RegistryEntry, State
from tests.waiting import until, wait_until


@pytest.fixture
def machine() -> Machine:
    """Room for two models of 10 MB, or one of 25."""
    return Machine(limit_bytes=26 * MB)


@pytest.fixture
def models(machine: Machine) -> ModelRegistry:
    return machine.registry(
        [
            machine.entry("a", 10 * MB, aliases=("gpt", "a2")),
            machine.entry("b", 10 * MB, ttl_s=60.0),
            machine.entry("c", 10 * MB),
            machine.entry("big", 25 * MB),
        ]
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def touch(models: ModelRegistry, *names: str | None) -> None:
    for name in names:
        async with models.use(models.find(name)):
            pass


def states(models: ModelRegistry) -> str:
    """One letter a model: U, L."""
    return "".join("L" if s.state is State.LOADED else "U" for s in models.slots())


async def test_the_first_use_loads_a_model_by_any_name(
    machine: Machine, models: ModelRegistry
) -> None:
    assert states(models) == "UUUU"
    await touch(models, None, "gpt", "a2", "a", "b")
    assert states(models) == "LLUU"
    assert machine.loads == ["a", "b"]
    assert models.held_bytes == 22 * MB


def test_an_unknown_name_is_a_404_that_says_what_there_is(models: ModelRegistry) -> None:
    with pytest.raises(ModelNotFoundError, match="there is: a, b, c, big"):
        run(touch(models, "../a"))


async def test_many_waiters_cause_one_whole_load(machine: Machine, models: ModelRegistry) -> None:
    go_on = machine.hold("a")
    waiting = [asyncio.create_task(touch(models, "a")) for _ in range(20)]
    await until(lambda: models.find("a").users == 20)
    waiting[0].cancel()
    go_on.set()
    await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()
    assert machine.loads == ["a"]
    assert models.slots()[0].users == 0


async def test_the_least_recently_used_is_unloaded(machine: Machine, models: ModelRegistry) -> None:
    await touch(models, "a", "b")
    machine.clock = 1.0
    await touch(models, "a", "c")
    assert states(models) == "LULU"
    machine.clock = 2.0
    await touch(models, "big")
    assert states(models) == "UUUL"
    assert models.slots()[1].unloads == {"memory": 1}


async def test_models_in_use_stay_and_none_goes_in_vain(
    machine: Machine, models: ModelRegistry
) -> None:
    await touch(models, "b")
    async with models.use(models.find("a")) as served:
        with pytest.raises(OverloadedError, match="no room") as refused:
            await touch(models, "big")
        assert refused.value.retry_after_s > 0
        assert states(models) == "LLUU"
        await touch(models, "c")
        assert states(models) == "LULU"
        assert not served.session.closed
    await touch(models, "big")
    assert states(models) == "UUUL"


async def test_a_failed_load_is_raised_to_all_waiting_requests_and_tried_again_later(
    machine: Machine, models: ModelRegistry
) -> None:
    machine.failing.add("a")
    waiting = [asyncio.create_task(touch(models, "a")) for _ in range(3)]
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in told] == [ModelLoadError] * 3
    assert "secret" not in str(told[0])
    with pytest.raises(ModelLoadError, match="again in 10 seconds") as caught:
        await touch(models, "a")
    assert caught.value.retry_after_s == FIRST_PAUSE_S
    assert machine.loads == ["a"]
    with pytest.raises(CheckpointError, match="secret"):  # an explicit load has the reason
        await models.load("a")
    machine.failing.clear()
    machine.clock += FIRST_PAUSE_S
    await touch(models, "a")
    assert machine.loads == ["a", "a", "a"]
    assert (models.slots()[0].num_failures, models.slots()[0].failure) == (2, None)
    assert models.held_bytes == 11 * MB


async def test_pauses_grow_with_each_failure_in_a_row(
    machine: Machine, models: ModelRegistry
) -> None:
    """A request every second, for an hour: few loads, at growing distances, and then at once."""
    machine.failing.add("a")

    tried = []
    for _ in range(3600):
        before = len(machine.loads)
        with pytest.raises(ModelLoadError) as caught:
            await touch(models, "a")
        assert 0 < caught.value.retry_after_s <= MAX_PAUSE_S
        if len(machine.loads) > before:
            tried.append(machine.clock)
        machine.clock += 1.0
    await touch(models, "b")  # others are not concerned
    machine.failing.clear()
    await models.load("a")
    assert tried == [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030]
    slot = models.find("a")
    assert (slot.state, slot.failures_in_a_row, slot.failure) == (State.LOADED, 0, None)


async def test_idle_models_are_unloaded_after_their_ttl(
    machine: Machine, models: ModelRegistry
) -> None:
    await touch(models, "a", "b")
    machine.clock = 59.0
    await models.unload_idle()
    assert models.find("b").ttl_left_s == 1.0
    async with models.use(models.find("b")):
        machine.clock = 200.0
        await models.unload_idle()
        assert models.find("b").ttl_left_s == 60.0
    machine.clock = 259.9
    await models.unload_idle()
    assert states(models) == "LLUU"
    machine.clock = 260.0
    await models.unload_idle()
    assert states(models) == "LUUU"
    assert models.find("a").ttl_left_s is None
    assert models.slots()[1].unloads == {"idle": 1}


def test_a_failed_look_at_idle_models_ends_neither_the_looks_nor_the_server(
    machine: Machine, models: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no thread can be begun for the end of a model."""
    begun: list[str] = []

    def apart(work: Callable[[], None], name: str) -> "asyncio.Future[None]":
        begun.append(name)
        if len(begun) == 1:
            raise RuntimeError("can't start new thread")
        return workers.apart(work, name)

    async def work() -> None:
        await touch(models, "b")
        machine.clock = 60.0
        tending = asyncio.create_task(models.tend(lambda: None))
        await until(lambda: tending.done() or states(models) == "UUUU")
        assert not tending.done()
        tending.cancel()

    monkeypatch.setattr(registry_module, "apart", apart)
    monkeypatch.setattr(registry_module, "TEND_S", 0.001)
    run(work())
    assert len(begun) == 2


async def test_a_pinned_model_is_loaded_at_the_start_and_stays(machine: Machine) -> None:
    models = machine.registry(
        [
            machine.entry("late", 3 * MB),
            machine.entry("soon", 10 * MB, preload=True, ttl_s=0.0),
            machine.entry("too much", 12 * MB, preload=True),
            machine.entry("rock", 10 * MB, pinned=True, ttl_s=0.0),
        ]
    )
    began = models.started
    await models.load_first()
    assert (began, models.started) == (False, True)
    assert machine.loads == ["rock", "soon"]
    machine.clock = 1e6
    await models.unload_idle()
    await touch(models, "too much")
    with pytest.raises(InvalidRequestError, match="pinned"):
        await models.unload("rock", 1.0)
    assert states(models) == "UULL"


@pytest.mark.parametrize("broken", ["rock", "rock:x"])
def test_a_start_fails_with_the_reason(machine: Machine, broken: str) -> None:
    """Of a model, or of an adapter of it."""
    machine.failing.add(broken)
    entry = machine.entry("rock", 10 * MB, pinned=True, adapters={"x": Path("x")})
    models = machine.registry([entry])
    with pytest.raises(CheckpointError, match="secret"):
        run(models.load_first())
    assert not models.started


async def test_an_unload_waits_and_is_safe_twice(machine: Machine, models: ModelRegistry) -> None:
    await models.unload("a")  # it is not there, as was wanted
    async with models.use(models.find("a")):
        with pytest.raises(HttpError):
            await models.unload("a")
        going = asyncio.create_task(models.unload("a", 10.0))
        await until(lambda: models.find("a").leaving > 0)
        with pytest.raises(HttpError):  # which does not undo the one that waits
            await models.unload("a")
        with pytest.raises(OverloadedError, match="being unloaded"):
            await touch(models, "a")
        assert not going.done()
    await going
    assert states(models) == "UUUU"
    await touch(models, "a")
    assert states(models) == "LUUU"


async def test_an_unload_goes_on_where_its_client_leaves(models: ModelRegistry) -> None:
    async with models.use(models.find("a")):
        waiting = asyncio.create_task(models.unload("a", 3600.0))
        await until(lambda: models.find("a").leaving > 0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await touch(models, "a")
    assert states(models) == "LUUU"


async def test_a_request_during_an_unload_reloads_it(
    machine: Machine, models: ModelRegistry
) -> None:
    await touch(models, "a")
    go_on = machine.hold("a")
    going = asyncio.create_task(models.unload("a"))
    await until(lambda: models.find("a").state is State.UNLOADING)
    models.find("a").leaving = 0  # as for one that is unloaded for its memory
    coming = asyncio.create_task(touch(models, "a"))
    await until(lambda: models.find("a").users == 1)
    go_on.set()
    await asyncio.gather(coming, going)
    assert machine.loads == ["a", "a"]
    assert machine.problems == []


def test_a_model_larger_than_its_files_is_unloaded_again(machine: Machine) -> None:
    entry = machine.entry("liar", 30 * MB)
    small = RegistryEntry(name="liar", load=entry.load, weights_bytes=5 * MB, kv_bytes=MB)
    models = machine.registry([small])
    with pytest.raises(ModelLoadError):
        run(touch(models, "liar"))
    assert models.held_bytes == 0
    assert machine.there == {}


def test_a_share_shrinks_where_weights_are_larger_than_their_files(machine: Machine) -> None:
    rooms: list[int] = []

    def load(room: int) -> Any:
        rooms.append(room)
        return machine.load("a", 12 * MB, 0)

    models = machine.registry([RegistryEntry(name="a", load=load, weights_bytes=10 * MB)])
    run(touch(models, "a"))
    (slot,) = models.slots()
    assert rooms == [26 * MB]
    assert (slot.weights_bytes, slot.kv_bytes) == (12 * MB, 14 * MB)


async def test_a_model_stuck_in_its_unload_keeps_its_memory(
    machine: Machine, models: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.server.models.UNLOAD_S", 0.01)
    await touch(models, "a")
    go_on = machine.hold("a")
    for name in ("big", "big", "a"):
        with pytest.raises(OverloadedError, match=r"stuck|no room"):
            await touch(models, name)
        assert models.held_bytes == 11 * MB
    await touch(models, "b")
    go_on.set()
    await until(lambda: models.find("a").state is State.UNLOADED)
    await touch(models, "a")
    assert machine.problems == []


def test_close_ends_loading_models_and_leaves_stuck_ones_behind(
    machine: Machine, models: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.server.models.CLOSE_S", 0.1)
    loads, ends = machine.hold("a"), machine.hold("b")

    async def work() -> None:
        ends.set()
        await touch(models, "b")
        ends.clear()
        asyncio.create_task(touch(models, "a"))  # noqa: RUF006  # cancelled as the loop ends
        await until(lambda: models.find("a").state is State.LOADING)

    asyncio.run(work())
    loads.set()
    models.close()  # though the end of b waits
    wait_until(lambda: set(machine.there) == {"b"})
    ends.set()


def test_a_load_that_is_under_way_when_the_server_ends_is_stopped(machine: Machine) -> None:
    loads = machine.hold("a")
    models = machine.registry([machine.entry("a", 10 * MB, stop=loads.set)])

    async def work() -> None:
        asyncio.create_task(touch(models, "a"))  # noqa: RUF006  # cancelled as the loop ends
        await until(lambda: models.find("a").state is State.LOADING)

    asyncio.run(work())
    models.close()
    assert loads.is_set()
    assert not machine.there


def test_patterns_and_a_default_answer_to_other_names(machine: Machine) -> None:
    entries = [
        machine.entry("a", 10 * MB, aliases=("claude-*", "gpt-4*")),
        machine.entry("b", 10 * MB, aliases=("claude-3-haiku", "*-mini")),
    ]
    models = ModelRegistry(entries, limit_bytes=machine.limit_bytes)
    expected = {"claude-opus-5": "a", "claude-3-haiku": "b", "gpt-4o-mini": "a", "o3-mini": "b"}
    for name, value in expected.items():
        assert models.find(name).entry.name == value
    with pytest.raises(ModelNotFoundError):
        models.find("other")
    with pytest.raises(InvalidRequestError, match="default model"):
        ModelRegistry(entries, limit_bytes=machine.limit_bytes, default="c")
    falling_back = ModelRegistry(entries, limit_bytes=machine.limit_bytes, default="b")
    assert falling_back.find("other").entry.name == "b"
    assert falling_back.find("claude-x").entry.name == "a"
    assert falling_back.find(None).entry.name == "b"
    assert models.find(None).entry.name == "a"


async def test_a_model_joins_a_running_registry(machine: Machine) -> None:
    models = machine.registry([machine.entry("a", 10 * MB), machine.entry("b", 10 * MB)])
    await touch(models, "a")
    before = models.find("a").kv_bytes
    models.add(machine.entry("c", 10 * MB, aliases=("c2",)))
    assert models.names() == ["a", "b", "c"]
    assert models.find("a").kv_bytes == before
    await touch(models, "c2")
    assert models.find("c").state is State.LOADED
    assert machine.loads == ["a", "c"]
    assert machine.problems == []


async def test_a_model_leaves_a_running_registry(machine: Machine) -> None:
    entries = [machine.entry("a", 10 * MB), machine.entry("b", 10 * MB, aliases=("b*",))]
    models = ModelRegistry(entries, limit_bytes=machine.limit_bytes, default="a")
    await touch(models, "b2")
    await models.remove("b")
    assert models.names() == ["a"]
    assert models.find("b2").entry.name == "a"
    assert models.held_bytes == 0
    with pytest.raises(InvalidRequestError, match="by default"):
        await models.remove("a")
    models.add(machine.entry("b", 10 * MB))
    await touch(models, "b")
    assert machine.problems == []


@pytest.mark.parametrize(
    "other", [{"name": "a"}, {"name": "x", "aliases": ("a",)}, {"name": "x", "num_bytes": 10**12}]
)
def test_a_model_that_cannot_join_changes_nothing(machine: Machine, other: dict[str, Any]) -> None:
    models = machine.registry([machine.entry("a", MB)])
    fields = {"num_bytes": MB, **other}
    with pytest.raises(InvalidRequestError):
        models.add(machine.entry(**fields))
    assert models.names() == ["a"]
    assert models.find("a").kv_bytes == MB


async def test_a_pinned_model_stays_until_it_is_unpinned(machine: Machine) -> None:
    models = machine.registry([machine.entry("a", MB, ttl_s=5.0)])
    await touch(models, "a")
    models.find("a").pinned = True
    machine.clock += 100
    await models.unload_idle()
    assert models.find("a").state is State.LOADED
    assert models.find("a").ttl_left_s is None
    with pytest.raises(InvalidRequestError, match="pinned"):
        await models.unload("a")
    models.find("a").pinned = False
    await models.unload_idle()
    assert models.find("a").state is State.UNLOADED


async def test_a_client_that_leaves_does_not_leave_an_adapter_half_loaded(
    machine: Machine, models: ModelRegistry
) -> None:
    go_on, slot = machine.hold("a:x"), models.find("a")
    loading = asyncio.create_task(models.load_adapter("a", "x", Path("x")))
    await until(lambda: "a:x" in machine.loads)
    loading.cancel()
    await asyncio.wait({loading})
    go_on.set()
    await until(lambda: not slot.users)
    await models.unload_adapter("a", "x")
    served: Any = slot.served
    assert served.adapters == []


async def test_models_load_without_a_broken_adapter(
    machine: Machine, models: ModelRegistry
) -> None:
    slot = models.find("a")
    await models.load_first()
    for name in ("x", "y"):
        await models.load_adapter("a", name, Path(name))
    await models.unload("a")
    machine.failing.add("a:x")  # its folder broke meanwhile
    await touch(models, "a")
    served: Any = slot.served
    assert served.adapters == list(slot.adapters)[1:] == ["y"]
    assert list(slot.adapter_failures) == ["x"]
    slot.check_adapter("y")
    with pytest.raises(ModelLoadError, match="adapter x of a could not be loaded") as caught:
        slot.check_adapter("x")
    assert "secret" not in str(caught.value)
    with pytest.raises(CheckpointError):  # the answer to a load names the reason
        await models.load_adapter("a", "x", Path("x"))
    machine.failing.clear()
    await models.load_adapter("a", "x", Path("x"))
    assert (sorted(served.adapters), slot.adapter_failures) == (["x", "y"], {})
    machine.failing.add("a:x")
    await models.unload("a")
    await touch(models, "a")
    await models.unload_adapter("a", "x")  # and it can be given up
    assert list(slot.adapters) == ["y"]
    assert not slot.adapter_failures


async def test_an_adapter_may_go_while_its_model_loads(
    machine: Machine, models: ModelRegistry
) -> None:
    go_on, slot = machine.hold("a:x"), models.find("a")
    slot.adapters.update(x=Path("x"), y=Path("y"))
    using = asyncio.create_task(touch(models, "a"))
    await until(lambda: "a:x" in machine.loads)
    unloading = asyncio.create_task(models.unload_adapter("a", "x"))
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(using, unloading)
    served: Any = slot.served
    assert served.adapters == list(slot.adapters) == ["y"]


async def test_a_load_on_a_gpu_that_ignores_the_process_ends_the_server() -> None:
    """No other load would go better; the tending task raises it, and the server starts again."""
    ignored = DeviceLostError("macOS ignores the GPU work of this process")

    def lost(_: int) -> Any:
        raise ignored

    entry = RegistryEntry(name="a", load=lost, weights_bytes=1 * MB, kv_bytes=1 * MB)
    registry = ModelRegistry([entry], limit_bytes=10 * MB)
    with pytest.raises(ModelLoadError):
        async with registry.use(registry.find("a")):
            pass
    with pytest.raises(DeviceLostError):
        await registry.unload_idle()
    with pytest.raises(DeviceLostError):
        async with registry.use(registry.find("a")):
            pass
