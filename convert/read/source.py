"""A checkpoint that is read tensor by tensor: `SourceModel`, and the `TensorReader` of a tensor.

Names. `tensors` are named as transformers names them: `model.layers.0.self_attn.q_proj.weight`.
Experts that a checkpoint stores one by one keep their names (`...mlp.experts.7.up_proj.weight`,
each `(out, in)`); expert_groups() says which of them make up which of MLX's switch layers, and
arrange.py stacks them. Experts that a checkpoint stores stacked come stacked,
`(num_experts, out, in)`, under the name of MLX's switch layer: `...mlp.switch_mlp.up_proj.weight`,
and for gpt_oss `...mlp.experts.gate_proj.weight`, gate and up apart, with `...gate_proj.bias`,
whatever the checkpoint (dense, MXFP4, GGUF) calls them. Both mlx-lm and mlxinfer load these names
as they are.

Values are those of transformers too: rows of Q and K for its rotary embedding, Gemma's norms less
one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...models.quantization import QuantFormat as MLXFormat
from ..arrays import as_numpy
from .stored import StoredArray

CARD = "README.md"
_FRONT = re.compile(r"\A\s*---\n(.*?)\n---", re.S)
_CACHED = re.compile(r"^models--([^/]+?)--([^/]+)$")
_URL = re.compile(r"^https://huggingface\.co/([^/\s]+/[^/\s]+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from, as its card or its metadata say; None: nothing says so.

    The card of a conversion repeats it.
    """

    repo: str | None = None  # of the checkpoint itself
    base_model: str | None = None  # that the checkpoint is made of
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    card: Mapping[str, Any] = field(
        default_factory=dict, compare=False
    )  # all that stands in front of its text


def origin_of_card(text: str, repo: str | None = None) -> Origin:
    """The origin that a model card states; the card may be no YAML at all."""
    front = _FRONT.match(text.replace("\r\n", "\n"))
    lines = front[1] if front else ""
    keys = ("base_model", "license", "license_name", "license_link")
    values: dict[str, Any] = {key: _value(lines, key) for key in keys}
    return Origin(repo, **values, card=_fields(lines))


def _fields(lines: str) -> dict[str, Any]:
    """The fields in front of a card; {} where they are no YAML."""
    import yaml  # type: ignore[import-untyped]

    try:
        fields = yaml.safe_load(f"{lines}\n")
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {str(key): value for key, value in fields.items()} if isinstance(fields, dict) else {}


def origin_of_folder(folder: Path) -> Origin:
    """Of a folder with a card; in the cache of the hub the folder's path names its repository."""
    cached = (_CACHED.match(part) for part in folder.resolve().parts)
    repo = next((f"{match[1]}/{match[2]}" for match in cached if match), None)
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return origin_of_card(text, repo)


def origin_of_metadata(metadata: Mapping[str, Any]) -> Origin:
    url = _URL.match(str(metadata.get("general.base_model.0.repo_url", "")))
    keys = ("license", "license_name", "license_link")
    values = {key: metadata.get(f"general.{key.replace('_', '.')}") for key in keys}
    stated: dict[str, Any] = {k: value for k, value in values.items() if isinstance(value, str)}
    return Origin(base_model=url[1] if url else None, **stated)


def _value(lines: str, key: str) -> str | None:
    match = re.search(rf"^{key}:[ \t]*(?:\n[ \t]*-[ \t]*)?([^\n]+)$", lines, re.M)
    value = match[1].strip().strip("'\"[]").strip() if match else ""
    return value if value and len(value) <= 300 and ":" not in value[:5] else None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source, known from headers alone."""

    name: str
    shape: tuple[int, ...]
    # of its values: "bfloat16" | "float16" | "float32"; float32 where others would round
    dtype: str
    stored: str  # for people: "bf16", "AWQ int4 g128", "Q4_K", "fp8 128x128"
    stored_bytes: int  # with scales, zero points and the like
    lossless: MLXFormat | None = None  # of its codes; None: there are values only
    scales_dtype: str = "float16"  # of affine ones in Packed, unless they need float32


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in an MLX format, as mx.dequantize takes it; stacked experts along axis 0."""

    weight: mx.array  # (..., out, in * bits / 32) uint32
    scales: mx.array  # (..., out, in / group_size); affine: float16, bfloat16 or, where neither
    # holds them exactly, float32, which the writer rounds; mxfp4, mxfp8, nvfp4: uint8
    biases: mx.array | None  # as scales; None unless affine


@dataclass(frozen=True, slots=True)
class TensorReader:
    """One tensor: what it is made of, and how."""

    info: SourceTensor
    parts: Sequence[StoredArray]  # the first decides the tensor's place in the order
    values: Callable[[slice], mx.array]  # of a range of the first axis, in info.dtype
    codes: Callable[[slice], Packed] | None = None  # packed as info.lossless says


Leaves = dict[str, StoredArray]
Claim = Callable[[str, Leaves], Iterable[TensorReader]]
"""Takes the arrays that a scheme knows out of the leaves of the module at a path."""


