"""Steps sized by time, in simulated time: costs follow from published figures of chips and models.

A step reads its weights and the KV of its sequences, computes its tokens, and launches its layers,
one after the other. No figure here is a measurement of mlxinfer.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine.harness import config, tiny_model

from mlxinfer.cache.inputs import Ints
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.engine import loop as loop_module
from mlxinfer.engine.batch import Batch, CommitResult, Sequence
from mlxinfer.engine.kv_manager import KVManager
from mlxinfer.engine.loop import Loop
from mlxinfer.engine.prefill import MAX_STEP_S, UNTIMED, PrefillSizer, PromptRoom
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.engine.runner import Launched
from mlxinfer.engine.scheduler import Scheduler
from mlxinfer.fair import NOBODY, Tenant

PAGE, MOST, SLICE_S = 16, 2048, 0.25
CHIPS = {  # (float operations, bytes) a second
    "M1 Max": (10.4e12, 400e9),
    "M4 Max": (18.4e12, 546e9),
    "M3 Ultra": (28.4e12, 819e9),
    "M5": (15e12, 153e9),
}
BUSY = 0.75  # share of both that is reached
LAUNCH_S = 65e-6  # a layer


@dataclass(frozen=True)
class SimulatedModel:
    params: float  # that a token is multiplied with
    weight_bytes: float  # that a step of one token reads
    all_bytes: float  # that a step of many tokens reads
    layers: int
    token_bytes: float  # of keys and values, all layers
    attention_flops: float  # of a token for each one that it sees
    tokens_for_all: float = 1.0  # from about so many tokens on, all experts are read


MODELS = {
    "4B": SimulatedModel(4.0e9, 2.3e9, 2.3e9, 36, 147e3, 0.6e6),
    "27B": SimulatedModel(27e9, 15e9, 15e9, 64, 262e3, 1.3e6),
    "35B-A3B": SimulatedModel(3e9, 1.8e9, 19.5e9, 40, 82e3, 0.7e6, tokens_for_all=64),
}
CASES = [(chip, model) for chip in CHIPS for model in MODELS]


@dataclass
class Bench:
    """A scheduler with steps of simulated time."""

    chip: str
    model: str
    slice_s: float | None = SLICE_S
    chunk: int = MOST
    num_stages: int = 1  # with micro-batches; 1: each step is of all rows
    proposer: Proposer | None = None
    max_batch: int = 16
    now_s: float = 0.0
    token_s: dict[str, list[float]] = field(default_factory=dict)  # when each token came
    sizes: list[int] = field(default_factory=list)  # prompt tokens of each step

    def __post_init__(self) -> None:
        group = PageGroup(AttentionWindow(), PageAllocator(1 << 14), PAGE, self.chunk, page_bytes=1)
        self.scheduler = Scheduler(
            KVManager([group], reuse=False),
            max_batch=self.max_batch,
            prefill_chunk=self.chunk,
            prefill_slice_s=self.slice_s,
            num_stages=self.num_stages,
            proposer=self.proposer,
        )

    def add(self, name: str, num_prompt: int, max_tokens: int = 1, tenant: Tenant = NOBODY) -> None:
        first = 1000 * len(self.token_s)
        ids = [first + i % 997 for i in range(num_prompt)]
        request = Request(name, ids, SamplingParams(max_tokens=max_tokens), tenant=tenant)
        self.scheduler.queues.add(request, max_output=max_tokens)
        self.token_s[name] = []

    def seconds(self, batch: Batch) -> float:
        flops, bandwidth = (BUSY * rate for rate in CHIPS[self.chip])
        model, rows = MODELS[self.model], batch.num_tokens
        share = min(1.0, (rows - 1) / model.tokens_for_all)
        read = model.weight_bytes + share * (model.all_bytes - model.weight_bytes)
        computed = 2 * model.params * rows
        starts = batch.decodes.segments.starts
        spans = [(int(start), 1) for start in starts] + [
            (s.start, s.num_tokens) for s in batch.ragged
        ]
        for start, count in spans:
            read += (start + count) * model.token_bytes
            computed += count * (start + count / 2) * model.attention_flops
        return read / bandwidth + computed / flops + LAUNCH_S * model.layers

    def step(self) -> None:
        batch = self.scheduler.next_batch()
        took_s = self.seconds(batch)
        self.now_s += took_s
        self.sizes.append(sum(s.num_tokens for s in batch.ragged))
        self.scheduler.prefill.observe(batch, took_s)
        for sequence in batch.sampling.sequences:
            self.token_s[sequence.request.id].append(self.now_s)
        self.scheduler.commit(batch, [7] * len(batch.sampling))

    def until(self, name: str, count: int = 1) -> float:
        """Run until a request has so many tokens; when its first one came."""
        while len(self.token_s[name]) < count:
            self.step()
        return self.token_s[name][0]

    def run(self, name: str, num_prompt: int, **more: Any) -> float:
        self.add(name, num_prompt, **more)
        return self.until(name)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def seconds_on(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.step()

    def gaps(self, name: str, since_s: float = 0.0) -> list[float]:
        """Between two tokens each, the longest last."""
        times = [at_s for at_s in self.token_s[name] if at_s >= since_s]
        return sorted(after - before for before, after in pairwise(times))

    def longest_gap(self, name: str) -> float:
        return self.gaps(name)[-1]


@pytest.mark.parametrize(("chip", "model"), CASES)
def test_a_stream_waits_for_one_slice_of_a_long_prompt_at_most(chip: str, model: str) -> None:
    bench = Bench(chip, model)
    bench.run("stream", 600, max_tokens=10_000)
    bench.steps(5)
    decode_s = bench.longest_gap("stream")
    bench.run("long", 12_000)
    assert bench.longest_gap("stream") <= 1.2 * max(SLICE_S, decode_s)


@dataclass
class MicroBatchBench(Bench):
    """The same over pipeline stages, with a step of other rows for each, as the loop has them.

    Rank 0 sees the end of steps that give tokens, alone.
    """

    slowness: tuple[float, ...] = (1, 1)  # of each stage, for its part of the layers
    free_s: list[float] = field(default_factory=list)  # when each stage has done its part
    in_flight: deque[tuple[Batch, float, float]] = field(default_factory=deque)
    read_s: float = 0.0  # when the last step was read
    busy_s: float = 0.0  # of the last stage

    def __post_init__(self) -> None:
        self.num_stages, self.free_s = len(self.slowness), [0.0] * len(self.slowness)
        super().__post_init__()

    def busy(self, work: Callable[[], object]) -> float:
        """The share of the work's time in which the last stage computes."""
        start_s, start_busy_s = self.now_s, self.busy_s
        work()
        return (self.busy_s - start_busy_s) / (self.now_s - start_s)

    def step(self) -> None:
        batch = self.scheduler.next_batch()
        if batch is None:
            self.read()
            return
        if batch.writes_pages:  # rank 0's own part of the step before
            self.now_s = max(self.now_s, self.free_s[0])
        part_s, end_s = self.seconds(batch) / len(self.slowness), self.now_s
        if any(s.num_pending > 1 for s in batch.decodes.sequences):  # a token of the step before
            end_s = self.in_flight[-1][2]
        for rank, slowness in enumerate(self.slowness):
            end_s = self.free_s[rank] = max(end_s, self.free_s[rank]) + part_s * slowness
        self.busy_s += part_s * self.slowness[-1]
        self.sizes.append(sum(s.num_tokens for s in batch.ragged))
        self.in_flight.append((batch, self.now_s, end_s))
        while len(self.in_flight) > self.scheduler.max_in_flight(batch):
            self.read()

    def read(self) -> None:
        batch, began_s, end_s = self.in_flight.popleft()
        goes_on = not len(batch.sampling)
        self.now_s = self.now_s if goes_on else max(self.now_s, end_s)
        seconds = self.now_s - max(began_s, self.read_s)
        self.read_s = self.now_s
        self.scheduler.prefill.observe(batch, seconds, on_later_stages=goes_on)
        for sequence in batch.sampling.sequences:
            self.token_s[sequence.request.id].append(self.now_s)
        self.scheduler.commit(batch, [7] * len(batch.sampling))


