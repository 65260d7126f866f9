"""`bench host`: CPU time of the main thread for one decode step of both engines.

How much time does a step take beside the model, with one to many requests that all sample
differently? On Apple silicon that time hides behind the GPU while it is short. Metal samples all
rows in one kernel. One operation stands for the kernel in `OneOperation`: its choice means nothing,
but the host does for it what it does on a Mac, except for MLX's call of the kernel.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.checkpoints import TWO_LAYERS, random_prompt, write_checkpoint
from benchmarks.engines import DISPATCH, FORWARD, PLAN, Ask, Engine, Loaded, until_decoding
from benchmarks.tables import SIDES, Figures, medians, named, sides
from mlxinfer.bench.report import Report, Table
from mlxinfer.core import SamplingParams
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.sample import KERNEL
from mlxinfer.metal_kernels.variants import Chosen, Variant, everywhere

PAGE = 16
BLOCK = PAGE  # steps a block: as many as a page has, so that each block seals its share
WARM_BLOCKS = 2  # after a ring of two pages pools and tails are grown, and every size was seen
PROMPT = 20
MIXED = (  # what different users ask for at once; round robin over the requests
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(),
)
GREEDY = (SamplingParams(),)  # all the same, and next to nothing to sample: what is left is books
# What is measured, and the figure of it: its name in the data, in the table.
ROWS = (
    ("without_model", "total_us", "beside the model"),
    ("whole", "python_us", "Python alone"),
    ("whole", "total_us", "with the model"),
    ("in_kernel", "total_us", "sampling kernel"),
    ("greedy", "total_us", "all greedy"),
)


class OneOperation:
    """A device on which the sampling kernel is the quickest choice there is."""

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        """A token for each row, lazy."""
        assert launch.kernel is KERNEL, launch.kernel
        logits, settings, _ = inputs
        return [mx.argmax(mx.depends([logits], [settings])[0], axis=-1).view(mx.int32)]


def only_sampling(variants: Sequence[Variant]) -> Chosen:
    """Chooses the sampling kernel, and no other."""
    return everywhere(variant for variant in variants if variant.kind == "sample")


def measure_block(engine: Engine) -> Figures:
    """Main-thread CPU microseconds of a step, the mean over a block of steps.

    Of which `forward` builds the graph, `plan` makes page tables (mlx-lm's are part of `forward`),
    and `dispatch` hands the graph to the backend. `python` is all but graph and dispatch.
    """
    accounts = engine.meter.seconds
    before = dict(accounts)
    with engine.meter.evaluation():
        started = time.thread_time()
        for _ in range(BLOCK):
            engine.step()
        total = time.thread_time() - started

    by_name = {name: accounts[name] - before.get(name, 0.0) for name in (FORWARD, PLAN, DISPATCH)}
    by_name["python"] = total - by_name[FORWARD] - by_name[DISPATCH]
    return {f"{name}_us": seconds / BLOCK * 1e6 for name, seconds in by_name.items()}


def measure(engines: Sequence[Engine], blocks: int) -> dict[str, Any]:
    """The median cost of each side over blocks that alternate, A B A B."""
    costs: list[list[Figures]] = [[] for _ in engines]
    for block in range(WARM_BLOCKS + blocks):
        for engine, result in zip(engines, costs, strict=True):
            gc.collect()  # what the other side left is not this side's
            cost = measure_block(engine)
            if block >= WARM_BLOCKS:
                result.append(cost)
    return named([_with_total(medians(result)) for result in costs])


def _with_total(cost: Figures) -> Figures:
    total = cost["python_us"] + cost["forward_us"] + cost["dispatch_us"]
    return {"total_us": total, **cost}


def fill(engine: Engine, count: int, settings: Sequence[SamplingParams] = MIXED) -> None:
    """Start `count` requests without an end, with these settings in turn, up to decoding."""
    endless = [replace(setting, max_tokens=None, ignore_eos=True) for setting in settings]
    asks = []
    for index in range(count):
        prompt = random_prompt(PROMPT + index % 8, TWO_LAYERS.vocab, seed=index)
        asks.append(Ask(str(index), [("user", prompt)], endless[index % len(endless)]))
    until_decoding(engine, asks)


def pages_for(count: int, blocks: int) -> int:
    """Pages that `count` requests never outgrow, so that no pool grows while it is measured."""
    tokens = PROMPT + 8 + 2 * (WARM_BLOCKS + blocks + 4) * BLOCK
    return count * (tokens // PAGE + 10)


def decode_cost(loaded: Loaded, count: int, blocks: int) -> dict[str, Any]:
    """Costs of decode steps of `count` requests; all but `whole` are beside the model."""

    def decoding(settings: Sequence[SamplingParams], most: int, **ours: Any) -> list[Engine]:
        pages = pages_for(count, blocks)
        made: Iterator[Engine] = loaded.engines(
            peer_batch=count, max_batch=count, num_pages=pages, **ours
        )
        engines = list(islice(made, most))
        for engine in engines:
            fill(engine, count, settings)
        return engines

    def without_model(engines: Sequence[Engine]) -> dict[str, Any]:
        for engine in engines:
            engine.store_model()
        return measure(engines, blocks)

    mixed = decoding(MIXED, 2)
    whole, beside = measure(mixed, blocks), without_model(mixed)
    with running_on(OneOperation()):
        in_kernel = without_model(decoding(MIXED, 1, kernels=only_sampling))
    return {
        "requests": count,
        "whole": whole,
        "without_model": beside,
        "in_kernel": in_kernel,
        "greedy": without_model(decoding(GREEDY, 2)),
    }


def run(*, requests: Sequence[int], blocks: int, peer: bool) -> Report:
    """Measure every number of requests on a model of two layers."""
    with TemporaryDirectory() as scratch:
        loaded = Loaded.of(write_checkpoint(Path(scratch) / "two", TWO_LAYERS), peer=peer)
    result = [decode_cost(loaded, count, blocks) for count in requests]
    return Report("host", [_decode_table(result)], {"decode": result})


def _decode_table(figures: list[dict[str, Any]]) -> Table:
    """Microseconds for each number of requests, and for each request more."""
    rows = []
    for what, figure, label in ROWS:
        costs = [[side[figure] for side in entry[what].values()] for entry in figures]
        counts = [entry["requests"] for entry in figures]
        for count, cost in zip(counts, costs, strict=True):
            rows.append([label, str(count), *sides(cost)])
        if len(figures) > 1:  # by a straight line through all points
            slopes = np.polyfit(counts, costs, 1)[0].tolist()
            rows.append([label, "each more", *sides(slopes, ",.1f")])
    return Table(
        "Main-thread CPU us of a decode step (two layers, mixed sampling settings)",
        ["", "requests", *SIDES],
        rows,
        "Beside the model: it returns stored logits. Python alone: less the model's graph and less "
        "mx.eval and mx.async_eval. The others are beside the model, too. Sampling kernel: one "
        "operation stands for it. All greedy: next to nothing to sample.",
    )
