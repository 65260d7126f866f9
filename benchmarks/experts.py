"""`bench experts`: a mixture of experts of which a part is in memory, beside the resident model.

A random mixture (4 bits, skewed routers) is run resident, with a half and a quarter of its experts
in memory, and with no more than one token needs, which reads nearly every expert for every token as
a plain memory map of a model larger than memory does. The page cache of the machine would answer
most reads, so a disk of a stated rate is simulated too: reads wait their turn. mlx-lm has nothing
like it: it holds all experts.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.checkpoints import Experts, with_tokenizer
from benchmarks.engines import CLOCKS, Clock
from benchmarks.load import simulated_disk
from benchmarks.tables import Figures
from mlxinfer import LLM
from mlxinfer.bench.report import Report, Table
from mlxinfer.core import SamplingParams
from mlxinfer.layers.streamed_moe import StreamedMoE
from mlxinfer.memory import human_bytes
from mlxinfer.models.language import reachable

GROUP, BITS = 64, 4
SKEW = 0.5  # of the logarithms of the lengths of routers' rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Experts):
    """A random Qwen3-MoE with experts of 4 bits and skewed routers."""

    hidden: int = 1024
    inner: int = 512
    layers: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 2048
    max_context: int = 4096
    experts: int = 64
    chosen: int = 6

    def config(self) -> dict[str, object]:
        """With a format for the experts."""
        return {**Experts.config(self), "quantization": {"group_size": GROUP, "bits": BITS}}

    def tensors(self, *, split: bool) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every tensor, in the order of the file; `split`: each expert by itself, in one piece."""
        rng = np.random.default_rng(0)
        for name, shape in self.shapes().items():
            if ".experts." in name:
                continue
            if len(shape) == 1:
                yield name, np.ones(shape, "f4")
                continue
            scale = (
                1.0 if "embed" in name else 0.05 if "lm_head" in name else 0.5 * shape[1] ** -0.5
            )
            if "mlp.gate" in name:
                scale = np.exp(SKEW * rng.normal(size=(shape[0], 1))) * shape[1] ** -0.5
            yield name, (rng.normal(size=shape) * scale).astype("f4")
        for layer in range(self.layers):
            yield from self._experts(f"model.layers.{layer}.mlp", rng, split=split)

    def _experts(
        self, at: str, rng: np.random.Generator, *, split: bool
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        experts: dict[str, NDArray[Any]] = {}
        for name in ("gate", "up", "down"):
            rows, columns = self.inner, self.hidden
            if name == "down":
                rows, columns = columns, rows
            words = (self.experts, rows, columns * BITS // 32)
            groups = (self.experts, rows, columns // GROUP)
            step = (rng.random(groups) + 0.5) * 0.4 / (2**BITS * columns**0.5)
            experts[f"{name}_proj.weight"] = rng.integers(0, 2**32, words, np.uint32)
            experts[f"{name}_proj.scales"] = step.astype("f4")
            experts[f"{name}_proj.biases"] = (-(2**BITS - 1) / 2 * step).astype("f4")
        if not split:
            yield from ((f"{at}.switch_mlp.{name}", stack) for name, stack in experts.items())
            return
        for expert in range(self.experts):
            for name, stack in experts.items():
                yield f"{at}.experts.{expert}.{name}", stack[expert]

    def write(self, folder: Path, *, split: bool) -> Path:
        """Write a checkpoint of it; returns the folder."""
        with_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(self.config()))
        tensors, header, at = list(self.tensors(split=split)), {}, 0
        for name, array in tensors:  # in this order, which safetensors' own writer would change
            kind, start, at = "U32" if array.dtype == np.uint32 else "F32", at, at + array.nbytes
            header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, at]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, array in tensors:
                out.write(np.ascontiguousarray(array).data)
        return folder


SMALL = Mixture(
    **{"hidden": 128, "inner": 64, "layers": 2, "heads": 2, "kv_heads": 1, "experts": 16}, chosen=4
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the model is run."""

    name: str
    share: float | None  # of the experts in memory; None: all, resident; 0: those of one token
    guesses: bool = True
    split: bool = False


SETTINGS = (
    Setting("resident", None),
    Setting("half", 0.5),
    Setting("half, no guess", 0.5, guesses=False),
    Setting("half, split", 0.5, split=True),
    Setting("quarter", 0.25),
    Setting("quarter, no guess", 0.25, guesses=False),
    Setting("one token's", 0.0, guesses=False),
)


def run(*, runs: int, small: bool, disk: float | None, cpu_time: bool) -> Report:
    """Tokens a second, hit rates and bytes."""
    sizes, tokens = (SMALL, 8) if small else (Mixture(), 16 if disk is None else 32)
    # The page cache answers so soon that guesses change nothing.
    settings = [setting for setting in SETTINGS if small or disk is not None or setting.guesses]
    with TemporaryDirectory() as scratch, ExitStack() as open_models:
        folders = [sizes.write(Path(scratch) / str(n), split=bool(n)) for n in (False, True)]
        open_models.enter_context(simulated_disk(disk))
        models = {
            setting.name: open_models.enter_context(
                open_model(folders[setting.split], setting, sizes)
            )
            for setting in settings
        }
        figures = measure(models, sizes, runs, tokens, CLOCKS[cpu_time])
    table = _table(figures, sizes, disk, "CPU second" if cpu_time else "s")
    return Report("experts", [table], {"settings": figures, "cpu_time": cpu_time, **asdict(sizes)})


def measure(
    models: Mapping[str, LLM], sizes: Mixture, runs: int, tokens: int, clock: Clock
) -> dict[str, Figures]:
    """By setting; they run in turn, so that what else the machine does meets all alike."""
    for llm in models.values():
        decode(llm, 0, sizes, tokens, clock)  # caches are warm
    before = {name: llm.stats().get("experts") for name, llm in models.items()}
    rates: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(1, runs + 1):
        answers = set()
        for name, llm in models.items():
            answer, rate = decode(llm, turn, sizes, tokens, clock)
            answers.add(answer)
            rates[name].append(rate)
        assert len(answers) == 1, "tokens differ"
    return {
        name: {"tokens_per_s": statistics.median(rates[name]), **since(before[name], llm)}
        for name, llm in models.items()
    }


def open_model(folder: Path, setting: Setting, sizes: Mixture) -> LLM:
    """The model as a setting has it."""
    options: dict[str, Any] = {"prefix_cache": False, "speculate": "off", "progress": False}
    if setting.share is None:
        return LLM(folder, max_memory="256MB", **options)
    one = 3 * sizes.hidden * sizes.inner * (BITS / 8 + 8 / GROUP)
    slots = max(setting.share * sizes.experts, sizes.chosen)
    memory = round(slots * sizes.layers * one)
    llm = LLM(folder, expert_memory=memory, slow_experts=True, max_memory="256MB", **options)
    if not setting.guesses:
        llm._session.engine.call(lambda _: _stop_guesses(llm))  # type: ignore[attr-defined]
    return llm


def _stop_guesses(llm: LLM) -> None:
    model = llm._session.engine._loop.model  # type: ignore[attr-defined]
    mixtures = [mixture for layer in model.layers for mixture in reachable(layer, StreamedMoE)]
    for mixture in mixtures:
        mixture.following = None


def decode(
    llm: LLM, turn: int, sizes: Mixture, tokens: int, clock: Clock
) -> tuple[tuple[int, ...], float]:
    """The token ids of an answer to a new prompt, and tokens a second of it without the prompt."""
    rng = np.random.default_rng(turn)
    ids = rng.integers(3, sizes.vocab, 24).tolist()
    first = None
    began = 0.0
    for delta in llm.stream(ids, SamplingParams(max_tokens=tokens, ignore_eos=True)):
        if first is None:
            first, began = delta, clock()
        last = delta
    took = clock() - began
    assert last.result is not None
    return tuple(last.result.token_ids), (tokens - 1) / took


def since(before: dict[str, Any] | None, llm: LLM) -> Figures:
    """Return the counters since the caches were warm."""
    if before is None:
        return {}
    now = llm.stats()["experts"]
    new = {
        key: now[key] - before[key]
        for key in ("hits", "misses", "bytes_read", "tokens", "reads", "guessed", "guessed_right")
    }
    return {
        "hit_rate": new["hits"] / (new["hits"] + new["misses"]),
        "bytes_per_token": new["bytes_read"] / new["tokens"],
        "reads_per_token": new["reads"] / new["tokens"],
        "stall_ms_per_token": 1000 * (now["stall_s"] - before["stall_s"]) / new["tokens"],
        "guessed": new["guessed"],
        "guessed_right": new["guessed_right"],
        "all_bytes": now["all_bytes"],
        "active_bytes_per_token": now["active_bytes_per_token"],
    }


def _table(figures: dict[str, Figures], sizes: Mixture, disk: float | None, unit: str) -> Table:
    resident = figures["resident"]["tokens_per_s"]
    rows = []
    for name, one in figures.items():
        row = [name, f"{one['tokens_per_s']:.1f}", f"{one['tokens_per_s'] / resident:.2f}"]
        if "hit_rate" in one:
            right = f"{one['guessed_right'] / one['guessed']:.0%}" if one["guessed"] else "-"
            row += [
                f"{one['hit_rate']:.1%}",
                human_bytes(one["bytes_per_token"]),
                f"{one['reads_per_token']:.1f}",
                f"{one['stall_ms_per_token']:.2f}",
                f"{one['guessed']:,} ({right})",
            ]
        rows.append(row + ["-"] * (8 - len(row)))
    shown = next(one for one in figures.values() if "hit_rate" in one)
    where = "the page cache" if disk is None else f"a simulated disk of {disk:g} GB/s"
    return Table(
        f"{human_bytes(shown['all_bytes'])} of experts, {sizes.experts} in each of {sizes.layers} "
        f"layers, {sizes.chosen} a token ({human_bytes(shown['active_bytes_per_token'])}), read "
        f"from {where}",
        [
            *("experts in memory", f"tokens/{unit}", "of resident", "in memory", "read a token"),
            "reads", "stall (ms)", "guessed (right)",
        ],
        rows,
        "One request, decoding; prompts of 24 tokens count in all but the rates. The tokens are "
        "the same in all rows. mlx-lm holds all experts.",
    )  # fmt: skip
