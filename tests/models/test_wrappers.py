"""Texts inside of models that see, without their towers: the logits of transformers."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import DenseCache, logits
from models.names import expanded
from models.random_weights import LESS_ONE, random_tensor
from models.runs import every
from models.tiny import arrays_of, quantized, tiny_config, write

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.layers.step import Step
from mlxinfer.models import load
from mlxinfer.models.config import normalise
from mlxinfer.models.registry import language_name

HERE = Path(__file__).parents[1] / "data" / "parity"
CASES = json.loads((HERE / "wrappers.json").read_text())
UNSCALED = ("aya_vision", "cohere2_vision")  # transformers leaves out `logit_scale` of their texts


def logits_of(folder, config, tensors, ids):
    model = load(write(folder, config, tensors))
    step = Step(mx.arange(len(ids)), DenseCache(model).step([("a", len(ids))]))
    return np.array(model.logits(model(mx.array(ids), step)))


def tensors_of(outer):
    """By the published names, those of the tower too."""
    kind = CASES[outer]["config"]["text_config"]["model_type"]
    return {
        name: random_tensor(name, shape, 0, less_one=kind.startswith(LESS_ONE))
        for name, shape in expanded(CASES[outer]["tensors"]).items()
    }


@pytest.mark.alike
@pytest.mark.parametrize("outer", every(2, CASES))
def test_the_text_of_a_model_that_sees_is_that_of_transformers(tmp_path, outer):
    """Written by `tests/data/parity/wrappers.py`; tensors of the tower are there, and left out."""
    config = CASES[outer]["config"]
    references = np.load(HERE / "wrappers.npz")
    ids, expected = references[f"{outer}.ids"], references[f"{outer}.logits"]
    actual = logits_of(tmp_path, config, tensors_of(outer), ids)
    if outer in UNSCALED:
        actual /= config["text_config"]["logit_scale"]
    assert np.abs(actual - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("outer", CASES)
def test_the_older_spelling_is_of_the_same_model(outer):
    config = CASES[outer]["config"]
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    text |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "alpha" in rope:
        sections = {"xdrope_section": rope["mrope_section"]}
        text["rope_scaling"] = {"type": "xdrope", "alpha": rope["alpha"], **sections}
    elif "mrope_section" in rope:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    assert normalise({**config, "text_config": text}) == normalise(config)


@pytest.mark.alike
@pytest.mark.ci
@pytest.mark.parametrize("outer", CASES)
def test_quantised_folders_of_mlx_vlm_have_the_numbers_that_their_codes_stand_for(tmp_path, outer):
    """Under its names; a tower that is not there is none that is read."""
    config, ids = CASES[outer]["config"], np.arange(3, 19)
    named = {language_name(name): tensor for name, tensor in tensors_of(outer).items()}
    tensors = {f"language_model.{n}": mx.array(t) for n, t in named.items() if n is not None}
    codes = quantized(tensors, {"group_size": 32, "bits": 4})
    numbers = dict(tensors)
    for name in (name for name in codes if name.endswith(".scales")):
        parts = [codes[name.replace("scales", part)] for part in ("weight", "scales", "biases")]
        numbers[name.replace("scales", "weight")] = mx.dequantize(*parts, 32, 4)
    assert len(codes) > len(tensors) + 8
    actual = logits_of(
        tmp_path / "q", {**config, "quantization": {"group_size": 32, "bits": 4}}, codes, ids
    )
    expected = logits_of(tmp_path / "d", config, numbers, ids)
    np.testing.assert_allclose(actual, expected, atol=1e-3 * max(1.0, expected.std()))


def test_the_text_of_step_3_7_is_step_3_5(tmp_path):
    """Which test_parity compares with transformers; under published names beside a tower."""
    text, tensors = tiny_config("step3p5-v4"), arrays_of(tiny_config("step3p5-v4"))
    tower = ("vision_model.conv1.weight", "vit_large_projector.weight")
    seeing = tensors | dict.fromkeys(tower, tensors["model.norm.weight"])
    alone = load(write(tmp_path / "text", text, tensors))
    config = {"model_type": "step3p7", "text_config": text, "vision_config": {}}
    inside = load(write(tmp_path / "inside", config, seeing))
    assert mx.array_equal(*[logits(model) for model in (alone, inside)])


def test_the_vendors_config_of_ernie_4_5_vl_is_of_the_same_model(tmp_path):
    """Flat, with lists for texts and pictures; and the names of mlx-vlm's conversions."""
    text, tensors = CASES["ernie4_5_vl_moe"]["config"]["text_config"], tensors_of("ernie4_5_vl_moe")
    ids = np.arange(3, 19)
    expected = logits_of(tmp_path / "hub", CASES["ernie4_5_vl_moe"]["config"], tensors, ids)
    lists = {"moe_num_experts": [4, 4], "moe_layer_start_index": [1, 1]}
    flat = {**text, **lists, "model_type": "ernie4_5_moe_vl", "moe_layer_end_index": [3, 3]}
    del flat["mlp_layer_types"]
    np.testing.assert_array_equal(logits_of(tmp_path / "flat", flat, tensors, ids), expected)
    named = {}
    for name, tensor in tensors.items():
        if name.endswith(".mlp.gate.weight"):
            tensor = tensor.T
        if name.endswith("moe_statics.e_score_correction_bias"):
            name, tensor = name.replace(".moe_statics", ""), tensor[0]
        named[name.replace("gate.weight_1", "gate_1.weight")] = tensor
    np.testing.assert_array_equal(logits_of(tmp_path / "mlx", flat, named, ids), expected)


