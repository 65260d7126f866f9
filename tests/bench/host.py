"""`bench host`: CPU time of the main thread for one decode step of both engines.

How much time does a step take beside the model, with one to many requests that all sample
differently? On Apple silicon that time hides behind the GPU while it is short. Metal samples all
rows in one kernel. One operation stands for the kernel in `OneOperation`: its choice means nothing,
but the host does for it what it does on a Mac, except for MLX's call of the kernel.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table
from mlxinfer.core import SamplingParams
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.sample import KERNEL
from mlxinfer.metal_kernels.variants import Variant
from mlxinfer.models import load
from tests.bench.checkpoints import TWO_LAYERS, random_prompt, write_checkpoint
from tests.bench.engines import (
    DISPATCH,
    FORWARD,
    PLAN,
    Ask,
    Engine,
    OurEngine,
    metered_evaluation,
    until_decoding,
)
from tests.bench.peer import PeerEngine
from tests.bench.tables import NAMES, SIDES, sides


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
MIXED = (  # what different users ask for at once; round robin over the requests
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(),
)
GREEDY = (SamplingParams(),)  # all the same, and next to nothing to sample: what is left is books


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


@dataclass(frozen=True, slots=True)
class Decode:
    """Costs of ours and of mlx-lm with some requests decoding at once."""

    requests: int
    whole: list[StepCost]
    without_model: list[StepCost]  # which returns stored logits: sampling and its dispatch are in
    in_kernel: list[StepCost]  # ours alone, without the model, where a kernel samples
    greedy: list[StepCost]  # as without_model, where all requests are greedy


def measure_block(engine: Engine, count: int) -> StepCost:
    """Take `count` steps."""
    accounts = engine.meter.seconds
    before = dict(accounts)
    with metered_evaluation(engine.meter):
        started = time.thread_time()
        for _ in range(count):
            engine.step()
        total = time.thread_time() - started

    def each(account: str) -> float:
        return (accounts[account] - before.get(account, 0.0)) / count * 1e6

    return StepCost(total / count * 1e6, each(FORWARD), each(PLAN), each(DISPATCH))


def measure(sides: Sequence[Engine], *, blocks: int, block_steps: int = BLOCK) -> list[StepCost]:
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


def fill(
    engine: Engine,
    count: int,
    length: int,
    vocab: int,
    settings: Sequence[SamplingParams] = MIXED,
) -> None:
    """Start `count` requests with these settings in turn and bring them to decoding."""
    asks = []
    for index in range(count):
        prompt = random_prompt(length + index % 8, vocab, seed=index)
        asks.append(Ask(str(index), [("user", prompt)], endless(settings[index % len(settings)])))
    until_decoding(engine, asks)


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

    def ours(count: int, kernels: Chooser = choose_none) -> Engine:
        num_pages = pages_for(count, PROMPT, blocks)
        return OurEngine(model, max_batch=count, num_pages=num_pages, kernels=kernels)

    def both(count: int) -> list[Engine]:
        return [ours(count), *([PeerEngine(peer_model, max_batch=count)] if peer else [])]

    def decoding(sides: list[Engine], count: int, settings: Sequence[SamplingParams]) -> None:
        for side in sides:
            fill(side, count, PROMPT, TWO_LAYERS.vocab, settings)

    def without_model(sides: list[Engine]) -> list[StepCost]:
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


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Microseconds per request, by a straight line through all points."""
    counts, costs = zip(*points, strict=True)
    return float(np.polyfit(counts, costs, 1)[0]) if len(points) > 1 else float("nan")


def run(
    *,
    requests: Sequence[int] = (1, 8, 64, 256),
    blocks: int = 8,
    peer: bool = True,
) -> Report:
    """Measure every number of requests."""
    with TemporaryDirectory() as scratch:
        decode = decode_costs(requests, blocks=blocks, peer=peer, folder=Path(scratch) / "two")
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
    }
    return Report("host", [_decode_table(decode)], data)


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
        rows += [[label, str(decode.requests), *sides(field(decode))] for decode in found]
        if len(found) > 1:
            each = [
                slope([(d.requests, field(d)[side]) for d in found])
                for side in range(len(field(found[0])))
            ]
            rows.append([label, "each more", *sides(each, ",.1f")])
    return Table(
        "Main-thread CPU us of a decode step (two layers, mixed sampling settings)",
        ["", "requests", *SIDES],
        rows,
        "Beside the model: it returns stored logits. Python alone: less the model's graph and less "
        "mx.eval and mx.async_eval. The others are beside the model, too. Sampling kernel: one "
        "operation stands for it. All greedy: next to nothing to sample.",
    )


def _data(costs: list[StepCost]) -> dict[str, Any]:
    return {
        name: {
            "total_us": cost.total,
            "python_us": cost.outside,
            "dispatch_us": cost.dispatch,
        }
        for name, cost in zip(NAMES, costs, strict=False)
    }
