"""`bench gpu`: whole engines on the device that MLX computes on, in turn with mlx-lm's.

Seconds are those of the clock: here waiting for the device is the point. Of each step the CPU time
of the main thread stands beside them, which says whether Python hides behind the device. Weights
are random, in the shapes of published models; Metal kernels of ours do not run on other GPUs,
where plain MLX does their work. What is written down as a figure of a Mac has to be run on one.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from benchmarks.checkpoints import SMALL, Dense, Experts, Llama, random_prompt, write_large
from benchmarks.engines import Ask, Engine, Loaded, OurEngine, PeerEngine, serve, until_decoding
from benchmarks.host import measure_block
from benchmarks.latency import STREAM_PROMPT, scenario
from benchmarks.tables import Figures
from benchmarks.turns import COLUMNS, cells, in_turn
from mlxinfer import convert_model
from mlxinfer.bench.report import Report, Table

LAYERS = {"heads": 16, "kv_heads": 8, "head_dim": 128}
SHAPES: dict[str, Dense] = {
    "Qwen3-0.6B": Dense(hidden=1024, inner=3072, layers=28, vocab=151_936, **LAYERS),
    "Llama-3.1-8B": Llama(
        hidden=4096, inner=14_336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256
    ),
    "mixture of 64 experts": Experts(
        hidden=2048, inner=768, layers=12, vocab=32_000, experts=64, chosen=8, **LAYERS
    ),
}
SMALL_SHAPES = {"small": SMALL}  # MLX has no product of experts in bfloat16 on a CPU
JOINING, ANSWER = 25, 16  # tokens of a prompt that joins, and of answers that are compared
BESIDE = 8  # answers beside which one joins
NEW = random_prompt  # no two prompts of a run share a prefix, but where it says so


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts, tokens before a decode step, and answers at once."""

    prompts: Sequence[int] = (512, 4096, 32_768)
    contexts: Sequence[int] = (16, 4096, 32_768)
    streams: Sequence[int] = (4, 16, 64)
    long: int = 32_768
    prefix: int = 8192
    sharing: int = 16  # requests that share the prefix


SMALL_SIZES = Sizes((64,), (16, 64), (4,), long=256, prefix=128, sharing=4)


@dataclass(frozen=True, slots=True)
class Side:
    """New engines of one side, which measure what the rows say."""

    new: Callable[[], Engine]
    vocab: int
    sizes: Sizes

    def __call__(self, turn: int) -> Figures:
        """All figures of one turn; turn -1 warms up."""
        seeds = iter(range(1000 * (turn + 2), 1000 * (turn + 3)))
        figures: Figures = {}
        for length in self.sizes.prompts:
            ask = Ask.of("prompt", NEW(length, self.vocab, next(seeds)), 1)
            figures[f"prompt of {length:,}: tokens/s"] = length / serve(self.new(), [ask]).seconds
        for length in self.sizes.contexts:
            figures |= self.decode(f"one answer behind {length:,}", 1, length, seeds)
        for count in self.sizes.streams:
            figures |= self.decode(f"{count} answers", count, STREAM_PROMPT, seeds)
        figures |= self.behind() | self.shared(seeds) | self.join(seeds)
        return figures

    def started(self, count: int, length: int, seeds: Iterator[int]) -> Engine:
        """An engine that decodes `count` answers behind prompts of `length` tokens."""
        engine = self.new()
        prompts = [NEW(length, self.vocab, next(seeds)) for _ in range(count)]
        until_decoding(engine, [Ask.of(str(i), prompt) for i, prompt in enumerate(prompts)])
        return engine

    def decode(self, label: str, count: int, length: int, seeds: Iterator[int]) -> Figures:
        """Tokens a second, and of each step the main thread's CPU time as a share of it."""
        engine = self.started(count, length, seeds)
        measure_block(engine)  # pools and tails have grown
        begun = time.perf_counter()
        host = measure_block(engine)
        step_s = (time.perf_counter() - begun) / STEPS
        busy_s = (host["python_us"] + host["forward_us"] + host["dispatch_us"]) / 1e6
        return {f"{label}: tokens/s": count / step_s, f"{label}: host share": busy_s / step_s}

    def behind(self) -> Figures:
        """Short requests that come behind a long prompt, beside a stream."""
        seen = scenario(self.new(), self.new(), self.vocab, self.sizes.long, time.perf_counter)
        name = f"behind a prompt of {self.sizes.long:,}: "
        return {
            name + "first token of short ones (s)": seen["short_first_s"],
            name + "gap of a stream (s)": seen["stream_gap_s"],
            name + "its own first token (s)": seen["long_first_s"],
        }

    def shared(self, seeds: Iterator[int]) -> Figures:
        """Requests that share a prefix, which an earlier request has left in the cache."""
        engine, before = self.new(), NEW(self.sizes.prefix, self.vocab, next(seeds))
        asks = [
            Ask(str(i), [("system", before), ("user", NEW(JOINING, self.vocab, next(seeds)))], ask)
            for i, ask in enumerate([Ask.of("", [], ANSWER).params] * (self.sizes.sharing + 1))
        ]
        serve(engine, asks[:1])
        served = serve(engine, asks[1:])
        name = f"{self.sizes.sharing} requests with a prefix of {self.sizes.prefix:,}: "
        return {
            name + "all answered (s)": served.seconds,
            name + "prompt tokens computed": float(served.computed),
        }

    def join(self, seeds: Iterator[int]) -> Figures:
        """The longest step while a request joins eight streams, and leaves them."""
        engine = self.started(BESIDE, STREAM_PROMPT, seeds)
        usual = [timed(engine)[0] for _ in range(STEPS)]
        engine.submit(Ask.of("joins", NEW(JOINING, self.vocab, next(seeds)), 4))
        steps, ended = [], False
        while not ended:
            seconds, ended = timed(engine)
            steps.append(seconds)
        steps += [timed(engine)[0] for _ in range(4)]
        longest = max(steps) - statistics.median(usual)
        return {"a join and a leave: longest step above the usual (ms)": longest * 1e3}


