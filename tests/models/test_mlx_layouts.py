"""Checkpoints as mlx-lm lays them out load as those of the hub do, and give the same logits."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from models.dense_kv import logits
from models.tiny import arrays_of, tiny_config, write

from mlxinfer.bench.peer import peer_module
from mlxinfer.models import load

CASES = (
    *("lfm2_moe-v4", "nemotron_h-v4", "nemotron_h-v5", "falcon_h1-v4", "hunyuan_v1_dense-v4"),
    *("laguna-v4", "step3p5-v4", "mellum-v4"),
    *(
        "ministral3-v4",
        "mistral4-v4",
        "kimi_linear-v4",
        "gemma4_e-v4",
        "gemma3n_text-v4",
        "llama4_text-v4",
    ),
)

PREFIXES = {"gemma3n": "model.language_", "llama4": "language_model."}
ASKED = {  # what mlx-lm has no default for
    "nemotron_h": {
        "attention_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "conv_kernel": 4,
        "n_shared_experts": 1,
    },
    "kimi_linear": {"head_dim": 20, "rope_theta": 1e4},
    "llama4": {"attention_bias": False, "use_qk_norm": True},
    "gemma3n": {"final_logit_softcapping": 30.0, "altup_coef_clip": 120.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_layout_of_mlx_lm(tmp_path: Path, case: str) -> None:
    config = dict(tiny_config(case))
    if "rope_scaling" in config and not isinstance(config["rope_theta"], list):
        config["rope_parameters"] = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    arrays = arrays_of(config)
    expected = logits(load(write(tmp_path / "hub", config, arrays)))
    name = config["model_type"]
    if name in ("gemma3n_text", "llama4_text"):
        name = name.removesuffix("_text")
    peer_module("mlx_lm.utils")
    module = import_module(f"mlx_lm.models.{name}")
    given = {**ASKED.get(name, {}), **config}
    stated = {"model_type": name, "text_config": given} if name in PREFIXES else given
    theirs = module.Model(module.ModelArgs.from_dict(stated))
    if name in PREFIXES:
        arrays = {PREFIXES[name] + key: array for key, array in arrays.items()}
    found = logits(load(write(tmp_path / "mlx", stated, theirs.sanitize(arrays))))
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, expected.std()))
