"""`bench host`: what the main thread does for one decode step. Knows both engines as drivers.

Two questions. How much CPU time does a step take beside the model, with one to many requests that
all sample differently? And how long does it take to build the graph of a deep model's step? On
Apple silicon the first hides behind the GPU while it is short, and the second is the floor under
small models. Metal samples all rows in one kernel; one operation stands for it in `OneOperation`:
its choice means nothing, but the host does for it what it does on a Mac, except for MLX's call of
the kernel.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.core import SamplingParams
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.sample import KERNEL
from mlxinfer.metal_kernels.variants import Variant
from mlxinfer.models import load
from tests.bench.checkpoints import MANY_LAYERS, TWO_LAYERS, Dense, random_prompt, write_checkpoint
from tests.bench.driver import (
    DISPATCH,
    FORWARD,
    PLAN,
    Driver,
    Meter,
    OurDriver,
    counted_operations,
    metered_evaluation,
)
from tests.bench.peer import PeerDriver, PeerStream


class OneOperation:
    """A device on which the sampling kernel is the quickest choice there is."""

    def run(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        """A token for each row, lazy."""
        assert launch.kernel is KERNEL, launch.kernel
        logits, settings, _ = inputs
        return [mx.argmax(mx.depends([logits], [settings])[0], axis=-1).view(mx.int32)]


def only_sampling(variants: Sequence[Variant]) -> frozenset[Variant]:
    """Chooses the sampling kernel, and no other."""
    return frozenset(variant for variant in variants if variant.kind == "sample")


PAGE = 16
BLOCK = PAGE  # steps a block: as many as a page has, so that each block seals its share
WARM_BLOCKS = (
    2  # pools and tails are grown, and every page size was seen, after a ring of two pages
)
PROMPT = 20
NAMES = ("mlxinfer", "mlx-lm")
CONTEXT = 100  # tokens before the deep model's step: several sealed pages and a tail
MIXED = (  # what different users ask for at once; round robin over the requests
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(),
)
GREEDY = (SamplingParams(),)  # all the same, and next to nothing to sample: what is left is books


class Steps(Protocol):
    """Something that takes decode steps, with a meter."""

    meter: Meter

    def step(self) -> list[str]:
        """Take one."""
        ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """Main-thread CPU microseconds of one decode step, the mean over a block of steps."""

    total: float
    forward: float  # building the graph
    plan: float  # of which page tables; mlx-lm's are part of `forward`
    dispatch: float  # handing the graph to the backend

    @property
    def outside(self) -> float:
        """Everything but graph and dispatch: scheduling, sampling, reading tokens, page tables."""
        return self.total - self.forward - self.dispatch

    @property
    def build(self) -> float:
        """Everything that the model's graph needs."""
        return self.forward + self.plan


@dataclass(frozen=True, slots=True)
class Decode:
    """Costs of ours and of mlx-lm with some requests decoding at once."""

    requests: int
    whole: list[StepCost]
    without_model: list[StepCost]  # which returns stored logits: sampling and its dispatch are in
    in_kernel: list[StepCost]  # ours alone, without the model, where a kernel samples
    greedy: list[StepCost]  # as without_model, where all requests are greedy


@dataclass(frozen=True, slots=True)
class Build:
    """The graph of a step of a deep model, ours and mlx-lm's, with some requests decoding."""

    requests: int
    costs: list[StepCost]
    operations: list[int]


def measure_block(steps: Steps, count: int) -> StepCost:
    """Take `count` steps."""
    accounts = steps.meter.seconds
    before = dict(accounts)
    with metered_evaluation(steps.meter):
        started = time.thread_time()
        for _ in range(count):
            steps.step()
        total = time.thread_time() - started

    def each(account: str) -> float:
        return (accounts[account] - before.get(account, 0.0)) / count * 1e6

    return StepCost(total / count * 1e6, each(FORWARD), each(PLAN), each(DISPATCH))


