"""Damaged and hostile files: our errors and no others, soon, and in little memory.

Each case is a seed: `attempt(corpus, seed)` does it again.
"""

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from models.random_weights import tiny_tensors
from models.tiny import tiny_checkpoint, tiny_config
from oracles.checkpoints import f32, write_folder
from oracles.floats import finite_e4m3
from oracles.gguf_files import write_model
from oracles.integers import awq_gemm, gptq, pack_columns
from oracles.mutate import mutate_bytes, mutate_json

from mlxinfer.convert.read import expert_groups, open_source
from mlxinfer.errors import MlxinferError

MAX_SECONDS = 5.0
MAX_BYTES = 64 << 20
QUICK, ALL = 400, 2000


@dataclass
class Corpus:
    """Sound checkpoints: what to open, and which of its files to damage."""

    sources: list[Path]
    damaged: list[Path]


def sources(folder: Path) -> Corpus:
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (64, 32)), rng.integers(0, 16, (2, 32))
    scales = np.ones((2, 32))
    packed = pack_columns(codes.T, 4).view(np.int32)
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "awq": (
            awq_gemm(codes, zeros, scales),
            {"quant_method": "awq", "bits": 4, "group_size": 32},
        ),
        "gptq": (
            gptq(codes, zeros, scales, np.arange(64) // 32, 4, 1),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        ),
        "fp8": (
            {"weight": ("F8_E4M3", finite_e4m3((64, 64), 1)), "weight_scale_inv": f32([[0.25]])},
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        ),
        "packed": (
            {
                "weight_packed": ("I32", packed),
                "weight_scale": f32(scales.T),
                "weight_shape": ("I64", np.array([32, 64])),
            },
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
        ),
    }
    sources = []
    for name, (leaves, how) in kinds.items():
        tensors = {f"model.layers.0.mlp.up_proj.{leaf}": stored for leaf, stored in leaves.items()}
        sources.append(write_folder(folder / name, tensors, how))
    sources.append(tiny_checkpoint(folder / "oss", "gpt_oss"))
    sources.append(tiny_checkpoint(folder / "mlx", "qwen3", quantize={"bits": 4, "group_size": 32}))
    for place in sources:
        (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
        names = {"a": "model-00001-of-00001.safetensors"}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    files = [path for place in sources for path in sorted(place.iterdir())]
    ggufs = [gguf_model(folder / f"{case}.gguf", case) for case in ("llama-v4", "gpt_oss-v4")]
    return Corpus([*sources, *ggufs], [*files, *ggufs * 6])


def gguf_model(path: Path, case: str) -> Path:
    kinds = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.0.attn_k.weight": Kind.Q5_1}
    tokenizer = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [*"abcdefgh", "ab", "<s>"],
        "types": [1] * 9 + [3],
        "merges": ["a b"],
        "ids": {"bos": 9},
    }
    config = {**tiny_config(case), "num_hidden_layers": 2}
    write_model(path, config, tiny_tensors(config), kinds=kinds, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return sources(tmp_path_factory.mktemp("corpus"))


def damage(path: Path, seed: int) -> bytes:
    rng = random.Random(seed)
    data = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.8:
        return json.dumps(mutate_json(json.loads(data), rng)).encode()
    if path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        if rng.random() < 0.5:
            header = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), rng)).encode()
            return len(header).to_bytes(8, "little") + header + data[8 + length :]
        return mutate_bytes(data, 8 + length, rng)
    return mutate_bytes(data, 3000, rng)


def read_all(path: Path) -> None:
    """Whatever a conversion might do with a source."""
    source = open_source(path)
    for name, info in source.tensors.items():
        values = source.read(name)
        assert values.shape == info.shape
        if info.lossless is not None:
            source.read_packed(name)
    expert_groups(source.tensors)
    source.side_files()


def attempt(corpus: Corpus, seed: int) -> bool:
    """Damage one file and read its source. Returns whether that went through without an error."""
    path = corpus.damaged[seed % len(corpus.damaged)]
    sound = path.read_bytes()
    path.write_bytes(damage(path, seed))
    tracemalloc.start()
    began = time.process_time()
    try:
        read_all(path if path.suffix == ".gguf" else path.parent)
    except MlxinferError:
        return False
    except BaseException:
        print(f"seed {seed}, {path.name} of {path.parent.name}")
        raise
    finally:
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        path.write_bytes(sound)
        assert seconds < MAX_SECONDS, (seed, seconds)
        assert peak < MAX_BYTES, (seed, peak)
    return True


def test_sound_sources_are_read(corpus: Corpus) -> None:
    for path in corpus.sources:
        read_all(path)


@pytest.mark.filterwarnings("ignore:.*does not say how its tokenizer cuts text")
@pytest.mark.parametrize(
    "seeds",
    [range(QUICK), pytest.param(range(QUICK, QUICK + ALL), marks=pytest.mark.slow)],
    ids=len,
)
def test_only_our_errors_come_out(corpus: Corpus, seeds: range) -> None:
    passed = sum(attempt(corpus, seed) for seed in seeds)
    assert len(seeds) // 20 < passed < len(seeds) // 2  # both ways were taken, often


def huge(**header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a shape of petabytes": lambda: huge(
        a={"dtype": "F32", "shape": [2**30, 2**20], "data_offsets": [0, 2**52]}
    ),
    "a shape without data": lambda: huge(
        a={"dtype": "F32", "shape": [0, 2**31], "data_offsets": [0, 0]}
    ),
    "deep nesting": lambda: (200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_safetensors_are_refused(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path, {"a": f32([1.0])})
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[case]())
    with pytest.raises(MlxinferError):
        read_all(tmp_path)


@pytest.mark.filterwarnings("ignore:.*does not say how its tokenizer cuts text")
def test_false_lengths_of_a_gguf_are_errors_and_take_no_memory(tmp_path: Path) -> None:
    """Every length in the header says that there is far more than there is."""
    path = gguf_model(tmp_path / "m.gguf", "llama-v4")
    sound = path.read_bytes()
    for place in range(8, 1200, 4):
        path.write_bytes(sound[:place] + (2**62).to_bytes(8, "little") + sound[place + 8 :])
        try:
            open_source(path)
        except MlxinferError:
            continue
