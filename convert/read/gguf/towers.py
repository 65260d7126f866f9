"""Towers of models that see: the `mmproj` files that llama.cpp's converter writes beside a text.

A file names its projector, and that says whose tower it is. Tensors get the names of transformers.
Sizes are those of the tensors, or numbers that llama.cpp has in its code (tools/mtmd/clip.cpp).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..source import Packed, TensorReader
from .fields import ArchitectureFields
from .layout import PLAIN, TensorLayout, layout_of
from .readers import Entry, GGUFTensor, reader_of

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of a file's tensors, by its own names
VisionConfig = Callable[[ArchitectureFields, Shapes], Config]
Change = Callable[[mx.array], mx.array]

_BLOCK = re.compile(r"v\.(blk|deepstack)\.(0|[1-9]\d{0,3})\.(.+)")
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_SUFFIX = re.compile(rf"(.+?)\.(weight(?:\.1)?|bias|{'|'.join(_LIMITS)})")
_UNUSED = ("v.token_embd.img_break",)  # a row of the text's own table
_HEARS = ("a.", "mm.a.")
_SWAP = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_JOINED = ("attn_q", "attn_k", "attn_v")  # in this order, where they become one tensor
_TEXT_TYPES = {  # what transformers calls the text inside, where it has another name alone
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "gemma4_unified": "gemma4_unified_text",
}


@dataclass(frozen=True, slots=True)
class TowerKind:
    """The towers of one projector.

    Attributes:
        models: architecture of the text -> model_type of the whole.
        blocks: the front of the names of blocks in transformers.
        block: of a block: part of the file's name -> module.
        top: the same of all other tensors.
        vision: makes `vision_config`.
        whole: makes fields beside it.
        changes: of values, by the names of transformers.
    """

    models: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]
    top: Mapping[str, str]
    vision: VisionConfig
    whole: VisionConfig = lambda facts, shapes: {}
    changes: Mapping[str, Change] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower read from a file: config fields, tensors, and preprocessor_config.json."""

    config: Config
    readers: Mapping[str, TensorReader]
    processor: Config
    notes: tuple[str, ...]

    def around(self, text: Config, sections: list[int]) -> Config:
        """The config of the whole; `sections`: pairs that turn by time, row and column, if any."""
        kind = self.config["model_type"]
        inner = text | {"model_type": _TEXT_TYPES.get(kind, text["model_type"])}
        if kind == "mistral3" and inner["model_type"] == "llama":  # as older files call it
            inner["model_type"] = "mistral"
        if sections:
            turns = {
                "mrope_section": sections[:3],
                "mrope_interleaved": not kind.startswith("qwen2"),
            }
            inner["rope_scaling"] = {
                "rope_type": "default",
                **(text["rope_scaling"] or {}),
                **turns,
            }
        if kind == "gemma4" and not text["hidden_size_per_layer_input"]:
            inner["use_bidirectional_attention"] = "vision"
        outer = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        repeated = {key: text[key] for key in outer if key in text}
        return {**self.config, **repeated, "text_config": inner}


def read_tower(
    metadata: Mapping[str, Any], entries: Mapping[str, Entry], text: ArchitectureFields, label: str
) -> Tower:
    """The tower of a file with this metadata and these tensors, for a text.

    Raises:
        CheckpointError: a field or a tensor is missing.
        UnsupportedModelError: the tower is of another text, or is not known.
    """
    facts = ArchitectureFields(metadata, label)
    kind, model_type = _kind(facts, text)
    entries = _unswapped(entries)
    shapes = {name: entry.shape for name, (entry, _) in entries.items()}
    vision = kind.vision(facts, shapes)
    config = {"model_type": model_type, "vision_config": vision, **kind.whole(facts, shapes)}
    processor = _processor(facts)
    facts.read(*_ALIKE)
    facts.refuse_unread(aside=("audio.",))
    hears = sum(name.startswith(_HEARS) for name in entries)
    note = f"The part of {Path(label).name} that hears ({hears} tensors) is left out."
    readers = _readers(kind, entries, vision, label)
    return Tower(config, readers, processor, (note,) if hears else ())