def measure(sides: Sequence[Steps], *, blocks: int, block_steps: int = BLOCK) -> list[StepCost]:
    """The median cost of each side over blocks that alternate, A B A B."""
    costs: list[list[StepCost]] = [[] for _ in sides]
    for block in range(WARM_BLOCKS + blocks):
        for side, found in zip(sides, costs, strict=True):
            gc.collect()  # what the other side left is not this side's
            cost = measure_block(side, block_steps)
            if block >= WARM_BLOCKS:
                found.append(cost)
    return [_median_of(found) for found in costs]


def _median_of(costs: Sequence[StepCost]) -> StepCost:
    """The block with the median cost outside the forward pass, with the medians of the rest."""

    def middle(field: Callable[[StepCost], float]) -> float:
        return statistics.median(field(cost) for cost in costs)

    forward, dispatch = middle(lambda c: c.forward), middle(lambda c: c.dispatch)
    outside = middle(lambda c: c.outside)
    return StepCost(outside + forward + dispatch, forward, middle(lambda c: c.plan), dispatch)


def until_decoding(driver: Driver, names: set[str]) -> None:
    """Step until every request has a token: no prefill is left."""
    while names:
        names = names.difference(driver.step())


def fill(
    driver: Driver,
    count: int,
    length: int,
    vocab: int,
    settings: Sequence[SamplingParams] = MIXED,
) -> None:
    """Start `count` requests with these settings in turn and bring them to decoding."""
    names = {str(index) for index in range(count)}
    for index in range(count):
        params = settings[index % len(settings)]
        prompt = random_prompt(length + index % 8, vocab, seed=index)
        driver.add(str(index), prompt, endless(params))
    until_decoding(driver, names)


def endless(params: SamplingParams) -> SamplingParams:
    """The same settings without an end."""
    return replace(params, max_tokens=None, ignore_eos=True)


