"""Texts inside of models that see, without their towers: the logits of transformers."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import DenseCache, logits
from models.names import expanded
from models.random_weights import LESS_ONE, random_tensor
from models.tiny import arrays_of, tiny_config, write

from mlxinfer.layers.step import Step
from mlxinfer.models import load

HERE = Path(__file__).parents[1] / "data" / "parity"
CASES = json.loads((HERE / "wrappers.json").read_text())
UNSCALED = ("aya_vision", "cohere2_vision")  # transformers leaves out `logit_scale` of their texts


@pytest.mark.parametrize("outer", CASES)
def test_the_text_of_a_model_that_sees_is_that_of_transformers(tmp_path, outer):
    """Written by `tests/data/parity/wrappers.py`; tensors of the tower are there, and left out."""
    config = CASES[outer]["config"]
    less_one = config["text_config"]["model_type"].startswith(LESS_ONE)
    tensors = {
        name: random_tensor(name, shape, 0, less_one=less_one)
        for name, shape in expanded(CASES[outer]["tensors"]).items()
    }
    model = load(write(tmp_path, config, tensors))
    references = np.load(HERE / "wrappers.npz")
    ids, expected = references[f"{outer}.ids"], references[f"{outer}.logits"]
    step = Step(mx.arange(len(ids)), DenseCache(model).step([("a", len(ids))]))
    found = np.array(model.logits(model(mx.array(ids), step)))
    if outer in UNSCALED:
        found /= config["text_config"]["logit_scale"]
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_the_text_of_step_3_7_is_step_3_5(tmp_path):
    """Which test_parity compares with transformers; under published names beside a tower."""
    text, tensors = tiny_config("step3p5-v4"), arrays_of(tiny_config("step3p5-v4"))
    tower = ("vision_model.conv1.weight", "vit_large_projector.weight")
    seeing = tensors | dict.fromkeys(tower, tensors["model.norm.weight"])
    alone = load(write(tmp_path / "text", text, tensors))
    config = {"model_type": "step3p7", "text_config": text, "vision_config": {}}
    inside = load(write(tmp_path / "inside", config, seeing))
    assert mx.array_equal(*[logits(model) for model in (alone, inside)])
