"""GGUF files, one or split into several, as a SourceModel."""

import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....hub import Progress
from ....hub.imported import GGUFModel
from ....models.jsonfields import Fields
from ..folder import digest_of, file_state
from ..source import SideFiles, SourceModel, TensorReader, origin_of_metadata
from ..stored import FLOATS, Array, StoredArray
from .families import BY_LAYER, CONSTANTS, FAMILIES, PARTIAL, query_scale
from .fields import ArchitectureFields, check_rope_dims, rope_scaling
from .gemma import gemma4_ropes
from .header import GGUFHeader, TensorEntry, parse_header
from .layout import HALVES, layout_of, part_layout
from .mixtures import STEP_TURNS
from .names import ROPE_FACTORS, STREAMS, hf_names, is_factor
from .readers import Entry, GGUFTensor, constant, reader_of
from .tokenizer import check_tokenizer, tokenizer_files
from .tower_kinds import KINDS
from .towers import read_tower
from .vectors import VERDICT, is_dense, pooling_files, scoring, verdict

_ASIDE = ("v.", "mm.", "a.", "mtp.")  # as other exporters put them into one file
_PARTS = tuple(f".{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))
_PICTURES = ("image", "IMG")  # in the templates of models that see
_SEEING_GEMMA3 = 2560  # the width of the smallest Gemma 3 that sees
WITHOUT_TOWER = (
    "{name} reads text only: pictures need the mmproj file of this model beside it, or --mmproj."
)
# Of a part, or none.
_OTHER_ROPES = (
    "bailingmoe3", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm5-next", "kimi-linear",
    "mimo2", "mistral4", "nemotron_h", "nemotron_h_moe", "step35",
)  # fmt: skip
_WIDE = (  # activations do not fit float16
    "gemma-embedding", "gemma3", "gemma3n", "gemma4", "glm4", "gpt-oss",
)  # fmt: skip


def open_gguf(
    path: Path,
    side_files: Mapping[str, bytes | Path] | None = None,
    progress: Progress = lambda *_: None,
    mmproj: Path | None = None,
) -> SourceModel:
    """A GGUF file; of a split one, any part.

    Args:
        side_files: tokenizer and templates from elsewhere, instead of those in the file.
        progress: called while the header is read.
        mmproj: the file of the tower, in place of that beside the file.
    """
    model = GGUFModel.at(path, mmproj)
    label, parts = str(path), model.parts
    digest = blake2b(digest_of(side_files or {}), digest_size=20)
    headers = _headers(parts, digest.update, progress)
    metadata = headers[parts[0]].metadata
    architecture = _architecture(metadata, label)
    _check_parts(list(headers.values()), label)
    entries = _entries(headers, label)
    facts = ArchitectureFields(metadata, label)
    named, notes = _named(entries, facts)
    shapes = {ours: entry.shape for ours, (entry, _) in named.items()}
    config = make_config(metadata, shapes, _factors(entries, architecture), label)
    from_metadata: SideFiles = dict
    modules = pooling_files(facts, entries)
    sizes = _bytes_by_type(entries)
    if side_files is None and check_tokenizer(metadata, label):
        from_metadata = cache(partial(tokenizer_files, metadata, label))
    source = SourceModel(
        label=label,
        format="GGUF",
        config={key: value for key, value in config.items() if key != HALVES},
        dtype=_model_dtype(architecture, sizes),
        as_made=True,
        exact_dtype="float32" if set(sizes) == {"F32"} else None,
        readers=_readers(named, entries, facts, config),
        side_files=lambda: {**modules, **(from_metadata() if side_files is None else side_files)},
        fingerprint=digest.hexdigest(),
        notes=notes,
        origin=origin_of_metadata(metadata),
    )
    return _with_tower(source, model.projector, facts, required=mmproj is not None)


def _with_tower(
    source: SourceModel, projector: Path | None, facts: ArchitectureFields, *, required: bool
) -> SourceModel:
    """The model with its tower; one that only lies beside the file keeps no text from running."""
    if projector is None:
        return replace(source, notes=(*source.notes, *_without_tower(facts)))
    try:
        return _seeing(source, projector, facts)
    except (CheckpointError, UnsupportedModelError) as error:
        if required:
            raise
        note = f"{Path(source.label).name} reads text only. {error}"
        return replace(source, notes=(*source.notes, note))


def _headers(
    parts: Iterable[Path], digest: Callable[[bytes], None], progress: Progress = lambda *_: None
) -> dict[Path, GGUFHeader]:
    """The headers of all parts; `digest` is called with what identifies each."""
    headers: dict[Path, GGUFHeader] = {}
    for part in parts:
        headers[part], raw = read_header(part, progress)
        digest(f"{part.name} {file_state(part)} ".encode() + raw)
    return headers


def _seeing(source: SourceModel, projector: Path, facts: ArchitectureFields) -> SourceModel:
    digest = blake2b(source.fingerprint.encode(), digest_size=20)
    headers = _headers([projector], digest.update)
    entries = _entries(headers, str(projector))
    tower = read_tower(headers[projector].metadata, entries, facts, str(projector))
    sections = facts.all.get(f"{facts.architecture}.rope.dimension_sections")
    turns = [] if sections is None else np.asarray(sections).tolist()
    processor = json.dumps(tower.processor).encode()
    return replace(
        source,
        config=tower.around(dict(source.config), turns),
        readers={**source.readers, **tower.readers},
        side_files=lambda: {**source.side_files(), "preprocessor_config.json": processor},
        fingerprint=digest.hexdigest(),
        notes=(*source.notes, *tower.notes),
    )


def _without_tower(facts: ArchitectureFields) -> tuple[str, ...]:
    template = facts.all.text("tokenizer.chat_template", default="")
    speaks = any(mark in template for mark in _PICTURES) and not (
        facts.architecture == "gemma3" and facts.integer("embedding_length") < _SEEING_GEMMA3
    )
    of_kind = any(facts.architecture in kind.models for kind in KINDS.values())
    if of_kind and (speaks or facts.has("rope.dimension_sections")):
        return (WITHOUT_TOWER.format(name=Path(facts.all.where).name),)
    return ()


def _architecture(metadata: Mapping[str, Any], label: str) -> str:
    architecture = Fields(metadata, label).text("general.architecture")
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{label} has the architecture {architecture[:60]!r}, and what its tensors and fields "
            "mean is not known here. From safetensors many more models run. GGUF files are read of "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return architecture


def _entries(headers: Mapping[Path, GGUFHeader], label: str) -> dict[str, Entry]:
    entries = {
        entry.name: (entry, _stored(path, entry, header.data_start))
        for path, header in headers.items()
        for entry in header.tensors
    }
    if len(entries) != sum(len(header.tensors) for header in headers.values()):
        raise CheckpointError(f"{label} has a tensor in two of its parts.")
    return entries


def _stored(path: Path, entry: TensorEntry, data_start: int) -> StoredArray:
    block, shape = entry.type, entry.shape
    dtype = block.name if block.name in FLOATS else "U8"
    if dtype == "U8":
        shape = (*shape[:-1], shape[-1] // block.num_values * block.num_bytes)
    start = data_start + entry.offset
    return StoredArray(entry.name, dtype, shape, path, start, path.stat().st_size)


def _bytes_by_type(entries: Mapping[str, Entry]) -> Counter[str]:
    """Bytes of matrices; vectors do not count."""
    sizes = Counter[str]()
    for entry, _ in entries.values():
        if len(entry.shape) > 1:
            sizes[entry.type.name] += entry.num_bytes
    return sizes


def _model_dtype(architecture: str, sizes: Counter[str]) -> str:
    """Of activations: that of most dense matrices.

    A file that is float32 for the most part may have been made of any dtype, and bfloat16 holds all
    that it holds. Scales of quantised matrices are float16.
    """
    wide = (
        architecture in _WIDE
        or max(sizes, key=sizes.__getitem__, default="F16") == "F32"
        or sizes["BF16"] > sizes["F16"]
    )
    return "bfloat16" if wide else "float16"


def _readers(
    named: Mapping[str, Entry],
    entries: Mapping[str, Entry],
    facts: ArchitectureFields,
    config: Mapping[str, Any],
) -> dict[str, TensorReader]:
    architecture = facts.architecture
    constants = CONSTANTS.get(architecture, lambda facts: {})(facts)
    readers = {name: constant(name, values) for name, values in constants.items()}
    for name, (entry, array) in named.items():
        joined = ".attn_qkv." in entry.name and name.endswith(_PARTS)
        layout = (part_layout if joined else layout_of)(architecture, name, entry.shape, config)
        scale = _scale_of(entries, entry.name)
        place = GGUFTensor(name, array, entry.shape, entry.type, layout, scale)
        one = STREAMS.fullmatch(name)
        place = place if one is None else place.part(int(one[1]))
        readers[name] = (verdict if name == VERDICT else reader_of)(place)
    return readers


def read_header(path: Path, progress: Progress = lambda *_: None) -> tuple[GGUFHeader, bytes]:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise CheckpointError(f"{path} is empty.")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            header = parse_header(data, str(path), progress)
            return header, blake2b(data[: header.data_start]).digest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def _check_parts(headers: list[GGUFHeader], label: str) -> None:
    for number, header in enumerate(headers):
        fields = Fields(header.metadata, label)
        stated = fields.integer("split.count", low=0, default=0) or 1
        place = fields.integer("split.no", low=0, default=0)
        if stated != len(headers) or place != number:
            raise CheckpointError(
                f"Part {number + 1} of {label} says that it is part {place + 1} of {stated}; "
                f"expected {number + 1} of {len(headers)}."
            )


def _named(
    entries: Mapping[str, Entry], facts: ArchitectureFields
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Tensors by the names of transformers, and a note on those that are left out."""
    named: dict[str, Entry] = {}
    aside = sorted(name for name in entries if name.startswith(_ASIDE))
    note = (
        f"{facts.all.where} is read as a language model: {len(aside)} tensors "
        f"({', '.join(aside[:1])} …) of parts that see, hear or predict ahead are left out."
    )
    scales = _scale_names(entries)
    for name, entry in entries.items():
        if name in aside or is_dense(name) or name in scales:
            continue
        ours = hf_names(facts.architecture, name, facts.num_layers, entries.keys())
        if not ours and not is_factor(facts.architecture, name):
            raise UnsupportedModelError(
                f"Tensor {name[:80]!r} of {facts.all.where} is not one of the "
                f"{facts.architecture} architecture."
            )
        named |= dict.fromkeys(ours, entry)
    return named, (note,) if aside else ()


def _scale_names(entries: Mapping[str, Entry]) -> set[str]:
    """Of tensors beside matrices in NVFP4: their scales, and those of inputs, which stay as are."""
    stems = [
        name.removesuffix(".weight")
        for name, (entry, _) in entries.items()
        if entry.type.name == "NVFP4"
    ]
    return {f"{stem}.{kind}" for stem in stems for kind in ("scale", "input_scale")}


def _scale_of(entries: Mapping[str, Entry], name: str) -> Array | None:
    """The scale of a matrix in NVFP4, or those of a stack."""
    entry, _ = entries[name]
    scale = entries.get(f"{name.removesuffix('.weight')}.scale")
    if entry.type.name != "NVFP4" or scale is None:
        return None
    array = scale[1].expect(["F32"])
    count = entry.shape[0] if len(entry.shape) > 2 else 1
    if array.shape not in ((1,), (count,)):
        raise array.fail(f"has shape {array.shape}; expected ({count},)")
    return array.floats()


def _factors(entries: Mapping[str, Entry], architecture: str) -> dict[str, Array]:
    factors = {}
    for name in entries:
        if not is_factor(architecture, name):
            continue
        array = entries[name][1].expect(["F32"])
        if len(array.shape) != 1 or array.num_bytes > 4096:
            raise array.fail(f"has shape {array.shape}; expected a short vector")
        factors[name] = array.floats()
    return factors


# -- config.json of the metadata ----------------------------------------------------------------


def make_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Array],
    label: str,
) -> dict[str, Any]:
    """config.json as transformers writes it, for a GGUF file.

    Args:
        shapes: of the tensors, by the names of transformers.
        factors: the tensors that stand for fields (frequencies, scales), float32.
    """
    facts = ArchitectureFields(metadata, label)
    family = FAMILIES[facts.architecture]
    hidden = facts.integer("embedding_length")
    heads = facts.by_layer("attention.head_count", facts.num_layers)[0]
    head_dim = facts.integer("attention.key_length", max(hidden // heads, 1))
    table = shapes.get("model.embed_tokens.weight")
    if table is None or len(table) != 2 or table[1] != hidden:
        raise CheckpointError(f"{label} has no token_embd.weight of {hidden} columns.")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if facts.architecture in BY_LAYER
        else facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": table[0],
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": facts.integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        **_ropes(facts, factors, head_dim),
        **_token_ids(facts.all),
    }
    if ahead := facts.count("nextn_predict_layers"):
        config["num_nextn_predict_layers"] = ahead
    if facts.has("attention.layer_norm_epsilon"):
        config["layer_norm_eps"] = facts.number("attention.layer_norm_epsilon")
    if facts.architecture == "muse-glimmer":
        config["qk_scale_factor"] = query_scale(facts, factors)
    config |= family(facts, shapes, config)
    config |= scoring(facts, shapes, config)
    facts.check_default("attention.value_length", head_dim)
    facts.refuse_unread()
    return config


def _ropes(
    facts: ArchitectureFields, factors: Mapping[str, Array], head_dim: int
) -> dict[str, Any]:
    if facts.architecture == "gemma4":
        return {"rope_parameters": gemma4_ropes(facts, factors.get(ROPE_FACTORS))}
    if facts.architecture == "step35":  # divisors of what does not rotate are 1
        head_dim = round(STEP_TURNS * head_dim)
        factors = {name: values[: head_dim // 2] for name, values in factors.items()}
    fields: dict[str, Any] = {
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(facts, factors, head_dim),
    }
    if facts.architecture in PARTIAL:
        dims = facts.integer("rope.dimension_count", head_dim)
        fields["partial_rotary_factor"] = dims / head_dim
    elif facts.architecture not in _OTHER_ROPES:
        check_rope_dims(facts, head_dim)
    return fields


def _token_ids(metadata: Fields) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    names = {key: f"tokenizer.ggml.{name}_token_id" for key, name in keys.items()}
    return {
        key: metadata.integer(name, low=0)
        for key, name in names.items()
        if metadata.get(name) is not None
    }