STEPS = 16  # of a block of host.py


def timed(engine: Engine) -> tuple[float, bool]:
    """Seconds of one step, and whether an answer ended in it."""
    begun = time.perf_counter()
    tokens = engine.step()
    return time.perf_counter() - begun, any(token.finish_reason for token in tokens)


def answers(new: Callable[[], Engine], vocab: int) -> list[list[int]]:
    """Greedy answers to eight prompts at once."""
    asks = [Ask.of(str(i), NEW(64, vocab, i), ANSWER) for i in range(8)]
    return [answer.token_ids for answer in serve(new(), asks).answers.values()]


def measure(folder: Path, sizes: Sizes, *, pairs: int, peer: bool) -> dict[str, Any]:
    """All figures of a model in a folder, and how many answers are equal."""
    loaded = Loaded.of(folder, peer=peer)
    batch = max(*sizes.streams, sizes.sharing, BESIDE + 1)
    makers: dict[str, Callable[[], Engine]] = {
        "mlxinfer": partial(OurEngine, loaded.ours, max_batch=batch)
    }
    if peer:
        makers["mlx-lm"] = partial(PeerEngine, loaded.theirs, max_batch=batch)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    figures = in_turn({side: Side(new, vocab, sizes) for side, new in makers.items()}, pairs)
    ours, *theirs = [answers(new, vocab) for new in makers.values()]
    equal = sum(a == b for a, b in zip(ours, theirs[0], strict=True)) if theirs else None
    return {"runs": figures, "equal_answers": equal, "peak_bytes": mx.get_peak_memory()}


def table(name: str, measured: dict[str, Any], pairs: int) -> Table:
    """A row for each figure of a model."""
    runs = measured["runs"]
    rows = [
        [label, *cells(runs, label, ",.3g", higher="tokens/s" in label)]
        for label in runs["mlxinfer"][0]
    ]
    note = f"Seconds of the clock, medians of {pairs} pairs in turn on {mx.default_device()}."
    if measured["equal_answers"] is not None:
        note += f" {measured['equal_answers']} of 8 greedy answers are the same tokens."
    return Table(name, ["", *COLUMNS], rows, note)


def run(*, folder: Sequence[Path], only: str, pairs: int, small: bool, peer: bool) -> Report:
    """Measure random models and the models in `folder`.

    Of the random models those whose name contains `only`.

    A random model lies on the disk while it is measured, and no longer.
    """
    shapes: Mapping[str, Dense] = SMALL_SHAPES if small else SHAPES
    sizes = SMALL_SIZES if small else Sizes()
    data: dict[str, Any] = {}
    for name in [name for name in shapes if only in name]:
        with TemporaryDirectory() as scratch:
            random, converted = Path(scratch) / "random", Path(scratch) / "4 bits"
            random.mkdir()
            write_large(random, shapes[name])
            data[f"{name}, bfloat16"] = measure(random, sizes, pairs=pairs, peer=peer)
            convert_model(random, converted, calibration=None, check=False)
            data[f"{name}, 4 bits"] = measure(converted, sizes, pairs=pairs, peer=peer)
    data |= {one.name: measure(one, sizes, pairs=pairs, peer=peer) for one in folder}
    tables = [table(name, measured, pairs) for name, measured in data.items()]
    return Report("gpu", tables, {"device": str(mx.default_device()), "models": data})
