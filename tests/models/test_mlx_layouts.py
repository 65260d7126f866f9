"""Checkpoints as mlx-lm lays them out, dense and quantised, in the older and the newer spelling.

Dense they have the logits of the published layout. Quantised they have those of the numbers that
the codes stand for. All layers that mlx-lm's definition can quantise are quantised, as in
mlx-community's folders.
"""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models.cases import CASES
from models.dense_kv import logits
from models.runs import every
from models.tiny import arrays_of, tiny_config, write

from mlxinfer.bench.peer import peer_module
from mlxinfer.convert.mlx_lm import UNDEFINED_BY_MLX_LM
from mlxinfer.convert.sidefiles import spelled_out
from mlxinfer.models import load
from mlxinfer.models.config import normalise

FORM = {"group_size": 32, "bits": 4}
NESTED = {  # where mlx-lm's definition is that of a model that sees
    "gemma3n_text": ("gemma3n", "model.language_model."),
    "llama4_text": ("llama4", "language_model.model."),
    "qwen3_5_text": ("qwen3_5", "model.language_model."),
    "qwen3_5_moe_text": ("qwen3_5_moe", "model.language_model."),
}
ASKED = {  # what mlx-lm has no default for
    "llama4_text": {"attention_bias": False, "use_qk_norm": True},
    "gemma3n_text": {"final_logit_softcapping": 30.0, "altup_coef_clip": 120.0},
    "qwen3_next": {"mlp_only_layers": []},
}
LEFT_OUT = {
    **dict.fromkeys(
        ("flint-v4", "flint-v5", "k2_horizon-v4", "k2_horizon-mova", "kolibri1-v4", "kolibri1-v5"),
        "mlx-lm has no definition",
    ),
    **dict.fromkeys(("xing4_0-v4", "iquestcoder-v4", "iquestcoder-v5"), "the same"),
    "ernie4_5_moe-v4": "mlx-lm drops the biases of its routers",
    "ernie4_5_moe-v5": "the same",
    "falcon_h1-v5": "mlx-lm does not multiply biases, which no published one has",
    "gpt_oss-v4": "its experts are published in MXFP4, see test_quantized_loading.py",
    "gpt_oss-v5": "the same",
    "granitemoehybrid-v5": "mlx-lm does not know the newer names of its kinds of layers",
    "llama4_text-v5": "mlx-lm has one expert a token only",
    "mimo_v2_flash-v5": "mlx-lm reads the vendor's keys only",
    "step3p5-v5": "mlx-lm reads the vendor's keys only",
}
COMPARED = [case for case in CASES if case not in LEFT_OUT]


@pytest.mark.alike
@pytest.mark.parametrize("case", every(12, COMPARED))
def test_the_layout_of_mlx_lm(tmp_path: Path, case: str) -> None:
    config = dict(tiny_config(case))
    arrays = arrays_of(config)
    published = logits(load(write(tmp_path / "hub", config, arrays)))
    stated, theirs, paths = by_mlx_lm(config, arrays)
    dense = logits(load(write(tmp_path / "mlx", stated, theirs)))
    np.testing.assert_allclose(dense, published, atol=1e-4 * max(1.0, published.std()))
    codes, numbers = rounded(theirs, paths)
    assert len(codes) > len(numbers) + 8, "few are quantised"
    stands_for = logits(load(write(tmp_path / "numbers", stated, numbers)))
    actual = logits(load(write(tmp_path / "codes", {**stated, "quantization": FORM}, codes)))
    np.testing.assert_allclose(actual, stands_for, atol=1e-4 * max(1.0, stands_for.std()))
    assert np.abs(actual - published).max() > 0.1 * published.std()


def by_mlx_lm(
    config: dict[str, Any], arrays: dict[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array], set[str]]:
    """Config and tensors as mlx-lm has them, and the paths of layers that it can quantise.

    Of types that it does not define: all matrices, under the published names.
    """
    kind = config["model_type"]
    if kind in UNDEFINED_BY_MLX_LM:
        return config, arrays, {name.removesuffix(".weight") for name in arrays}
    given = {**ASKED.get(kind, {}), **config, **spelled_out(config, normalise(config))}
    name, prefix = NESTED.get(kind, (kind, "model."))
    stated = {"model_type": name, "text_config": given} if kind in NESTED else given
    model_class, args_class = peer_module("mlx_lm.utils")._get_classes(config=stated)
    model = model_class(args_class.from_dict(stated))
    named = {re.sub(r"^model\.", prefix, name): array for name, array in arrays.items()}
    made = model.sanitize(named) if getattr(model, "sanitize", None) else named
    layers = model.named_modules()
    return stated, made, {path for path, layer in layers if getattr(layer, "to_quantized", None)}


def rounded(
    tensors: dict[str, mx.array], paths: set[str]
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Tensors with the weights at these paths quantised, and with what the codes stand for."""
    codes, numbers = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if path == name or path not in paths or tensor.ndim < 2 or tensor.shape[-1] % 32:
            continue
        weight, scales, biases = mx.quantize(tensor, **FORM)
        codes |= {name: weight, f"{path}.scales": scales, f"{path}.biases": biases}
        numbers[name] = mx.dequantize(weight, scales, biases, **FORM)
    return codes, numbers
