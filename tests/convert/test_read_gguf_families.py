"""Families with other tensors in GGUF files than in checkpoints: the logits are the same."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from models.dense_kv import DenseCache
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.gguf_families import write_family

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import Source, open_source
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import load

IDS = list(range(3, 33))
CASES = (
    "qwen3_5_text-v4",
    "qwen3_5_moe_text-v4",
    "qwen3_next-v4",
    "gemma4_text-v4",
    "gemma4_e-v4",
    "lfm2-v4",
    "lfm2_moe-v4",
    "glm4-v4",
    "glm4_moe-v4",
    "glm4_moe-v5",
    "deepseek_v2-v5",
    "deepseek_v3-v4",
)
CHANGES: dict[str, dict[str, Any]] = {  # what a GGUF file cannot say
    "deepseek_v3-v4": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.6,
            "mscale_all_dim": 0.6,
        }
    },
    "deepseek_v2-v5": {"attention_bias": False},
    "qwen3_next-v4": {"mlp_only_layers": []},
}


def logits(folder: Path) -> np.ndarray:
    model = load(folder)
    return np.array(DenseCache(model).run(model, [("a", IDS)]).astype(mx.float32))


def write_folder(folder: Path, config: dict[str, Any], arrays: dict[str, mx.array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def read(source: Source) -> dict[str, mx.array]:
    arranged = arrange(source)
    return {output.name: arranged.whole(output) for output in arranged.outputs}


def made(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = {**tiny_config(case), **CHANGES.get(case, {})}
    return config, tiny_tensors(config)


@pytest.mark.parametrize(
    ("case", "split_kv"),
    [(case, split) for case in CASES for split in {True, "deepseek" not in case}],
)
def test_a_model_gives_the_logits_that_it_had(tmp_path: Path, case: str, split_kv: bool) -> None:
    config, tensors = made(case)
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    original = write_folder(tmp_path / "hf", config, arrays)
    write_family(tmp_path / "model.gguf", config, tensors, split_kv=split_kv)
    source = open_source(tmp_path / "model.gguf")
    back = write_folder(tmp_path / "back", dict(source.config), read(source))
    expected = logits(original)
    assert np.abs(logits(back) - expected).max() <= 2e-5 * max(1.0, expected.std())
    assert expected.std() > 0.5


def test_what_predicts_further_ahead_is_kept(tmp_path: Path) -> None:
    config, tensors = made("qwen3_5_text-v4")
    layer = next(n.partition(".self_attn")[0] for n in tensors if n.endswith("q_norm.weight"))
    ahead = {
        name.replace(layer, "mtp.layers.0"): values
        for name, values in tensors.items()
        if name.startswith(f"{layer}.")
    }
    hidden = config["hidden_size"]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    ahead |= {f"mtp.{name}.weight": np.full(hidden, 0.25, np.float32) for name in norms}
    ahead["mtp.fc.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    config["mtp_num_hidden_layers"] = 1
    write_family(tmp_path / "model.gguf", config, {**tensors, **ahead}, split_kv=True)
    found = {n: a for n, a in read(open_source(tmp_path / "model.gguf")).items() if "mtp." in n}
    assert set(found) == set(ahead)
    for name, array in found.items():
        np.testing.assert_allclose(np.array(array), ahead[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q6_K, Kind.MXFP4])
def test_quantised_columns_are_put_in_order(tmp_path: Path, kind: Kind) -> None:
    """Inputs of a recurrent layer's output, a value head of 64 or of 32 at a time."""
    config, _ = made("qwen3_5_text-v4")
    config |= {"linear_value_head_dim": 64, "linear_num_value_heads": 8}
    tensors = tiny_tensors(config)
    (name, *_) = (name for name in tensors if name.endswith("linear_attn.out_proj.weight"))
    write_family(tmp_path / "model.gguf", config, tensors, split_kv=True, kinds={name: kind})
    source = open_source(tmp_path / "model.gguf")
    found = np.array(source.read(name))
    error = np.abs(found - tensors[name]).max()
    assert 0 < error < 0.2 * np.abs(tensors[name]).max()
    assert np.array_equal(np.array(source.read(name, slice(5, 9))), found[5:9])
    if kind == Kind.Q6_K:
        return
    packed = source.read_packed(name)
    form = source.tensors[name].lossless
    parts = (packed.weight, packed.scales, packed.biases)
    wide = [p if p is None or p.dtype != mx.float16 else p.astype(mx.float32) for p in parts]
    values = mx.dequantize(*wide, form.group_size, form.bits, form.mode)
    assert np.array_equal(np.array(values.astype(mx.float32)), found)


def test_columns_with_divided_blocks_are_refused(tmp_path: Path) -> None:
    config, _ = made("qwen3_5_text-v4")
    config |= {"linear_value_head_dim": 16, "linear_num_value_heads": 4}
    tensors = tiny_tensors(config)
    (name, *_) = (name for name in tensors if name.endswith("linear_attn.out_proj.weight"))
    write_family(tmp_path / "m.gguf", config, tensors, split_kv=True, kinds={name: Kind.Q8_0})
    with pytest.raises(UnsupportedModelError, match="divides its blocks of 32"):
        open_source(tmp_path / "m.gguf")