_ALIKE = (  # what tensors say too, what is the same in all of a family, or what has one meaning
    "projector_type", "has_vision_encoder", "has_audio_encoder", "use_gelu", "use_silu",
    "vision.projector_type", "vision.feed_forward_length", "vision.attention.layer_norm_epsilon",
    "vision.projection_dim", "vision.embedding_length", "vision.image_size", "vision.patch_size",
    "vision.is_deepstack_layers",
)  # fmt: skip


def _kind(facts: ArchitectureFields, text: ArchitectureFields) -> tuple[TowerKind, str]:
    """The kind of a tower, and the model_type of the whole."""
    if facts.architecture != "clip":
        raise UnsupportedModelError(
            f"{facts.all.where} has the architecture {facts.architecture[:40]!r}; expected clip, "
            "as files of towers (mmproj) have."
        )
    name = facts.all.text("clip.vision.projector_type", default="")
    name = name or facts.all.text("clip.projector_type", default="")
    kind = KINDS.get(name)
    if kind is None:
        raise UnsupportedModelError(
            f"The projector of {facts.all.where} is {name[:40]!r}; supported are "
            f"{', '.join(KINDS)}."
        )
    model_type = kind.models.get(text.architecture, "")
    width, expected = facts.integer("vision.projection_dim"), text.integer("embedding_length")
    if not model_type or width != expected:
        raise UnsupportedModelError(
            f"{facts.all.where} sees for {' or '.join(kind.models)} of width {width}, and "
            f"{text.all.where} is {text.architecture} of width {expected}."
        )
    return kind, model_type


def _processor(facts: ArchitectureFields) -> Config:
    """Colours, and pixels of a picture where the file says them."""
    made: Config = {"do_normalize": True}
    for name in ("image_mean", "image_std"):
        values = facts.all.get(facts.name(f"vision.{name}"))
        if values is not None:
            made[name] = np.asarray(values, np.float64).round(8).tolist()
    for name in ("min_pixels", "max_pixels"):
        if facts.has(f"vision.image_{name}"):
            made[name] = facts.integer(f"vision.image_{name}")
    return made


# -- tensors ------------------------------------------------------------------------------------