@pytest.mark.alike
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("slowness", [(1, 1), (1, 1, 1, 1), (1, 1, 2)])
def test_stages_are_busy_and_a_slice_is_what_all_take(
    slowness: tuple[float, ...], num_streams: int
) -> None:
    """While streams run (one alone: one stage at a time), and a long prompt beside them."""
    bench = MicroBatchBench("M4 Max", "27B", slowness=slowness)
    for i in range(num_streams):
        bench.add(str(i), 40, max_tokens=10_000)
    bench.until(str(num_streams - 1))
    share = slowness[-1] / sum(slowness) if num_streams == 1 else 1.0
    assert bench.busy(lambda: bench.seconds_on(3)) == pytest.approx(share, abs=0.01)
    decode_s = bench.longest_gap("0")
    assert bench.busy(lambda: bench.run("long", 12_000)) > 0.89
    assert bench.longest_gap("0") <= 1.2 * max(SLICE_S, decode_s)


class TwoOfThree(Proposer):
    """Three proposals for each row of every step, of which two hold."""

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        assert num_decoding <= 8
        return 3

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        return [Proposal([7, 7, 5]) for _ in sequences]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_are_busy_where_all_steps_verify_proposals(num_stages: int) -> None:
    bench = MicroBatchBench("M4 Max", "27B", slowness=(1,) * num_stages, proposer=TwoOfThree())
    for i in range(8):
        bench.add(str(i), 40, max_tokens=10_000)
    while not all(len(times) > 3 for times in bench.token_s.values()):
        bench.step()
    counters = bench.scheduler.counters
    before, num_steps = counters.tokens_sampled, counters.steps
    assert bench.busy(lambda: bench.seconds_on(3)) == pytest.approx(1.0, abs=0.01)
    tokens = counters.tokens_sampled - before
    assert tokens == pytest.approx(3 * 8 / num_stages * (counters.steps - num_steps), rel=0.1)


