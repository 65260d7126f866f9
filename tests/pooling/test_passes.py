"""Passes: what is computed together, in which order, and that nothing is lost or mixed up."""

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from pooling.tiny_pooling import pooling_folder

from mlxinfer.core import FinishReason, TokenEvent
from mlxinfer.errors import (
    ContextLengthError,
    DeviceLostError,
    InvalidRequestError,
    RequestFailedError,
)
from mlxinfer.fair import Tenant
from mlxinfer.pooling.config import read_pooling
from mlxinfer.pooling.loop import PoolingLoop
from mlxinfer.pooling.model import PoolingModel, load_pooling
from mlxinfer.pooling.request import (
    LEAST,
    MOST,
    PassQueue,
    PassSizer,
    PoolingLimits,
    PoolingRequest,
    TokenRow,
    WaitingRow,
)

SEEDS = int(os.environ.get("MLXINFER_POOLING_SEEDS", "12"))
MOST_TOKENS = 36


@dataclass
class Watched:
    """A loop without a thread, and its events by request."""

    loop: PoolingLoop
    events: dict[str, TokenEvent] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PoolingModel, pass_tokens: int | None = None) -> "Watched":
        events: dict[str, TokenEvent] = {}

        def emit(new: list[TokenEvent]) -> None:
            for event in new:
                assert event.request_id not in events, "a request ends once"
                events[event.request_id] = event

        loop = PoolingLoop(model, emit, max_context=MOST_TOKENS, pass_tokens=pass_tokens)
        return cls(loop, events)

    def add(self, name: str, rows: list[TokenRow]) -> PoolingRequest:
        request = PoolingRequest(name, rows)
        self.loop.limits.check(request)
        self.loop.add(request, None)
        return request

    def run(self) -> None:
        while not self.loop.idle:
            self.loop.turn()


@pytest.fixture(scope="module", params=["bert", "qwen3", "modernbert"])
def model(request, tmp_path_factory) -> PoolingModel:
    folder = pooling_folder(tmp_path_factory.mktemp("model"), request.param)
    pooling = read_pooling(folder)
    assert pooling is not None
    return load_pooling(folder, pooling)


def row(rng: random.Random, length: int | None = None) -> TokenRow:
    count = rng.randint(1, MOST_TOKENS) if length is None else length
    return TokenRow([rng.randrange(3, 96) for _ in range(count)])


def alone(model: PoolingModel, item: TokenRow) -> np.ndarray:
    watched = Watched.of(model)
    watched.add("a", [item])
    watched.run()
    return watched.events["a"].pooled[0]


@pytest.mark.alike
def test_any_program_of_requests_gives_what_each_row_gives_alone(model):
    """Requests that come, are aborted and wait, in passes of any size; some rows are long."""
    for seed in range(SEEDS):
        print(f"MLXINFER_POOLING_SEEDS, seed {seed}")
        rng = random.Random(seed)
        watched = Watched.of(model, rng.choice([1, 7, 16, 50, 1000]))
        wanted: dict[str, list[TokenRow]] = {}
        aborted = set()
        for number in range(rng.randint(1, 8)):
            name = f"r{number}"
            wanted[name] = [row(rng) for _ in range(rng.randint(1, 6))]
            watched.add(name, wanted[name])
            for _ in range(rng.randint(0, 3)):
                watched.loop.turn()
            if rng.random() < 0.3:
                victim = rng.choice(list(wanted))
                if victim not in watched.events:
                    aborted.add(victim)
                watched.loop.abort(victim)
        watched.run()
        stats = watched.loop.stats()
        assert stats["waiting"] == stats["running"] == stats["waiting_rows"] == 0
        for name, rows in wanted.items():
            event = watched.events[name]
            if name in aborted:
                assert event.finish_reason is FinishReason.ABORT
                continue
            expected = np.stack([alone(model, item) for item in rows])
            np.testing.assert_allclose(event.pooled, expected, atol=2e-5)


def test_every_turn_launches_while_only_long_rows_wait(model):
    rng = random.Random(5)
    watched = Watched.of(model, 6)
    watched.add("a", [row(rng, MOST_TOKENS) for _ in range(3)])
    turns = 0
    while not watched.loop.idle:
        watched.loop.turn()
        turns += 1
    assert turns == watched.loop.stats()["steps"] + 1, "the last turn only reads"


