"""Towers of models that see: the `mmproj` files that llama.cpp's converter writes beside a text.

A file names its projector, and that says whose tower it is. Tensors get the names of transformers.
The kinds are those of tower_kinds.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..source import Packed, TensorReader
from .fields import ArchitectureFields
from .layout import PLAIN, TensorLayout, layout_of
from .readers import Entry, GGUFTensor, reader_of
from .tower_kinds import BLOCK, JOINED, KINDS, PIXTRAL_BLOCKS, Change, Config, TowerKind

_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_SUFFIX = re.compile(rf"(.+?)\.(weight(?:\.1)?|bias|{'|'.join(_LIMITS)})")
_UNUSED = ("v.token_embd.img_break",)  # a row of the text's own table
_HEARS = ("a.", "mm.a.")
_SWAP = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_TEXT_TYPES = {  # what transformers calls the text inside, where it has another name alone
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "gemma4_unified": "gemma4_unified_text",
}


@dataclass(frozen=True, slots=True)
class TowerFile:
    """A tower read from a file: config fields, tensors, and preprocessor_config.json."""

    config: Config
    readers: Mapping[str, TensorReader]
    processor: Config
    notes: tuple[str, ...]

    def around(self, text: Config, sections: list[int]) -> Config:
        """The config of the whole; `sections`: pairs of rope by time, row and column."""
        kind = self.config["model_type"]
        inner = text | {"model_type": _TEXT_TYPES.get(kind, text["model_type"])}
        if kind == "mistral3" and inner["model_type"] == "llama":  # as older files call it
            inner["model_type"] = "mistral"
        if sections:
            axes = {
                "mrope_section": sections[:3],
                "mrope_interleaved": not kind.startswith("qwen2"),
            }
            inner["rope_scaling"] = {"rope_type": "default", **(text["rope_scaling"] or {}), **axes}
        if kind == "gemma4" and not text["hidden_size_per_layer_input"]:
            inner["use_bidirectional_attention"] = "vision"
        outer = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        repeated = {key: text[key] for key in outer if key in text}
        return {**self.config, **repeated, "text_config": inner}


def read_tower(
    metadata: Mapping[str, Any], entries: Mapping[str, Entry], text: ArchitectureFields, label: str
) -> TowerFile:
    """The tower of a file with this metadata and these tensors, for a text."""
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
    return TowerFile(config, readers, processor, (note,) if hears else ())


_ALIKE = (  # what tensors say too, what is the same in all of a family, or what has one meaning
    "projector_type", "has_vision_encoder", "has_audio_encoder", "use_gelu", "use_silu",
    "vision.projector_type", "vision.feed_forward_length", "vision.attention.layer_norm_epsilon",
    "vision.projection_dim", "vision.embedding_length", "vision.image_size", "vision.patch_size",
    "vision.is_deepstack_layers",
)  # fmt: skip


def _kind(facts: ArchitectureFields, text: ArchitectureFields) -> tuple[TowerKind, str]:
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
        re.sub(r"ffn_(?:up|down)", lambda match: _SWAP[match[0]], name): entry
        for name, entry in entries.items()
    }


def _readers(
    kind: TowerKind, entries: Mapping[str, Entry], vision: Config, label: str
) -> dict[str, TensorReader]:
    """By the names of transformers; tensors that are parts of one are joined."""
    parts: dict[str, list[TensorReader]] = {}
    deep = sorted({int(m[2]) for m in map(BLOCK.match, entries) if m and m[1] == "deepstack"})
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
    return next((i for i, part in enumerate(JOINED) if f".{part}." in name), 0), name


def _name(kind: TowerKind, name: str, deep: list[int]) -> str | None:
    """The name of transformers; None: there is no such tensor."""
    block = BLOCK.fullmatch(name)
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
    if kind.blocks == PIXTRAL_BLOCKS:
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