@pytest.mark.alike
@pytest.mark.parametrize("slowness", [(1, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize(("chip", "model"), CASES)
def test_slices_are_what_stages_take(chip: str, model: str, slowness: tuple[float, ...]) -> None:
    """Also behind a long prompt alone, of which rank 0 sees its own part in time only."""
    bench = MicroBatchBench(chip, model, slowness=slowness)
    bench.run("first", 12_000)
    bench.run("stream", 100, max_tokens=10_000)
    bench.steps(5)
    decode_s = bench.longest_gap("stream")
    bench.add("long", 8000)
    bench.steps(2 * len(slowness))  # those in flight are small: none was timed
    assert max(bench.sizes[-2 * len(slowness) :]) <= 64 or bench.longest_gap("stream") < SLICE_S
    first_s = bench.longest_gap("stream")
    bench.until("long")
    assert bench.longest_gap("stream") <= 1.2 * max(SLICE_S, decode_s, first_s)


@pytest.mark.parametrize(("chip", "model"), CASES)
def test_a_long_prompt_alone_is_as_quick_as_with_its_best_chunk(chip: str, model: str) -> None:
    def alone(bench: Bench) -> float:
        return bench.run("long", 24_000)

    best = min(alone(Bench(chip, model, None, chunk)) for chunk in (256, 512, 1024, 2048))
    warm = Bench(chip, model)
    began_s = warm.run("first", 4_000)
    assert alone(warm) - began_s <= 1.09 * best  # the best may take longer steps than are safe


@pytest.mark.alike
@pytest.mark.parametrize(("chip", "model"), CASES)
def test_no_step_of_a_long_prompt_alone_takes_many_seconds(chip: str, model: str) -> None:
    bench = Bench(chip, model)
    bench.add("long", 130_000)
    longest_s = 0.0
    while not bench.token_s["long"]:
        before_s = bench.now_s
        bench.step()
        longest_s = max(longest_s, bench.now_s - before_s)
    assert longest_s <= 1.1 * MAX_STEP_S


@pytest.mark.parametrize(("chip", "model"), CASES)
def test_the_first_step_on_an_unknown_machine_is_short(chip: str, model: str) -> None:
    bench = Bench(chip, model)
    bench.add("long", 10_000)
    bench.step()
    assert bench.now_s < 1.0


def test_a_prompt_alone_on_a_slow_machine_has_no_smaller_steps_than_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHIPS, "two busy cores", (0.27e12, 40e9))  # 40 ms a token
    bench = Bench("two busy cores", "4B")
    bench.add("long", 400)
    bench.steps(3)
    assert bench.sizes == [64, 64, 64]
    bench.add("short", 20)
    asked_s = bench.now_s
    assert bench.until("short") - asked_s <= 1.2 * MAX_STEP_S
    bench.until("long")
    assert bench.sizes[-3:] == [64, 64, 48]


@pytest.mark.parametrize(("before", "after"), [(30, 44), (44, 30), (30, 200)])
def test_what_is_known_of_other_lengths_follows_when_a_machine_gets_slower(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """Two steps may be longer than a slice; without a lower bound each of them was."""
    monkeypatch.setitem(CHIPS, "some cores", (12e12, 400e9))
    bench = Bench("some cores", "4B")
    bench.run("stream", 30, max_tokens=10_000)
    for number in range(8):
        bench.run(f"before {number}", before)
    monkeypatch.setitem(CHIPS, "some cores", (1.2e12, 400e9))  # 9 ms a token
    changed_s = bench.now_s
    for number in range(24):
        bench.add(f"after {number}", after)
    for number in range(24):
        bench.until(f"after {number}")
    page_s = PAGE * 2 * MODELS["4B"].params / (BUSY * 1.2e12)
    assert bench.gaps("stream", since_s=changed_s)[-3] <= 1.3 * max(SLICE_S, 2 * page_s)


def test_steps_that_keys_share_grow_to_twice_the_last_one_at_most() -> None:
    """However cheap a token is said to be."""
    bench = Bench("M3 Ultra", "4B")
    bench.run("stream", 30, max_tokens=10_000, tenant=Tenant("light"))
    bench.add("long", 6_000, tenant=Tenant("heavy"))
    bench.step()
    sizer, running = bench.scheduler.prefill, bench.scheduler.queues.running
    (long,) = [sequence for sequence in running if sequence.request.id == "long"]
    room = PromptRoom({Tenant("light"): 1}.keys(), 0.0, 10.0, 10.0)
    ((_, count),) = sizer.shares([long], 2, room)
    assert count == max(2 * bench.sizes[-1], UNTIMED)


def test_a_limit_after_a_stopped_step_rises_again() -> None:
    bench = Bench("M4 Max", "4B")
    bench.run("first", 4000)
    bench.add("long", 40_000)
    batch = bench.scheduler.next_batch()
    bench.scheduler.prefill.halve(batch)
    bench.scheduler.prefill.observe(batch, bench.seconds(batch))
    bench.scheduler.commit(batch, [7] * len(batch.sampling))
    bench.sizes.clear()
    bench.until("long")
    half = batch.num_tokens // 2
    assert max(bench.sizes[:10]) <= half < max(bench.sizes)


def test_slices_are_used_to_most_of_their_length() -> None:
    bench = Bench("M4 Max", "4B")
    bench.run("stream", 600, max_tokens=10_000)
    bench.step()
    bench.run("long", 12_000)
    gaps = bench.gaps("stream")
    assert gaps[len(gaps) // 2] > 0.7 * SLICE_S


def test_a_short_question_passes_a_long_prompt_and_the_long_one_goes_on() -> None:
    bench = Bench("M1 Max", "27B")
    bench.run("stream", 100, max_tokens=10_000)
    bench.add("long", 3_000)
    bench.steps(4)
    bench.add("short", 40)
    asked_s = bench.now_s
    assert bench.until("short") - asked_s < 4 * SLICE_S
    for i in range(60):  # new ones come all the time
        bench.add(f"short {i}", 200)
        bench.step()
    done = bench.sizes[-60:]
    (long,) = [s for s in bench.scheduler.queues.running if s.request.id == "long"]
    before = long.num_computed
    for i in range(20):
        bench.add(f"late {i}", 200)
        bench.step()
    assert long.num_computed - before >= 20 * PAGE
    assert all(done)


def test_a_fixed_chunk_ignores_time() -> None:
    sizes = []
    for chip in ("M5", "M3 Ultra"):
        bench = Bench(chip, "27B", slice_s=None, chunk=256)
        bench.run("stream", 300, max_tokens=50)
        bench.run("long", 1000)
        sizes.append(bench.sizes)
    assert sizes[0] == sizes[1]
    assert set(sizes[0]) <= {256, 128, 44, 104, 0}


def test_nothing_timed_begins_small_beside_a_stream() -> None:
    bench = Bench("M1 Max", "27B")
    bench.run("stream", 100, max_tokens=100)
    bench.scheduler.prefill = PrefillSizer(page_size=PAGE, most=MOST, slice_s=SLICE_S)
    bench.add("long", 1000)
    bench.step()
    assert bench.sizes[-1] == 64


class SimulatedDevice:
    """In the place of a runner: runs steps one after the other, in simulated time.

    Args:
        backlog_s: seconds of work that may be queued when a launch returns: MLX lets a launch wait
            while much is queued, so on the CPU backend it ends with its step.
        row_s: of each row that decodes.
    """

    shared_s, token_s = 0.02, 0.002  # of all rows that decode, and of a prompt token

    def __init__(self, backlog_s: float, row_s: float = 0.0) -> None:
        self._row_s = row_s
        self.now_s, self._backlog_s, self._free_s = 0.0, backlog_s, 0.0
        self.hiccup_s = 0.0  # that the next step with prompts takes more

    def until(self, when_s: float) -> float:
        self.now_s = max(self.now_s, when_s)
        return self.now_s

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        if previous is not None and batch.writes_pages:
            previous.wait()
        decodes = len(batch.decodes.sequences)
        prompts = batch.num_tokens - decodes
        took_s = (self.shared_s + self._row_s * decodes) * (decodes > 0)
        took_s += self.token_s * prompts  # a slice holds 115 tokens
        if batch.ragged:
            took_s, self.hiccup_s = took_s + self.hiccup_s, 0.0
        self._free_s = max(self.now_s, self._free_s) + took_s
        self.until(self._free_s - self._backlog_s)
        return SimulatedStep(batch, None, [], [], device=self, end_s=self._free_s)

    def commit(self, batch: Batch, token_ids: Ints, result: CommitResult) -> None: ...


@dataclass(slots=True, kw_only=True)
class SimulatedStep(Launched):
    device: SimulatedDevice
    end_s: float

    def wait(self) -> None:
        self.ended_s = self.device.until(self.end_s)

    def token_ids(self) -> Ints:
        self.device.until(self.end_s)
        return np.zeros(len(self.batch.sampling), dtype=np.int32)


@pytest.mark.parametrize("backlog_s", [0.0, 0.1, 10.0])
def test_steps_are_timed_by_their_ends(backlog_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device, stream_s = SimulatedDevice(backlog_s), []

    def take(events: list[TokenEvent]) -> None:
        stream_s.extend([device.now_s for event in events if event.request_id == "stream"])

    sizes = config(prefill_chunk=MOST, prefill_slice_s=SLICE_S, num_pages=400)
    loop = Loop(tiny_model("qwen3-v4"), sizes, take)
    loop.runner = device  # type: ignore[assignment]
    clock = SimpleNamespace(monotonic=lambda: device.now_s)
    monkeypatch.setattr(loop_module, "time", clock)
    for name, num_prompt in (("stream", 64), ("long", 2048), ("short 1", 25), ("short 2", 25)):
        device.hiccup_s = 2.0 if name == "long" else 0.0
        request = Request(name, [1] * num_prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
        loop.add(request, loop.limits.check(request))
        for _ in range(1 if name == "long" else 8):
            loop.turn()
    while any(s.num_left > 1 for s in loop.scheduler.queues.running):
        loop.turn()
    *gaps, hiccup_s = sorted([after - before for before, after in pairwise(stream_s)])
    assert hiccup_s > 2
    assert max(gaps) <= 1.2 * SLICE_S
    assert gaps[-8] > 0.7 * SLICE_S  # and the slices are used
