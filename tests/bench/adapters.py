"""`bench adapters`: eight requests at once without adapters, with one for all, with one each.

A random dense model of some 30M weights, float32 and of 4 bits, and LoRA of rank 16 on every
projection. mlx-lm has one adapter at a time, which all of its requests share.
"""

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer import LLM, hub
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.core import SamplingParams
from tests.bench.checkpoints import Dense, write_checkpoint
from tests.bench.serve import TOKENIZER

REQUESTS, RANK = 8, 16
KINDS = ("no adapter", "one for all", "one each")
SIZES: dict[str, int] = {
    "hidden": 512,
    "inner": 1536,
    "layers": 8,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
}
SMALL = {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}


def run(*, runs: int = 5, small: bool = False, peer: bool = True, cpu_time: bool = False) -> Report:
    """Answer tokens a second of eight requests."""
    sizes, tokens = Dense(vocab=2048, **(SMALL if small else SIZES)), 8 if small else 48
    clock = time.process_time if cpu_time else time.perf_counter
    data: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        for name, bits in (("float32", None), ("4 bits", 4)):
            folder = write_checkpoint(Path(scratch) / name, sizes)
            for file in TOKENIZER:
                shutil.copyfile(hub.resolve("demo") / file, folder / file)
            if bits:
                _quantise(folder, bits)
            adapters = [_adapter(Path(scratch) / f"{name} {i}", sizes, i) for i in range(REQUESTS)]
            found = _ours(folder, adapters, sizes.vocab, runs, tokens, clock)
            if peer:
                found["mlx-lm"] = _theirs(folder, adapters[0], sizes.vocab, runs, tokens, clock)
            data[name] = found
    seconds = "CPU second" if cpu_time else "second"
    return Report("adapters", [_table(data, seconds)], data)


def _quantise(folder: Path, bits: int) -> None:
    file, how = folder / "model.safetensors", {"group_size": 64, "bits": bits}
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    for name in [name for name, array in arrays.items() if array.ndim == 2]:
        packed = mx.quantize(arrays[name], how["group_size"], how["bits"])
        for part, array in zip(("weight", "scales", "biases"), packed, strict=True):
            arrays[name.replace("weight", part)] = array
    mx.save_safetensors(str(file), arrays)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": how}))


def _adapter(folder: Path, sizes: Dense, seed: int) -> Path:
    """LoRA on all projections, in mlx-lm's layout, which both sides read."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, shape in sizes.shapes().items():
        if "_proj" in name:
            path = name.removesuffix(".weight")
            a = rng.normal(size=(shape[1], RANK)) * shape[1] ** -0.5
            arrays[f"{path}.lora_a"] = mx.array(a.astype("f4"))
            b = rng.normal(size=(RANK, shape[0])) * 0.02
            arrays[f"{path}.lora_b"] = mx.array(b.astype("f4"))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    lora = {"rank": RANK, "scale": 2.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _prompts(vocab: int) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(1, vocab) for _ in range(24)] for _ in range(REQUESTS)]


def _ours(
    folder: Path,
    adapters: list[Path],
    vocab: int,
    runs: int,
    tokens: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Tokens a second of each kind, in turn: what else the machine does meets all alike."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with LLM(folder, prefix_cache=False, speculate="off", progress=False) as llm:
        for i, adapter in enumerate(adapters):
            llm.load_adapter(str(i), adapter)
        own = {KINDS[0]: None, KINDS[1]: "0", KINDS[2]: [str(i) for i in range(REQUESTS)]}
        for turn in range(runs + 1):
            for kind, names in own.items():
                began = clock()
                llm.generate(_prompts(vocab), params, adapter=names)
                if turn:
                    rates[kind].append(REQUESTS * tokens / (clock() - began))
    return {kind: statistics.median(found) for kind, found in rates.items()}


def _theirs(
    folder: Path,
    adapter: Path,
    vocab: int,
    runs: int,
    tokens: int,
    clock: Callable[[], float],
) -> float:
    generation, rates = PeerGeneration(folder, adapter=adapter), []
    for turn in range(runs + 1):
        began = clock()
        generation.token_times(_prompts(vocab), tokens)
        if turn:
            rates.append(REQUESTS * tokens / (clock() - began))
    return statistics.median(rates)


def _table(data: dict[str, Any], seconds: str) -> Table:
    rows = []
    for name, found in data.items():
        plain = found[KINDS[0]]
        row = [name, *(f"{found[kind]:,.0f}" for kind in KINDS)]
        row += [ratio(found[kind], plain) for kind in KINDS[1:]]
        if "mlx-lm" in found:
            row += [f"{found['mlx-lm']:,.0f}"]
        rows.append(row)
    columns = ["weights", *KINDS, "one for all / none", "one each / none", "mlx-lm, one for all"]
    return Table(
        f"Eight requests at once, LoRA of rank {RANK}: answer tokens a {seconds}",
        columns[: len(rows[0])],
        rows,
        "Prompts of 24 tokens are counted in; every projection has an adapter.",
    )
