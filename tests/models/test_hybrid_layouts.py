"""Checkpoints of hybrids in every layout that is published: the same model from each."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import logits
from models.expert_layouts import stacked
from models.puzzle import FEW, puzzle, with_fewer_experts
from models.tiny import arrays_of, quantized, tiny_config, write

from mlxinfer.errors import CheckpointError
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

CASES = ("qwen3_next-v4", "qwen3_5_text-v5", "qwen3_5_moe_text-v4")
Tensors = dict[str, mx.array]


def tensors_of(case: str) -> Tensors:
    return arrays_of(tiny_config(case))


def loaded(folder: Path, config: dict, tensors: Tensors) -> Model:
    return load(write(folder, config, tensors))


def packed(tensors: Tensors) -> Tensors:
    """Experts as two stacks, as the hub has them of Qwen 3.5."""
    result = stacked(tensors)
    for name in [name for name in result if name.endswith(".switch_mlp.gate_proj.weight")]:
        path = name.removesuffix(".switch_mlp.gate_proj.weight")
        gate, up, down = (
            result.pop(f"{path}.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        result[f"{path}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        result[f"{path}.experts.down_proj"] = down
    return result


@pytest.mark.parametrize(
    "case", ["flint-v4", "kolibri1-v4", "xing4_0-v4", "glm4_moe-v4", "qwen3_moe-v5"]
)
def test_experts_as_transformers_holds_them(tmp_path: Path, case: str) -> None:
    """Two stacks without ".weight", which some tools save, in place of a matrix an expert."""
    config, tensors = tiny_config(case), tensors_of(case)
    held = packed(tensors)
    assert len(held) < len(tensors)
    theirs = {".softmax_offset": ".sinks", ".post_ffn_norm.": ".post_mlp_layernorm."}
    for old, new in theirs.items():
        held = {name.replace(old, new): array for name, array in held.items()}
    expected = logits(loaded(tmp_path / "hub", config, tensors))
    np.testing.assert_allclose(logits(loaded(tmp_path / "held", config, held)), expected, atol=1e-5)


def of_mlx(tensors: Tensors) -> Tensors:
    """As mlx-lm writes them: norm weights whole, convolutions transposed, experts stacked."""
    result: Tensors = {}
    for name, array in tensors.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + 1.0
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        result[name] = array
    return stacked(result)


def prefixed(tensors: Tensors, layout: str) -> Tensors:
    """The language model inside of a multimodal one, beside tensors that are not its own."""
    inner, outer = {
        "hub": ("model.language_model.", ""),
        "mlx": ("language_model.model.", "language_model."),
    }[layout]
    renamed = {
        inner + name.removeprefix("model.") if name.startswith("model.") else outer + name: array
        for name, array in tensors.items()
    }
    hearing = "model.audio_tower." if layout == "hub" else "audio_tower."
    others = (f"{hearing}blocks.0.attn.qkv.weight", f"{outer}mtp.layers.0.mlp.gate.weight")
    return renamed | {name: mx.zeros((2, 2)) for name in others}


def nested(config: dict) -> dict:
    outer = {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": {k: v for k, v in config.items() if k != "tie_word_embeddings"},
        "vision_config": {"model_type": "qwen3_5", "hidden_size": 8},
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    return outer


def test_stacks_of_experts_with_inputs_first(tmp_path: Path) -> None:
    """As Qwen3-VL has them on the hub."""
    config, tensors = tiny_config("qwen3_moe-v4"), tensors_of("qwen3_moe-v4")
    stacks = {
        name: array.swapaxes(1, 2) if ".experts." in name else array
        for name, array in packed(tensors).items()
    }
    actual = logits(loaded(tmp_path / "stacks", config, stacks))
    assert (actual == logits(loaded(tmp_path / "plain", config, tensors))).all()


@pytest.mark.alike
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_same_model(case: str, tmp_path: Path) -> None:
    config, tensors = tiny_config(case), tensors_of(case)
    expected = logits(loaded(tmp_path / "plain", config, tensors))
    layouts = {
        "packed": (config, packed(tensors)),
        "mlx": (config, of_mlx(tensors)),
        "predicting": (config, tensors | {"mtp.fc.weight": mx.zeros((2, 2))}),
    }
    if case.startswith("qwen3_5"):
        layouts |= {
            "multimodal": (nested(config), prefixed(packed(tensors), "hub")),
            "multimodal mlx": (nested(config), prefixed(of_mlx(tensors), "mlx")),
            "untyped": (config | {"model_type": nested(config)["model_type"]}, tensors),
        }
    for name, layout in layouts.items():
        actual = logits(loaded(tmp_path / name, *layout))
        np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", ["granitemoehybrid-v4", "granitemoehybrid-v5"])
def test_granite_as_mlx_has_it_gives_the_same_model(case: str, tmp_path: Path) -> None:
    config, tensors = tiny_config(case), tensors_of(case)
    result: Tensors = {}
    for name, array in tensors.items():
        path = name.partition(".block_sparse_moe.")[0] + ".block_sparse_moe.switch_mlp"
        dense = name.partition(".shared_mlp.")[0] + ".mlp"
        if name.endswith("conv1d.weight"):
            result[name] = array.moveaxis(2, 1)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = mx.split(array, 2, axis=1)
            result |= {f"{path}.gate_proj.weight": gate, f"{path}.up_proj.weight": up}
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            result[f"{path}.down_proj.weight"] = array
        elif name.endswith("shared_mlp.input_linear.weight") and not config["num_local_experts"]:
            gate, up = mx.split(array, 2, axis=0)
            result |= {f"{dense}.gate_proj.weight": gate, f"{dense}.up_proj.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            result[f"{dense}.down_proj.weight"] = array
        else:
            result[name] = array
    assert result.keys() != tensors.keys()
    actual = logits(loaded(tmp_path / "mlx", config, result))
    expected = logits(loaded(tmp_path / "plain", config, tensors))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_mixed_formats_equal_their_dequantised_matrices(case: str, tmp_path: Path) -> None:
    """Matrices that cannot be fused, in the format of MLX checkpoints and with 8-bit gates."""
    config, dense = tiny_config(case), of_mlx(tensors_of(case))
    eight = {"group_size": 32, "bits": 8}
    gates = {n: a for n, a in dense.items() if n.endswith(("_gate.weight", "_b.weight"))}
    four = quantized({n: a for n, a in dense.items() if n not in gates}, eight | {"bits": 4})
    packed_all = four | quantized(gates, eight)
    stated = {"group_size": 32, "bits": 4}
    stated |= {name.removesuffix(".weight"): eight for name in gates}
    plain = dict(dense)
    for name, array in dense.items():
        scales = name.replace("weight", "scales")
        if name.endswith("weight") and scales in packed_all:
            how = eight if name in gates else eight | {"bits": 4}
            biases = packed_all[name.replace("weight", "biases")]
            plain[name] = mx.dequantize(packed_all[name], packed_all[scales], biases, **how)
            assert plain[name].shape == array.shape
    expected = logits(loaded(tmp_path / "plain", config, plain))
    model = loaded(tmp_path / "packed", config | {"quantization": stated}, packed_all)
    np.testing.assert_allclose(logits(model), expected, atol=1e-3)


def test_each_layer_of_a_puzzle_model_has_experts_of_its_own_sizes(tmp_path):
    """Layers are those of models that have the same sizes in all layers."""
    config, tensors = tiny_config("nemotron_h-v5"), tensors_of("nemotron_h-v5")
    puzzle_config, cut = puzzle()
    cut_model = loaded(tmp_path / "puzzle", puzzle_config, cut)
    full = loaded(tmp_path / "full", config, tensors)
    few = loaded(tmp_path / "few", config | FEW, with_fewer_experts(cut, 4))
    x = mx.random.normal((5, config["hidden_size"]), key=mx.random.key(1))
    for index, uniform in ((1, few), (4, full)):
        ours, theirs = (model.layers[index].mlp(x) for model in (cut_model, uniform))
        assert mx.array_equal(ours, theirs)
    assert not mx.allclose(few.layers[4].mlp(x), full.layers[4].mlp(x))


@pytest.mark.parametrize("blocks", [None, [], ["moe"], [{"block_type": "ring"}]])
def test_a_puzzle_model_lists_its_layers(tmp_path, blocks):
    config = tiny_config("nemotron_h-v5") | {"model_type": "nemotron_h_puzzle"}
    with pytest.raises(CheckpointError, match="must list its"):
        loaded(tmp_path, config | {"block_configs": blocks}, {})
