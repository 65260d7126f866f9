"""The kinds of towers: what each projector's file says, and the names of its tensors.

Sizes are those of the tensors, or numbers that llama.cpp has in its code (tools/mtmd/clip.cpp).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError
from .fields import ArchitectureFields

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of a file's tensors, by its own names
VisionConfig = Callable[[ArchitectureFields, Shapes], Config]
Change = Callable[[mx.array], mx.array]

BLOCK = re.compile(r"v\.(blk|deepstack)\.(0|[1-9]\d{0,3})\.(.+)")
JOINED = ("attn_q", "attn_k", "attn_v")  # in this order, where they become one tensor


@dataclass(frozen=True, slots=True)
class TowerKind:
    """The towers of one projector."""

    models: Mapping[str, str]  # architecture of the text -> model_type of the whole
    blocks: str  # the front of the names of blocks in transformers
    block: Mapping[str, str]  # of a block: part of the file's name -> module
    top: Mapping[str, str]  # the same of all other tensors
    vision: VisionConfig  # makes `vision_config`
    whole: VisionConfig = lambda facts, shapes: {}  # makes fields beside it
    # of values, by the names of transformers
    changes: Mapping[str, Change] = field(default_factory=dict)


def _colours_last(values: mx.array) -> mx.array:
    """Pixels (..., 3, side, side), flat or not, in the order (row, column, colour), flat."""
    rows = () if values.ndim == 1 else (len(values),)
    side = isqrt(values.size // (rows[0] if rows else 1) // 3)
    return values.reshape(-1, 3, side, side).transpose(0, 2, 3, 1).reshape(*rows, -1)


# -- vision_config of each kind -----------------------------------------------------------------


def _sizes(facts: ArchitectureFields, hidden: str, layers: str, heads: str, **more: Any) -> Config:
    return {
        hidden: facts.integer("vision.embedding_length"),
        layers: facts.integer("vision.block_count"),
        heads: facts.integer("vision.attention.head_count"),
        "patch_size": facts.integer("vision.patch_size"),
        **more,
    }


def _named_sizes(facts: ArchitectureFields, shapes: Shapes, **more: Any) -> Config:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return _sizes(facts, *names, intermediate_size=_inner(shapes), **more)


def _inner(shapes: Shapes) -> int:
    return _rows(shapes, "v.blk.0.ffn_up.weight")


def _rows(shapes: Shapes, name: str) -> int:
    if name not in shapes:
        raise CheckpointError(f"The file of the tower has no {name}.")
    return shapes[name][0]


def _siglip(facts: ArchitectureFields, shapes: Shapes) -> Config:
    return _named_sizes(
        facts,
        shapes,
        model_type="siglip_vision_model",
        image_size=facts.integer("vision.image_size"),
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=facts.number("vision.attention.layer_norm_epsilon", 1e-6),
    )


def _gemma3_whole(facts: ArchitectureFields, shapes: Shapes) -> Config:
    side = facts.integer("vision.image_size") // facts.integer("vision.patch_size")
    return {"mm_tokens_per_image": (side // facts.integer("vision.projector.scale_factor", 4)) ** 2}


def _siglip2(facts: ArchitectureFields, shapes: Shapes) -> Config:
    return _siglip(facts, shapes) | {
        "model_type": "siglip2_vision_model",
        "num_patches": _rows(shapes, "v.position_embd.weight"),
    }


def _lfm2_whole(facts: ArchitectureFields, shapes: Shapes) -> Config:
    return {
        "downsample_factor": facts.integer("vision.projector.scale_factor", 2),
        "projector_hidden_size": _rows(shapes, "mm.1.weight"),
        "projector_hidden_act": "gelu",
        "projector_use_layernorm": "mm.input_norm.weight" in shapes,
    }


def _pixtral(facts: ArchitectureFields, shapes: Shapes) -> Config:
    heads = facts.integer("vision.attention.head_count")
    return _named_sizes(
        facts,
        shapes,
        model_type="pixtral",
        image_size=facts.integer("vision.image_size"),
        head_dim=_rows(shapes, "v.blk.0.attn_q.weight") // heads,
        hidden_act="silu" if facts.flag("use_silu") else "gelu",
        rope_theta=10_000.0,
    )


def _pixtral_whole(facts: ArchitectureFields, shapes: Shapes) -> Config:
    merges = "mm.patch_merger.weight" in shapes
    side = facts.integer("vision.spatial_merge_size", 2 if merges else 1)
    made = {"vision_feature_layer": -1, "projector_hidden_act": "gelu"}
    if merges:
        return {**made, "model_type": "mistral3", "spatial_merge_size": side}
    return {**made, "model_type": "llava", "vision_feature_select_strategy": "full"}


def _qwen(facts: ArchitectureFields, shapes: Shapes, **more: Any) -> Config:
    return _sizes(
        facts,
        *("hidden_size", "depth", "num_heads"),
        spatial_merge_size=facts.integer("vision.spatial_merge_size", 2),
        temporal_patch_size=2,
        **more,
    )


def _qwen2(facts: ArchitectureFields, shapes: Shapes) -> Config:
    made = _qwen(facts, shapes, hidden_act="quick_gelu")
    width = made.pop("hidden_size")
    return made | {
        "model_type": "qwen2_vl",
        "embed_dim": width,
        "hidden_size": _rows(shapes, "mm.2.weight"),
        "mlp_ratio": _inner(shapes) / width,
    }


def _qwen2_5(facts: ArchitectureFields, shapes: Shapes) -> Config:
    period, count = facts.integer("vision.n_wa_pattern"), facts.integer("vision.block_count")
    return _qwen(
        facts,
        shapes,
        model_type="qwen2_5_vl",
        hidden_act="silu",
        intermediate_size=_inner(shapes),
        out_hidden_size=_rows(shapes, "mm.2.weight"),
        window_size=112,  # in llama.cpp's code
        fullatt_block_indexes=list(range(period - 1, count, period)),
    )


def _qwen3(facts: ArchitectureFields, shapes: Shapes) -> Config:
    deep = {int(m[2]) for m in map(BLOCK.match, shapes) if m and m[1] == "deepstack"}
    return _qwen(
        facts,
        shapes,
        hidden_act="gelu_pytorch_tanh",
        intermediate_size=_inner(shapes),
        out_hidden_size=_rows(shapes, "mm.2.weight"),
        num_position_embeddings=_rows(shapes, "v.position_embd.weight"),
        deepstack_visual_indexes=sorted(deep),
    )


def _gemma4(facts: ArchitectureFields, shapes: Shapes) -> Config:
    dim = _rows(shapes, "v.blk.0.attn_q_norm.weight")
    return _named_sizes(
        facts,
        shapes,
        model_type="gemma4_vision",
        head_dim=dim,
        num_key_value_heads=_rows(shapes, "v.blk.0.attn_k.weight") // dim,
        position_embedding_size=shapes["v.position_embd.weight"][1],
        pooling_kernel_size=facts.integer("vision.projector.scale_factor", 3),
        use_clipped_linears="v.blk.0.attn_q.input_min" in shapes,
        standardize="v.std_bias" in shapes,
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
    )


def _gemma4_unified(facts: ArchitectureFields, shapes: Shapes) -> Config:
    facts.read("vision.block_count", "vision.attention.head_count")  # of no blocks
    width = _rows(shapes, "v.patch_embd.weight")
    return {
        "model_type": "gemma4_unified_vision",
        "patch_size": facts.integer("vision.patch_size"),
        "pooling_kernel_size": facts.integer("vision.projector.scale_factor", 3),
        "mm_embed_dim": width,
        "mm_posemb_size": shapes["v.position_embd.weight"][1],
        "output_proj_dims": width,
    }


# -- the kinds ----------------------------------------------------------------------------------

_SIGLIP_BLOCKS = "vision_tower.encoder.layers"
PIXTRAL_BLOCKS = "vision_tower.transformer.layers"
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
_SIGLIP_BLOCK = {
    **_ATTENTION,
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_TOP = {
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.post_ln": "vision_tower.post_layernorm",
}
_PIXTRAL_BLOCK = {
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_PIXTRAL_TOP = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
}
_QWEN_BLOCK = {
    "attn_qkv": "attn.qkv",
    **dict.fromkeys(JOINED, "attn.qkv"),
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}
_QWEN2_BLOCK = {**_QWEN_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_QWEN2_5_BLOCK = {
    **_QWEN_BLOCK,
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_QWEN3_BLOCK = {
    **_QWEN_BLOCK,
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
    "deepstack.norm": "norm",
    "deepstack.fc1": "linear_fc1",
    "deepstack.fc2": "linear_fc2",
}
_QWEN2_TOP = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN3_TOP = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.position_embd": "visual.pos_embed",
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
}
_GEMMA4_BLOCK = {
    **{stem: f"{module}.linear" for stem, module in _ATTENTION.items()},
    "attn_out": "self_attn.o_proj.linear",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
}
_GEMMA4_TOP = {
    "v.patch_embd": "vision_tower.patch_embedder.input_proj",
    "v.position_embd": "vision_tower.patch_embedder.position_embedding_table",
    "v.std_bias": "vision_tower.std_bias",
    "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection": "embed_vision.embedding_projection",
}
_UNIFIED_TOP = {
    "v.patch_embd": "vision_embedder.patch_dense",
    "v.patch_norm.1": "vision_embedder.patch_ln1",
    "v.patch_norm.2": "vision_embedder.patch_ln2",
    "v.patch_norm.3": "vision_embedder.pos_norm",
    "v.position_embd": "vision_embedder.pos_embedding",
    "mm.input_projection": "embed_vision.embedding_projection",
}
_QWEN3_MODELS = {
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
KINDS: Mapping[str, TowerKind] = {
    "gemma3": TowerKind(
        {"gemma3": "gemma3"},
        _SIGLIP_BLOCKS,
        _SIGLIP_BLOCK,
        {
            **_SIGLIP_TOP,
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection": "multi_modal_projector.mm_input_projection",
        },
        _siglip,
        _gemma3_whole,
    ),
    "gemma4v": TowerKind(
        {"gemma4": "gemma4"},
        _SIGLIP_BLOCKS,
        _GEMMA4_BLOCK,
        _GEMMA4_TOP,
        _gemma4,
        changes={"vision_tower.patch_embedder.input_proj.weight": _colours_last},
    ),
    "gemma4uv": TowerKind(
        {"gemma4": "gemma4_unified"},
        _SIGLIP_BLOCKS,
        {},
        _UNIFIED_TOP,
        _gemma4_unified,
        changes={
            "vision_embedder.patch_dense.weight": _colours_last,
            "vision_embedder.patch_ln1.weight": _colours_last,
            "vision_embedder.patch_ln1.bias": _colours_last,
            "vision_embedder.pos_embedding": lambda values: values.swapaxes(0, 1),
        },
    ),
    "lfm2": TowerKind(
        {"lfm2": "lfm2_vl"},
        _SIGLIP_BLOCKS,
        _SIGLIP_BLOCK,
        {
            **_SIGLIP_TOP,
            "mm.input_norm": "multi_modal_projector.layer_norm",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        _siglip2,
        _lfm2_whole,
        {"vision_tower.embeddings.patch_embedding.weight": _colours_last},
    ),
    "pixtral": TowerKind(
        {"llama": "llava", "mistral3": "mistral3"},
        PIXTRAL_BLOCKS,
        _PIXTRAL_BLOCK,
        _PIXTRAL_TOP,
        _pixtral,
        _pixtral_whole,
    ),
    "qwen2vl_merger": TowerKind(
        {"qwen2vl": "qwen2_vl"}, "visual.blocks", _QWEN2_BLOCK, _QWEN2_TOP, _qwen2
    ),
    "qwen2.5vl_merger": TowerKind(
        {"qwen2vl": "qwen2_5_vl"}, "visual.blocks", _QWEN2_5_BLOCK, _QWEN2_TOP, _qwen2_5
    ),
    "qwen3vl_merger": TowerKind(_QWEN3_MODELS, "visual.blocks", _QWEN3_BLOCK, _QWEN3_TOP, _qwen3),
}