def waiting(lengths: list[int], name: str = "a") -> list[WaitingRow]:
    request = PoolingRequest(name, [TokenRow([5] * length) for length in lengths])
    return [WaitingRow(request, index) for index in range(len(lengths))]


def test_a_pass_takes_the_oldest_row_then_the_shortest():
    queue = PassQueue()
    queue.add(waiting([8, 3, 9]))
    queue.add(waiting([1, 2, 7], "b"))
    passes = []
    while queue.num_waiting:
        taken = queue.take(10)
        passes.append([(item.request.id, item.num_tokens) for item in taken])
    assert passes == [[("b", 1), ("a", 8)], [("b", 2), ("a", 3)], [("a", 9)], [("b", 7)]]


def test_rows_longer_than_a_pass_are_taken_alone():
    queue = PassQueue()
    rows = waiting([30, 4, 20])
    queue.add(rows)
    queue.discard(rows[:1])
    assert [item.num_tokens for item in queue.take(10)] == [4]
    queue.add(waiting([2]))
    assert [item.num_tokens for item in queue.take(10)] == [20]
    assert [item.num_tokens for item in queue.take(10)] == [2]
    assert not queue.take(10)
    assert queue.num_waiting == 0


def test_passes_are_sized_by_time():
    sizer = PassSizer(0.25)
    assert PassSizer(0.25, 77).num_tokens == 77
    before = sizer.num_tokens
    sizer.observe(10, 5.0)  # too few to say anything
    assert sizer.num_tokens == before
    for _ in range(40):
        sizer.observe(1000, 0.5)
    assert sizer.num_tokens == pytest.approx(500, abs=1)
    for _ in range(60):
        sizer.observe(1000, 60.0)
    assert sizer.num_tokens == LEAST
    for _ in range(60):
        sizer.observe(1000, 1e-4)
    assert sizer.num_tokens == MOST


def test_a_failed_pass_fails_its_own_requests_alone(model, monkeypatch):
    rng = random.Random(5)
    watched = Watched.of(model, 1000)
    good = row(rng, 5)
    pooler, calls = model.pooler, []

    def failing(*given):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return pooler(*given)

    object.__setattr__(model, "pooler", failing)
    try:
        watched.add("bad", [row(rng, 4), row(rng, 9)])
        watched.loop.turn()
        watched.add("good", [good])
        watched.run()
    finally:
        object.__setattr__(model, "pooler", pooler)
    error = watched.events["bad"].error
    assert isinstance(error, RequestFailedError)
    assert "no memory" in str(error)
    np.testing.assert_allclose(watched.events["good"].pooled[0], alone(model, good), atol=2e-5)
    assert watched.loop.stats()["step_failures"] == 1


WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
IGNORED = WATCHDOG.replace("ImpactingInteractivity", "SubmissionsIgnored")


@pytest.mark.parametrize(("most", "fails"), [(16, False), (9, True)])
def test_rows_of_a_pass_that_the_gpu_stopped_are_computed_in_smaller_ones(model, most, fails):
    """Once: a row that is too large for the GPU fails, and others do not."""
    rng = random.Random(7)
    watched, pooler, sizes = Watched.of(model, 24), model.pooler, []

    def watchdog(hidden, *others):
        sizes.append(len(hidden))
        if len(hidden) > most:
            raise RuntimeError(WATCHDOG)
        return pooler(hidden, *others)

    rows = [row(rng, count) for count in (5, 8, 10)]
    object.__setattr__(model, "pooler", watchdog)
    try:
        watched.add("a", rows)
        watched.add("b", [rows[0]])
        watched.run()
    finally:
        object.__setattr__(model, "pooler", pooler)
    assert sizes[0] > most
    assert max(sizes[1:]) <= 12
    np.testing.assert_allclose(watched.events["b"].pooled[0], alone(model, rows[0]), atol=2e-5)
    if fails:
        assert "Impacting Interactivity" in str(watched.events["a"].error)
        return
    for actual, item in zip(watched.events["a"].pooled, rows, strict=True):
        np.testing.assert_allclose(actual, alone(model, item), atol=2e-5)


