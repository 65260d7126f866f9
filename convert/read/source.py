"""The interface between checkpoint formats and the converter: `Source`, `TensorInfo`, `Packed`.

Names. `tensors` are named as transformers names them: `model.layers.0.self_attn.q_proj.weight`.
Experts that a source stores one by one keep their names (`...mlp.experts.7.up_proj.weight`, each
`(out, in)`); expert_groups() says which of them make up which of MLX's switch layers, and
arrange.py stacks them. Experts that a source stores stacked come stacked,
`(num_experts, out, in)`, under the name of MLX's switch layer: `...mlp.switch_mlp.up_proj.weight`,
and for gpt_oss `...mlp.experts.gate_proj.weight`, gate and up apart, with `...gate_proj.bias`,
whatever the source (dense, MXFP4, GGUF) calls them. Both mlx-lm and mlxinfer load these names as
they are.

Values are those of transformers too: rows of Q and K for its rotary embedding, Gemma's norms less
one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ...errors import CheckpointError
from ...models.quantization import QuantFormat as MLXFormat
from .origin import Origin

__all__ = ["MLXFormat", "Packed", "Source", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a source, known from headers alone."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of read(): "bfloat16" | "float16" | "float32"; float32 where others would round
    stored: str  # for people: "bf16", "AWQ int4 g128", "Q4_K", "fp8 128x128"
    stored_bytes: int  # with scales, zero points and the like
    lossless: MLXFormat | None = None  # read_packed() gives this format; None: values only
    scales_exact: bool = True  # False: codes are kept, but the scales need float32 to be exact
    scales_dtype: str = "float16"  # of affine ones in read_packed(), unless they need float32


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in an MLX format, as mx.dequantize takes it; stacked experts along axis 0."""

    weight: mx.array  # (..., out, in * bits / 32) uint32
    scales: mx.array  # (..., out, in / group_size); affine: float16, bfloat16 or, where neither
    # holds them exactly, float32, which the writer rounds; mxfp4, mxfp8, nvfp4: uint8
    biases: mx.array | None  # as scales; None unless affine


class Source(Protocol):
    """A checkpoint that can be read tensor by tensor."""

    @property
    def label(self) -> str:
        """What the user gave: a path or the name of a repository."""
        ...

    @property
    def format(self) -> str:
        """For people: "safetensors", "AWQ", "GPTQ", "GGUF", "MLX" and so on."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as transformers writes it, without what it says of quantisation."""
        ...

    @property
    def dtype(self) -> str:
        """Of the activations the model was made for: "bfloat16" | "float16" | "float32"."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """In the order of their bytes, shard by shard: reading in this order is sequential."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever files of the source change: sizes, times and places, headers, metadata,
        and the contents of tokenizer and config files."""
        ...

    @property
    def origin(self) -> Origin:
        """Whence it comes, as its card or its metadata say."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on what was left out or assumed."""
        ...

    def read(self, name: str, rows: slice | None = None) -> mx.array:
        """The values of a tensor, or of a range of its first axis, in TensorInfo.dtype.

        Memory is that of the values asked for and, while they are made from codes, up to three
        times as much again (12 bytes a value): ask for rows of what is large. Files are mapped, so
        their pages are not held. Raises CheckpointError for data that cannot be right.
        """
        ...

    def read_packed(self, name: str) -> Packed:
        """The codes of a tensor in the format `lossless`, which is not None."""
        ...

    def forget(self, names: Iterable[str]) -> None:
        """These tensors will not be read again: a downloaded shard may go when all of its have."""
        ...

    def side_files(self) -> dict[str, bytes | Path]:
        """Tokenizer, chat template and the like: file name -> contents, or where they are."""
        ...

    def close(self) -> None:
        """Give back what a download left on the disk."""
        ...


_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<index>0|[1-9]\d{0,4})\.(?P<part>.+)")
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names


def expert_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Stacked name -> its experts in order.

    `model.layers.0.mlp.switch_mlp.up_proj.weight` -> [`model.layers.0.mlp.experts.0.up_proj...`].

    Raises:
        CheckpointError: an expert is missing.
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(_stacked_name(match), {})[int(match["index"])] = name
    return {stacked: _in_order(stacked, experts) for stacked, experts in found.items()}


def _stacked_name(match: re.Match[str]) -> str:
    layer, dot, leaf = match["part"].rpartition(".")
    return f"{match['block']}.switch_mlp.{_RENAMED.get(layer, layer)}{dot}{leaf}"


def _in_order(stacked: str, experts: dict[int, str]) -> list[str]:
    missing = set(range(len(experts))) - experts.keys()
    if missing:
        raise CheckpointError(
            f"{stacked} would have {len(experts)} experts, but expert {min(missing)} is missing."
        )
    return [experts[index] for index in range(len(experts))]
