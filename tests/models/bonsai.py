"""Tiny packs of Bonsai 2, and the same numbers as a plain Qwen 3.5."""

from typing import Any

import mlx.core as mx
from models.random_weights import tiny_tensors

FORMAT = {"bits": 2, "group_size": 128, "mode": "affine"}
CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3_5_text", "vocab_size": 96, "hidden_size": 512, "eos_token_id": 2},
    **{"intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 2},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
}
PLAIN = ("norm", "A_log", "dt_bias", "conv1d", "in_proj_a", "in_proj_b")  # never packed


def rotated(x: mx.array, signs: mx.array, block: int) -> mx.array:
    """Rows of x, times signs, multiplied block by block with an orthonormal Hadamard matrix."""
    size, matrix = 1, mx.ones((1, 1))
    while size < block:
        matrix = mx.concatenate(
            [mx.concatenate([matrix, matrix], 1), mx.concatenate([matrix, -matrix], 1)]
        )
        size *= 2
    blocks = mx.unflatten(x * signs, -1, (-1, block)) @ (matrix * block**-0.5)
    return blocks.flatten(-2)


def pack(**changes: Any) -> tuple[dict[str, Any], dict[str, mx.array], dict[str, mx.array]]:
    """A config, the tensors of a pack, and those of a plain model with the same matrices.

    Matrices that read one input have one basis. Inputs of `down_proj` have blocks of their own.
    """
    text = CONFIG | changes
    packed: dict[str, mx.array] = {}
    plain: dict[str, mx.array] = {}
    modules: list[dict[str, Any]] = []
    for name, value in tiny_tensors(text, 0).items():
        weight = mx.array(value)
        name = name.removeprefix("model.language_model.").removeprefix("model.")
        name = name if name.startswith("lm_head.") else f"model.{name}"
        if "conv1d" in name and weight.shape[1] == 1:
            weight = weight.swapaxes(1, 2)  # as MLX has it
        if any(part in name for part in PLAIN):
            packed[f"language_model.{name}"] = plain[f"language_model.{name}"] = weight
            continue
        path, block = name.removesuffix(".weight"), 1024 if "down_proj" in name else 512
        signs = mx.sign(mx.random.normal((weight.shape[1],), key=mx.random.key(weight.shape[1])))
        codes, *pair = mx.quantize(rotated(weight, signs, block), 128, 2)
        scales, biases = (part.astype(mx.float16) for part in pair)
        fields = {"weight": codes, "scales": scales, "biases": biases, "signs": signs}
        packed |= {f"language_model.{path}.{kind}": value for kind, value in fields.items()}
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        whole = mx.dequantize(codes, wide[0], wide[1], 128, 2)
        plain[f"language_model.{name}"] = rotated(whole, mx.ones_like(signs), block) * signs
        kinds = {"embedding": "embed_tokens" in path, "dtype": "float16"}
        modules.append({"path": path, "block": block, **kinds})
    config = {
        **{"model_type": "prism_hadamard_qwen35", "text_config": text, "eos_token_id": 2},
        **{"schema_version": 2, "tensor_namespace": "mlx-vlm-qwen3_5", "quantization": FORMAT},
        **{"gdn_activation_layout": "grouped", "modules": modules, "tie_word_embeddings": False},
    }
    return config, packed, plain