@pytest.mark.parametrize("front", ["", "language_model."])
def test_the_text_of_minimax_m3_is_read_alone(tmp_path, front):
    """As mlx-vlm saves it, under a type that transformers does not list."""
    text, tensors = (
        tiny_config("minimax_m3_vl_text-v5"),
        arrays_of(tiny_config("minimax_m3_vl_text-v5")),
    )
    whole = load(write(tmp_path / "whole", text, tensors))
    named = {f"{front}{name}": array for name, array in tensors.items()}
    alone = load(write(tmp_path / "alone", text | {"model_type": "minimax_m3"}, named))
    np.testing.assert_array_equal(logits(alone), logits(whole))


def test_the_text_of_mimo_v2_5_is_mimo_v2_flash(tmp_path):
    """Beside what sees and hears; the vendor's own files have rows that nobody can tell apart."""
    config = tiny_config("mimo_v2_flash-v4") | {"model_type": "mimo_v2", "layernorm_epsilon": 1e-5}
    tensors = arrays_of(tiny_config("mimo_v2_flash-v4"))
    flash = load(write(tmp_path / "flash", config | {"model_type": "mimo_v2_flash"}, tensors))
    inside = {f"language_model.{name}": array for name, array in tensors.items()}
    senses = {"visual.x.weight", "audio_encoder.x.weight", "speech_embeddings.0.weight"}
    inside |= dict.fromkeys(senses, mx.ones(3))
    text = load(write(tmp_path / "text", config, inside))
    np.testing.assert_array_equal(logits(text), logits(flash))
    fused = tensors | {"model.layers.0.self_attn.qkv_proj.weight": mx.ones((4, 64))}
    with pytest.raises(UnsupportedModelError, match="Conversions to MLX"):
        load(write(tmp_path / "fused", config, fused))


@pytest.mark.parametrize(
    ("outer", "case", "key", "front", "seeing"),
    [
        ("internvl_chat", "qwen2-v4", "llm_config", "language_model.", "vision_model.x.weight"),
        ("internvl_chat", "qwen3-v4", "llm_config", "language_model.", "mlp1.0.weight"),
        ("llava_qwen2", "qwen2-v4", None, "", "model.vision_tower.vision_tower.model.x.weight"),
        ("llava_qwen2", "qwen2-v4", None, "", "model.mm_projector.0.weight"),
        ("phi3_v", "phi3-v4", None, "", "model.vision_embed_tokens.img_projection.0.weight"),
    ],
)
def test_texts_of_models_with_their_own_code_are_read(tmp_path, outer, case, key, front, seeing):
    """transformers has no class for them: the text is compared with the text alone."""
    text, tensors = tiny_config(case), arrays_of(tiny_config(case))
    whole = {**text, "model_type": outer} if key is None else {"model_type": outer, key: text}
    inside = {f"{front}{name}": array for name, array in tensors.items()}
    inside[seeing] = mx.zeros((2, 2))
    alone = logits(load(write(tmp_path / "alone", text, tensors)))
    actual = logits(load(write(tmp_path / "whole", {**whole, "vision_config": {}}, inside)))
    np.testing.assert_array_equal(actual, alone)
