"""GLM 5.3 Flash: the layouts of its checkpoints."""

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import alone
from models.dense_kv import logits
from models.expert_layouts import stacked
from models.random_weights import tiny_tensors
from models.tiny import arrays_of, tiny_config, write

from mlxinfer.cache import pooled
from mlxinfer.core import SamplingParams
from mlxinfer.models import load

CASE = "glm5_next_text-v4"
FORM = {"group_size": 32, "bits": 4}
PARTS = ("weight", "scales", "biases")
NESTED = {
    "model_type": "glm5_next",
    "text_config": tiny_config(CASE),
    "vision_config": {"depth": 1},
}
PREDICTS = ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight", "hc_attn_fn")


def as_on_the_hub(tensors):
    """Beside a tower, and with a layer that predicts tokens further ahead."""
    more = [f"model.language_model.layers.5.{name}" for name in PREDICTS]
    more += ["model.visual.blocks.0.attn.qkv.weight"]
    return tensors | {name: np.zeros((4, 4), np.float32) for name in more}


def as_mlx(tensors):
    """As mlx-lm lays out related families: channels last, stacks of experts."""
    moved = {}
    for name, value in tensors.items():
        array = mx.array(value).moveaxis(2, 1) if "conv1d" in name else mx.array(value)
        name = name.replace("model.language_model.", "language_model.model.")
        moved[name.replace("lm_head.", "language_model.lm_head.")] = array
    return stacked(moved)


def as_transformers_has_them(tensors):
    """Names of its modules, which its own saves do not have."""
    moved = {}
    for name, value in tensors.items():
        for ours, theirs in (("hc_attn_", "attn_hc."), ("hc_ffn_", "ffn_hc.")):
            name = name.replace(ours, theirs)
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        moved[name] = value
    return moved


@pytest.mark.alike
@pytest.mark.parametrize("config", [NESTED, {**tiny_config(CASE), "model_type": "glm5_next"}])
def test_names_of_the_hub_of_mlx_and_of_transformers(tmp_path, config):
    tensors = tiny_tensors(tiny_config(CASE))
    plain = logits(load(write(tmp_path / "plain", tiny_config(CASE), tensors)))
    for kind in (as_on_the_hub, as_mlx, as_transformers_has_them):
        moved = kind(tensors)
        assert moved.keys() != tensors.keys()
        actual = logits(load(write(tmp_path / kind.__name__, config, moved)))
        np.testing.assert_allclose(actual, plain, atol=1e-4)


def test_a_quantised_checkpoint_of_mlx(tmp_path):
    """Its logits are those of the numbers that the codes stand for, stacks of experts included."""
    whole, codes = as_mlx(tiny_tensors(tiny_config(CASE))), {}
    for name, value in whole.items():
        codes[name] = value
        if name.endswith(".weight") and value.ndim > 1 and value.shape[-1] % 32 == 0:
            parts = mx.quantize(value, **FORM)
            whole[name], path = mx.dequantize(*parts, **FORM), name.removesuffix("weight")
            codes |= {f"{path}{n}": p for n, p in zip(PARTS, parts, strict=True)}
    assert any(name.endswith("switch_mlp.gate_proj.scales") for name in codes)
    actual = logits(load(write(tmp_path / "codes", {**NESTED, "quantization": FORM}, codes)))
    expected = logits(load(write(tmp_path / "whole", NESTED, whole)))
    np.testing.assert_allclose(actual, expected, atol=1e-4 * expected.std())


def test_layers_that_share_an_index_rank_once(tmp_path, monkeypatch):
    """The prompt is longer than what an index chooses; layer 2 sees what layer 1 chose."""
    config = tiny_config("glm5_next_text-v5")
    assert config["indexer_types"] == ["full", "full", "shared", "full"]
    ranks, calls = pooled.ranked, []
    monkeypatch.setattr(pooled, "ranked", lambda *args: calls.append(1) or ranks(*args))
    model = load(write(tmp_path, config, arrays_of(config)))
    alone(model, list(range(5, 45)), SamplingParams(max_tokens=1))
    assert len(calls) == 2 * 2  # layers 1 and 3, for the prompt and for its last token
