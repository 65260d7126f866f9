"""Inkling 2 Mini: experts as released, passes that share weights, and what is refused."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import logits
from models.tiny import arrays_of, tiny_config, write
from pooling.tiny_pooling import write_tokenizer
from speculation.head_checkpoints import eagle_checkpoint

from mlxinfer import LLM
from mlxinfer.errors import InvalidRequestError
from mlxinfer.models import load
from mlxinfer.models.config import normalise
from mlxinfer.models.registry import family

CASE = "inkling2_loop_text-v5"


def released(seed: int = 0) -> tuple[dict[str, Any], dict[str, mx.array], dict[str, mx.array]]:
    """A config, tensors with packed experts, and the same with these experts in numbers.

    Experts of the first half of the layers are NVFP4, of the others MXFP8.
    """
    config = {**tiny_config(CASE)}
    packed, plain = {}, {}
    count = config["num_hidden_layers"]
    for name, value in arrays_of(config, seed).items():
        if not name.endswith(("w13_weight", "w2_weight")):
            packed[name] = plain[name] = value
            continue
        rows = {"w13": (12, 64, 64), "w2": (12, 64, 32)}["w13" if "w13" in name else "w2"]
        weight = mx.array(np.resize(np.array(value), rows))
        mode, group = ("nvfp4", 16) if int(name.split(".")[3]) < count // 2 else ("mxfp8", 32)
        factors = mx.linspace(0.5, 1.5, 12)
        codes, scales = mx.quantize(weight, group, 4 if mode == "nvfp4" else 8, mode)
        numbers = mx.dequantize(codes, scales, None, group, 4 if mode == "nvfp4" else 8, mode)
        packed |= {name: codes.view(mx.uint8), f"{name}_scale": scales}
        if mode == "nvfp4":
            packed[f"{name}_amax"] = factors * 6
            packed[f"{name}_outer_scale_denominator"] = mx.full((12,), 6.0)
            numbers = numbers * factors[:, None, None]
        plain[name] = numbers
    return {**config, "moe_intermediate_size": 32}, packed, plain


def test_experts_as_released_are_kept_exactly(tmp_path):
    config, packed, plain = released()
    expected = logits(load(write(tmp_path / "plain", config, plain)))
    model = load(write(tmp_path / "packed", config, packed))
    actual = logits(model)
    assert np.abs(actual - expected).max() <= 1e-4 * max(1.0, expected.std())
    first, last = (model.layers[i].mlp.down_proj for i in (0, -1))
    assert (first.projection.mode, last.mode) == ("nvfp4", "mxfp8")


def test_a_whole_model_has_its_text_inside_and_the_core_shares_its_weights(tmp_path):
    """All passes of a layer have one object of each matrix, and a cache each."""
    text = tiny_config(CASE)
    whole = {"model_type": "inkling2_loop", "text_config": text, "vision_config": {}}
    model = load(write(tmp_path, whole, arrays_of(text)))
    first, again = model.layers[2], model.layers[4]  # of layer 2, in both passes
    assert first.mixer.o_proj is again.mixer.o_proj
    assert first.mlp is again.mlp
    assert first.mixer is not again.mixer
    assert first.messages is None
    assert again.messages is not None
    assert len(model.layers) == 8
    assert logits(model).shape[1] == text["unpadded_vocab_size"]


def test_ranks_stages_windows_and_layers_alone_are_refused(tmp_path):
    config = normalise(tiny_config(CASE))
    kind = family(config.model_type)
    assert kind.between_stages(config).bound == frozenset(range(1, config.num_layers))
    folder = write(tmp_path, tiny_config(CASE), arrays_of(tiny_config(CASE)))
    write_tokenizer(folder, 96)
    with pytest.raises(InvalidRequestError, match="distance"), LLM(folder, kv_window=16):
        pass
    eagle = eagle_checkpoint(tmp_path / "eagle", tiny_config(CASE), drafted=40)
    with pytest.raises(InvalidRequestError, match="streams"), LLM(folder, draft=eagle):
        pass