SideFiles = Callable[[], Mapping[str, bytes | Path]]
"""Tokenizer, chat template and the like: file name -> contents, or where they are."""


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A checkpoint that can be read tensor by tensor."""

    label: str  # as the user named it: a path or the name of a repository
    format: str  # for people: "safetensors", "AWQ", "GPTQ", "GGUF", "MLX" and so on
    config: Mapping[str, Any]  # config.json as transformers writes it, without its quantisation
    dtype: str  # of the activations that the model was made for
    readers: Mapping[str, TensorReader]  # in the order of their bytes, file by file
    side_files: SideFiles
    fingerprint: str  # changes with sizes, times, headers, metadata, and contents of side files
    notes: tuple[str, ...] = ()  # sentences for the user on what was left out or assumed
    origin: Origin = field(default_factory=Origin)
    reads_whole: bool = False  # a tensor is read whole, whatever rows are asked for
    as_made: bool = False  # tensors are those that mlx-lm's definition makes of a checkpoint
    exact_dtype: str | None = None  # that holds all numbers as they are; None: `dtype` does
    tensors: Mapping[str, SourceTensor] = field(init=False)

    def __post_init__(self) -> None:
        """Raise CheckpointError where there are no tensors."""
        if not self.readers:
            raise CheckpointError(f"{self.label} has no tensors.")
        infos = {name: reader.info for name, reader in self.readers.items()}
        object.__setattr__(self, "tensors", MappingProxyType(infos))

    def read(self, name: str, rows: slice | None = None) -> mx.array:
        """The values of a tensor, or of a range of its first axis, in SourceTensor.dtype.

        Memory is that of the values asked for and, while they are made from codes, up to three
        times as much again (12 bytes a value): ask for rows of what is large. Files are mapped, so
        their pages are not held.
        """
        reader = self._reader(name)
        shape = reader.info.shape
        with np.errstate(all="ignore"):  # a damaged scale is an infinite value, not a warning
            return reader.values(_bounded(rows, shape[0], name) if shape else slice(None))

    def read_packed(self, name: str, rows: slice | None = None) -> Packed:
        """The codes of a tensor, or of a range of its first axis, in the format `lossless`."""
        reader = self._reader(name)
        if reader.codes is None or reader.info.lossless is None:
            raise CheckpointError(
                f"{name} is stored as {reader.info.stored}, which no MLX format holds; read its "
                "values."
            )
        with np.errstate(all="ignore"):
            packed = reader.codes(_bounded(rows, reader.info.shape[0], name))
            if _may_overflow(packed, reader.info.lossless) and not _is_finite(reader):
                raise CheckpointError(f"{name} holds NaN or infinity: the checkpoint is damaged.")
        return packed

    def _reader(self, name: str) -> TensorReader:
        if name not in self.readers:
            raise CheckpointError(f"{self.label} has no tensor {name!r}.")
        return self.readers[name]


def _bounded(rows: slice | None, length: int, name: str) -> slice:
    start, stop, step = (rows or slice(None)).indices(length)
    if step != 1:
        raise ValueError(f"rows of {name} come with step {step}; expected 1")
    return slice(start, max(start, stop))


_OVERFLOW = {"mxfp4": 253, "mxfp8": 246}  # scale bytes from which code x scale may


def _may_overflow(packed: Packed, form: MLXFormat) -> bool:
    """Whether some product of code and scale may be infinite or NaN, by the bytes alone.

    Affine scales are checked where they are read. E8M0 has NaN (255), and its largest powers
    overflow float32 with the largest codes; E4M3 has NaN (0x7F, either sign) and no infinity.
    """
    if form.mode == "affine":
        return False
    scales = np.asarray(as_numpy(packed.scales), np.uint8)
    if form.mode == "nvfp4":
        return bool(((scales & 0x7F) == 0x7F).any())
    if bool((scales >= _OVERFLOW[form.mode]).any()):
        return True
    codes = as_numpy(packed.weight).reshape(-1).view(np.uint8)
    return form.mode == "mxfp8" and bool(((codes & 0x7F) == 0x7F).any())


def _is_finite(reader: TensorReader) -> bool:
    length = reader.info.shape[0]
    step = max(1, length // 8)
    parts = (slice(start, min(start + step, length)) for start in range(0, length, step))
    return all(bool(mx.isfinite(reader.values(rows)).all()) for rows in parts)


def majority_dtype(config: Mapping[str, Any], infos: Iterable[SourceTensor], default: str) -> str:
    """The dtype that the config states, or that most dense numbers have."""
    known = ("bfloat16", "float16", "float32")
    text = config.get("text_config")
    for stated in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if stated.get(key) in known:
                return str(stated[key])
    sizes = dict.fromkeys(known, 0)
    for info in infos:
        if info.lossless is None and info.stored in ("bf16", "f16", "f32"):
            sizes[info.dtype] += info.stored_bytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if any(sizes.values()) else default


_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<index>0|[1-9]\d{0,4})\.(?P<part>.+)")
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names


def expert_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Stacked name -> its experts in order.

    `model.layers.0.mlp.switch_mlp.up_proj.weight` -> [`model.layers.0.mlp.experts.0.up_proj...`].
    """
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            layer, dot, leaf = match["part"].rpartition(".")
            stacked = f"{match['block']}.switch_mlp.{_RENAMED.get(layer, layer)}{dot}{leaf}"
            groups.setdefault(stacked, {})[int(match["index"])] = name
    return {stacked: _in_order(stacked, experts) for stacked, experts in groups.items()}


def _in_order(stacked: str, experts: dict[int, str]) -> list[str]:
    missing = set(range(len(experts))) - experts.keys()
    if missing:
        raise CheckpointError(
            f"{stacked} would have {len(experts)} experts, but expert {min(missing)} is missing."
        )
    return [experts[index] for index in range(len(experts))]