def test_a_gpu_that_ignores_the_process_ends_the_loop(model, monkeypatch):
    watched = Watched.of(model)

    def ignored(*_):
        raise RuntimeError(IGNORED)

    monkeypatch.setattr(PoolingLoop, "_made", ignored)
    watched.add("a", [TokenRow([5, 6])])
    with pytest.raises(DeviceLostError) as lost:
        watched.run()
    with pytest.raises(DeviceLostError):
        watched.loop.fail_all(lost.value)
    assert isinstance(watched.events["a"].error, DeviceLostError)


def test_a_fault_of_the_loop_fails_all_and_it_goes_on(model):
    rng = random.Random(6)
    watched = Watched.of(model, 8)
    watched.add("a", [row(rng, 20)])
    watched.add("b", [row(rng, 4)])
    watched.loop.turn()
    watched.loop.fail_all(ValueError("bookkeeping"))
    assert {name: type(e.error) for name, e in watched.events.items()} == {
        "a": RequestFailedError,
        "b": RequestFailedError,
    }
    assert watched.loop.idle
    watched.add("c", [row(rng, 4)])
    watched.run()
    assert watched.events["c"].pooled is not None


def test_vectors_that_are_not_finite_are_an_error(model):
    watched = Watched.of(model)
    pooler = model.pooler
    object.__setattr__(model, "pooler", lambda *given: pooler(*given) * float("nan"))
    try:
        watched.add("a", [TokenRow([5, 6])])
        watched.run()
    finally:
        object.__setattr__(model, "pooler", pooler)
    assert "NaN or infinite" in str(watched.events["a"].error)


def test_limits_name_the_row_at_fault():
    limits = PoolingLimits(vocab_size=10, max_context=3)
    for rows, error, words in (
        ([], InvalidRequestError, "empty"),
        ([[1], []], InvalidRequestError, "input 1 has no tokens"),
        ([[1, 10]], InvalidRequestError, "from 0 to 9"),
        ([[1], [1, 2, 3, 4]], ContextLengthError, "input 1 has 4 tokens"),
    ):
        with pytest.raises(error, match=words):
            limits.check(PoolingRequest("a", [TokenRow(ids) for ids in rows]))


def test_a_row_of_many_slices_is_read_once(model):
    watched = Watched.of(model, 6)
    watched.add("long", [row(random.Random(7), MOST_TOKENS)])
    watched.run()
    stats = watched.loop.stats()
    assert stats["steps"] > 1
    assert (stats["rows_computed"], stats["tokens_computed"]) == (1, MOST_TOKENS)


def test_rows_that_do_not_wait_are_not_held():
    """Short texts never run out here, so that long ones that were taken stay behind them."""
    queue = PassQueue()
    queue.add(waiting([1] * 20))
    for _ in range(300):
        queue.add(waiting([9] + [1] * 9))
        for _ in range(2):
            queue.take(9)
    assert queue.num_waiting < 60
    (of_one,) = queue._queues.values()
    assert len(of_one._by_length) <= 4 * queue.num_waiting
    rows = waiting([5] * 9 + [50])
    other = PassQueue()
    other.add(rows)
    other.discard(rows)
    assert not other._queues


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(8))
def test_tenants_share_passes_by_weight(seed: int) -> None:
    """Both always have rows; their tokens for their weight differ by two passes at most."""
    rng, queue = random.Random(seed), PassQueue()
    tenants = [Tenant("one", rng.choice([0.5, 1, 3])), Tenant("other"), Tenant("third")]
    got: Counter[Tenant] = Counter()
    most, number = 64, 0
    for _ in range(400):
        for tenant, longest in zip(tenants, (60, 5, 100), strict=True):
            while sum(r.request.tenant == tenant for r in queue_rows(queue)) < 30:
                number += 1
                request = PoolingRequest(
                    f"r{number}", [TokenRow([5] * rng.randint(1, longest))], tenant=tenant
                )
                queue.add([WaitingRow(request, 0)])
        taken = queue.take(most)
        assert taken
        for item in taken:
            got[item.request.tenant] += item.num_tokens
        shares = [got[tenant] / tenant.weight for tenant in tenants]
        assert max(shares) - min(shares) <= 200 / min(t.weight for t in tenants), f"seed {seed}"


def queue_rows(queue: PassQueue) -> list[WaitingRow]:
    return [item for part in queue._queues.values() for item in part._by_age if not item.taken]
