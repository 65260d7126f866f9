"""The fused heads of MiMo V2.5: shards of queries, keys and values, whose scales are of a shard."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import check_values, convert, write_tokenizer
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.checkpoints import bf16, f32, write_folder
from oracles.floats import E4M3_VALUES, finite_e4m3, fp4_rows
from speculation.head_names import mtp_tensors

from mlxinfer import LLM
from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import open_source
from mlxinfer.errors import CheckpointError
from mlxinfer.models import load

HEADS, KV_HEADS, DIMS, HIDDEN, BLOCK = 4, (2, 4), (24, 16), 64, (40, 32)
EXACT = "mxfp4 g32", "mxfp4", "exact"
INNER, PROMPT = 32, [5, 9, 7, 30, 12, 5, 9, 7]
CONFIG = {
    **tiny_config("mimo_v2_flash-v4"),
    **{"model_type": "mimo_v2", "num_key_value_heads": 2, "swa_num_key_value_heads": 4},
}
QUANTIZED = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}


def fused(index: int, shards: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The stored arrays of a layer, and the three matrices that they stand for."""
    kv_heads = KV_HEADS[CONFIG["hybrid_layer_pattern"][index]]
    sizes = [HEADS * DIMS[0], *(kv_heads * dim for dim in DIMS)]
    rows = sum(sizes) // shards
    codes = finite_e4m3((sum(sizes), HIDDEN), seed=index)
    blocks = -(-rows // BLOCK[0])
    grid = np.random.default_rng(index).uniform(1e-3, 2e-3, (shards * blocks, 2))
    scales = grid.astype(np.float32)
    of_row = np.concatenate([s * blocks + np.arange(rows) // BLOCK[0] for s in range(shards)])
    values = E4M3_VALUES[codes].astype(np.float32)
    values = values * np.repeat(scales[of_row], BLOCK[1], axis=1)
    parts, start = {}, 0
    for kind, size in zip("qkv", sizes, strict=True):
        pieces = [values[s * rows + start :][: size // shards] for s in range(shards)]
        parts[kind] = np.concatenate(pieces)
        start += size // shards
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": f32(scales)}, parts


def checkpoint(folder: Path, shards: int) -> tuple[Path, dict[str, np.ndarray]]:
    stored: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for name, value in tiny_tensors(tiny_config("mimo_v2_flash-v4"), 0).items():
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            stored[name] = f32(value)
    for index in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{index}.self_attn."
        arrays, parts = fused(index, shards)
        stored |= {f"{path}qkv_proj.{leaf}": array for leaf, array in arrays.items()}
        expected |= {f"{path}{kind}_proj.weight": part for kind, part in parts.items()}
    return write_folder(folder, stored, QUANTIZED, **CONFIG), expected


@pytest.mark.parametrize("shards", [1, 2])
def test_numbers_are_those_of_the_shards(tmp_path: Path, shards: int) -> None:
    """The grid alone says how many there are; in layers with windows 2 and 4 have the same one."""
    folder, expected = checkpoint(tmp_path, shards)
    source = open_source(folder)
    for name, values in expected.items():
        check_values(source, name, values, codes=False)
    arranged = {output.name for output in arrange(source).outputs}
    assert arranged >= set(expected)


def test_a_grid_that_fits_no_number_of_shards_is_refused(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointError, match="fits no number of shards"):
        open_source(folder)


def release(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint as V2.6 is released, with a head that predicts; its experts' numbers by name.

    Experts have codes of four bits, and the heads of attention, the predictor's too, of eight.
    """
    flash = tiny_config("mimo_v2_flash-v4")
    tensors = tiny_tensors(flash, 0)
    tensors |= mtp_tensors(flash, tensors)
    config = {**CONFIG, "num_nextn_predict_layers": 1, "moe_intermediate_size": INNER}
    quantized = {**QUANTIZED, "store_dtype": "mxfp4", "mxfp4_block_size": 32}
    stored: dict[str, Any] = {}
    experts: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        path, kind = name.removesuffix(".weight"), name.split(".")[-2]
        if ".experts." in name:
            shape = (HIDDEN, INNER // 2) if kind == "down_proj" else (INNER, HIDDEN // 2)
            codes, powers = octets(name, shape), octets(name, (shape[0], shape[1] // 16)) % 8 + 120
            stored |= {f"{path}.weight": ("U8", codes), f"{path}.weight_scale": ("U8", powers)}
            steps = np.repeat(np.exp2(powers.astype(float) - 127), 32, axis=1)
            experts[name] = (fp4_rows(codes) * steps).astype(np.float32)
        elif kind == "q_proj":  # the predictor's are those of a layer with a window
            arrays, _ = fused(1 if ".mtp." in name else int(name.split(".")[2]), 2)
            front = path.removesuffix("q_proj")
            stored |= {f"{front}qkv_proj.{leaf}": array for leaf, array in arrays.items()}
        elif kind not in ("k_proj", "v_proj"):
            stored[name] = bf16(value)
    write_folder(folder, stored, quantized, **config)
    write_tokenizer(folder)
    return folder, experts


def octets(name: str, shape: tuple[int, int]) -> np.ndarray:
    seed = [len(name), *name.encode()]
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.ci
def test_experts_of_v2_6_keep_their_codes_and_its_head_proposes(tmp_path: Path) -> None:
    folder, experts = release(tmp_path / "release")
    report = convert(folder, tmp_path / "out", "keep")
    entries = {entry["name"]: entry for entry in report.tensors}
    stacks = [entry for name, entry in entries.items() if ".switch_mlp." in name]
    assert {(e["stored"], e["format"], e["status"]) for e in stacks} == {EXACT}
    assert entries["mtp.layers.0.self_attn.q_proj.weight"]["stored"].startswith("fp8")
    assert max(entry["relative"] for entry in report.tensors) < 0.01
    stack = load(tmp_path / "out").layers[1].mlp.down_proj
    numbers = mx.dequantize(stack.weight, stack.scales, group_size=32, bits=4, mode="mxfp4")
    expected = [experts[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in range(12)]
    assert np.array_equal(np.array(numbers.astype(mx.float32)), np.stack(expected))
    answers = []
    for source in ("off", "mtp"):
        with LLM(tmp_path / "out", speculate=source) as llm:
            answers.append(llm.generate([PROMPT], max_tokens=12)[0].token_ids)
            drafted = llm.stats()["speculation"]["drafted"] if source == "mtp" else 0
    assert answers[0] == answers[1]
    assert drafted > 0