def _unswapped(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Older files name the two matrices of a feed-forward block the other way round."""
    up, norm = entries.get("v.blk.0.ffn_up.weight"), entries.get("v.blk.0.ln2.weight")
    if up is None or norm is None or up[0].shape[-1] == norm[0].shape[0]:
        return entries
    return {
        re.sub(r"ffn_(?:up|down)", lambda found: _SWAP[found[0]], name): entry
        for name, entry in entries.items()
    }


def _readers(
    kind: TowerKind, entries: Mapping[str, Entry], vision: Config, label: str
) -> dict[str, TensorReader]:
    """By the names of transformers; tensors that are parts of one are joined."""
    parts: dict[str, list[TensorReader]] = {}
    deep = sorted({int(m[2]) for m in map(_BLOCK.match, entries) if m and m[1] == "deepstack"})
    for name in sorted(entries, key=_order):
        if name in _UNUSED or name.startswith(_HEARS):
            continue
        entry, array = entries[name]
        ours = _name(kind, name, deep)
        if ours is None:
            raise UnsupportedModelError(f"Tensor {name[:80]!r} of {label} is not known.")
        layout = _layout(kind, ours, entry.shape, vision)
        reader = reader_of(GGUFTensor(ours, array, entry.shape, entry.type, layout))
        parts.setdefault(ours, []).append(reader)
    return {name: _whole(kind, name, readers) for name, readers in parts.items()}


def _order(name: str) -> tuple[int, str]:
    return next((i for i, part in enumerate(_JOINED) if f".{part}." in name), 0), name


def _name(kind: TowerKind, name: str, deep: list[int]) -> str | None:
    """The name of transformers; None: there is no such tensor."""
    block = _BLOCK.fullmatch(name)
    parts = _SUFFIX.fullmatch(block[3] if block else name)
    if parts is None:
        return kind.top.get(name)
    stem, suffix = parts[1], parts[2].removesuffix(".1")
    if block and block[1] == "deepstack":
        stem, front = (
            f"deepstack.{stem}",
            f"visual.deepstack_merger_list.{deep.index(int(block[2]))}.",
        )
    else:
        front = f"{kind.blocks}.{block[2]}." if block else ""
    module = (kind.block if block else kind.top).get(stem)
    if module is None:
        return None
    if suffix in _LIMITS:
        module = module.removesuffix(".linear")
    whole = f"{front}{module}.{suffix}"
    return _WITHOUT_SUFFIX.get(whole, whole)


_WITHOUT_SUFFIX = {
    name: name.removesuffix(".weight")
    for name in (
        "vision_tower.patch_embedder.position_embedding_table.weight",
        "vision_embedder.pos_embedding.weight",
    )
} | {
    "multi_modal_projector.mm_input_projection.weight": (
        "multi_modal_projector.mm_input_projection_weight"
    )
}


def _layout(kind: TowerKind, name: str, shape: tuple[int, ...], vision: Config) -> TensorLayout:
    """Undoes changes of the converter: row order of Pixtral's Q and K, 1 added to Gemma's norm."""
    if kind.blocks == _PIXTRAL_BLOCKS:
        heads = vision["num_attention_heads"]
        counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
        return layout_of("llama", name, shape, counts)
    return layout_of("gemma3", name, shape, {}) if "soft_emb_norm" in name else PLAIN


def _whole(kind: TowerKind, name: str, readers: list[TensorReader]) -> TensorReader:
    if len(readers) > 1:
        both = name.endswith("patch_embed.proj.weight")  # a matrix for each of two frames
        return _stacked(readers) if both else _joined(readers)
    (reader,) = readers
    if name.endswith(_LIMITS):
        return _changed(reader, lambda values: values.reshape(()))
    change = kind.changes.get(name)
    return reader if change is None else _changed(reader, change)


def _all(reader: TensorReader) -> mx.array:
    return reader.values(slice(0, reader.info.shape[0]))


def _changed(reader: TensorReader, change: Change) -> TensorReader:
    """Values in another order or shape."""
    shape = change(mx.zeros(reader.info.shape)).shape  # never computed

    def values(rows: slice) -> mx.array:
        changed = change(_all(reader))
        return changed[rows] if shape else changed

    return TensorReader(replace(reader.info, shape=shape, lossless=None), reader.parts, values)


def _stacked(readers: list[TensorReader]) -> TensorReader:
    """(out, channels, height, width) of each frame -> (out, channels, frames, height, width)."""
    info = readers[0].info
    shape = (*info.shape[:2], len(readers), *info.shape[2:])

    def values(rows: slice) -> mx.array:
        return mx.stack([reader.values(rows) for reader in readers], axis=2)

    parts = [part for reader in readers for part in reader.parts]
    size = sum(reader.info.stored_bytes for reader in readers)
    return TensorReader(replace(info, shape=shape, stored_bytes=size), parts, values)


def _joined(readers: list[TensorReader]) -> TensorReader:
    """Rows of one after those of the other; codes too, where all have the same."""
    first = readers[0].info
    if any((r.info.shape[1:], r.info.dtype) != (first.shape[1:], first.dtype) for r in readers):
        raise CheckpointError(f"The parts of {first.name} differ in shape or type.")
    count = sum(reader.info.shape[0] for reader in readers)
    same = all(reader.info.lossless == first.lossless for reader in readers)
    info = replace(
        first,
        shape=(count, *first.shape[1:]),
        stored_bytes=sum(reader.info.stored_bytes for reader in readers),
        lossless=first.lossless if same else None,
    )

    def values(rows: slice) -> mx.array:
        return mx.concatenate([_all(reader) for reader in readers])[rows]

    def codes(rows: slice) -> Packed:
        packed = [r.codes(slice(0, r.info.shape[0])) for r in readers if r.codes is not None]
        weight, scales = (
            mx.concatenate([getattr(p, n) for p in packed])[rows] for n in ("weight", "scales")
        )
        biases = [p.biases for p in packed if p.biases is not None]
        return Packed(weight, scales, mx.concatenate(biases)[rows] if biases else None)

    parts = [part for reader in readers for part in reader.parts]
    return TensorReader(info, parts, values, None if info.lossless is None else codes)


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
    deep = {int(m[2]) for m in map(_BLOCK.match, shapes) if m and m[1] == "deepstack"}
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
_PIXTRAL_BLOCKS = "vision_tower.transformer.layers"
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
    **dict.fromkeys(_JOINED, "attn.qkv"),
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
        _PIXTRAL_BLOCKS,
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
