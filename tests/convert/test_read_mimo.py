"""The fused heads of MiMo V2.5: shards of queries, keys and values, whose scales are of a shard."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.checkpoints import f32, write_folder
from oracles.floats import E4M3_VALUES, finite_e4m3

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import open_source
from mlxinfer.errors import CheckpointError

HEADS, KV_HEADS, DIMS, HIDDEN, BLOCK = 4, (2, 4), (24, 16), 64, (40, 32)
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
        assert np.array_equal(np.array(source.read(name)), values), name
        some = slice(len(values) // 3, len(values) - 5)
        assert np.array_equal(np.array(source.read(name, some)), values[some]), name
    arranged = {output.name for output in arrange(source).outputs}
    assert arranged >= set(expected)


def test_a_grid_that_fits_no_number_of_shards_is_refused(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointError, match="fits no number of shards"):
        open_source(folder)