def pages_for(count: int, length: int, blocks: int) -> int:
    """Pages that `count` requests never outgrow, so that no pool grows while it is measured."""
    tokens = length + 8 + 2 * (WARM_BLOCKS + blocks + 4) * BLOCK
    return count * (tokens // PAGE + 10)


def decode_costs(sizes: Sequence[int], *, blocks: int, peer: bool, folder: Path) -> "list[Decode]":
    """Costs of decode steps over a model of two layers."""
    write_checkpoint(folder, TWO_LAYERS)
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None

    def ours(count: int, kernels: Chooser = choose_none) -> Driver:
        num_pages = pages_for(count, PROMPT, blocks)
        return OurDriver(model, max_batch=count, num_pages=num_pages, kernels=kernels)

    def both(count: int) -> list[Driver]:
        return [ours(count), *([PeerDriver(peer_model, max_batch=count)] if peer else [])]

    def decoding(sides: list[Driver], count: int, settings: Sequence[SamplingParams]) -> None:
        for side in sides:
            fill(side, count, PROMPT, TWO_LAYERS.vocab, settings)

    def without_model(sides: list[Driver]) -> list[StepCost]:
        for side in sides:
            side.store_model()
        return measure(sides, blocks=blocks)

    found: list[Decode] = []
    for count in sizes:
        decoding(mixed := both(count), count, MIXED)
        whole = measure(mixed, blocks=blocks)
        beside = without_model(mixed)
        with running_on(OneOperation()):
            decoding(sampled := [ours(count, only_sampling)], count, MIXED)
            in_kernel = without_model(sampled)
        decoding(greedy := both(count), count, GREEDY)
        found.append(Decode(count, whole, beside, in_kernel, without_model(greedy)))
    return found


def build_costs(
    sizes: Sequence[int], *, blocks: int, peer: bool, folder: Path, dense: Dense = MANY_LAYERS
) -> list[Build]:
    """The graph of one greedy step of a deep model."""
    write_checkpoint(folder, dense)
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None
    found = []
    for count in sizes:
        prompts = [random_prompt(CONTEXT, dense.vocab, seed=index) for index in range(count)]
        ours = OurDriver(model, max_batch=count, num_pages=pages_for(count, CONTEXT, blocks))
        for index, prompt in enumerate(prompts):
            ours.add(str(index), prompt, endless(SamplingParams()))
        until_decoding(ours, {str(index) for index in range(count)})
        sides: list[Steps] = [ours]
        if peer:
            sides.append(PeerStream(peer_model, prompts))
        costs = measure(sides, blocks=blocks)
        found.append(Build(count, costs, [operations_of(side) for side in sides]))
    return found


def operations_of(side: Steps) -> int:
    """How many operations the graph of a step has."""
    with counted_operations() as counts:
        side.step()
    return max(counts)


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Microseconds per request, by a straight line through all points."""
    counts, costs = zip(*points, strict=True)
    return float(np.polyfit(counts, costs, 1)[0]) if len(points) > 1 else float("nan")


def run(
    *,
    requests: Sequence[int] = (1, 8, 64, 256),
    build_sizes: Sequence[int] = (1, 8),
    blocks: int = 8,
    peer: bool = True,
) -> Report:
    """Both parts."""
    with TemporaryDirectory() as scratch:
        decode = decode_costs(requests, blocks=blocks, peer=peer, folder=Path(scratch) / "two")
        build = build_costs(build_sizes, blocks=blocks, peer=peer, folder=Path(scratch) / "many")
    data = {
        "decode": [
            {
                "requests": d.requests,
                "whole": _data(d.whole),
                "without_model": _data(d.without_model),
                "in_kernel": _data(d.in_kernel),
                "greedy": _data(d.greedy),
            }
            for d in decode
        ],
        "build": [
            {
                "requests": b.requests,
                "operations": dict(zip(NAMES, b.operations, strict=False)),
                **_data(b.costs),
            }
            for b in build
        ],
    }
    return Report("host", [_decode_table(decode), _build_table(build)], data)


def _decode_table(found: list[Decode]) -> Table:
    """Microseconds for each number of requests, and for each request more."""
    kinds: list[tuple[str, Callable[[Decode], list[float]]]] = [
        ("beside the model", lambda d: [c.total for c in d.without_model]),
        ("Python alone", lambda d: [c.outside for c in d.whole]),
        ("with the model", lambda d: [c.total for c in d.whole]),
        ("sampling kernel", lambda d: [c.total for c in d.in_kernel]),
        ("all greedy", lambda d: [c.total for c in d.greedy]),
    ]
    rows = []
    for label, field in kinds:
        rows += [[label, str(decode.requests), *_pair(field(decode))] for decode in found]
        if len(found) > 1:
            each = [
                slope([(d.requests, field(d)[side]) for d in found])
                for side in range(len(field(found[0])))
            ]
            rows.append([label, "each more", *_pair(each, digits=1)])
    return Table(
        "Main-thread CPU us of a decode step (two layers, mixed sampling settings)",
        ["", "requests", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        "Beside the model: it returns stored logits. Python alone: less the model's graph and less "
        "mx.eval and mx.async_eval. The others are beside the model, too. Sampling kernel: one "
        "operation stands for it. All greedy: next to nothing to sample.",
    )


def _build_table(found: list[Build]) -> Table:
    kinds: list[tuple[str, Callable[[Build], Sequence[float]]]] = [
        ("build, us", lambda b: [c.build for c in b.costs]),
        ("dispatch, us", lambda b: [c.dispatch for c in b.costs]),
        ("operations", lambda b: b.operations),
    ]
    rows = [[label, str(b.requests), *_pair(field(b))] for label, field in kinds for b in found]
    return Table(
        f"The graph of one step, {MANY_LAYERS.layers} layers: main-thread CPU us, and its size",
        ["", "requests", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        f"After {CONTEXT} tokens; with page tables, attention, cache writes and logits.",
    )


def _pair(values: Sequence[float], *, digits: int = 0) -> list[str]:
    """Ours, theirs and how many times less ours is."""
    ours = f"{values[0]:,.{digits}f}"
    if len(values) == 1:
        return [ours, "-", "-"]
    return [ours, f"{values[1]:,.{digits}f}", ratio(values[1], values[0])]


def _data(costs: list[StepCost]) -> dict[str, Any]:
    return {
        name: {
            "total_us": cost.total,
            "python_us": cost.outside,
            "build_us": cost.build,
            "dispatch_us": cost.dispatch,
        }
        for name, cost in zip(NAMES, costs, strict=False)
    }
