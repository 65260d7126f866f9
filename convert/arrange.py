"""Maps the tensors of a source to those of an MLX folder: names, stacked experts, tensors left out.

It works on names and shapes only. The result is checked against its architecture: the decoder is
built as it will be when it loads, from arrays of one number each. So a missing, misshapen or
unknown tensor is an error before hours of work.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedModelError
from ..models.config import ModelConfig, normalise
from ..models.jsonfields import Fields
from ..models.language import LanguageConfig
from ..models.registry import family
from ..models.towers.loading import tower_builder, tower_name
from ..models.weights.files import is_row_table
from ..models.weights.placing import NOWHERE
from ..models.weights.source import Checkpoint, Rename
from ..models.weights.weights import Weights
from ..models.zoo.definitions import Definition
from ..pooling.config import classifies, head_name
from .read import MLXFormat, Packed, SourceModel, SourceTensor, expert_groups

_TEXT = "language_model."  # before the names of a language model beside a tower
_NESTED = {  # where mlx-lm asks for text_config: model -> where it looks for their tensors
    "gemma3": _TEXT,
    "gemma3n": "model.language_",
    "llama4": _TEXT,
}
_ROWS = 8192  # that are compared at a time
_AS_MLX = {  # where its names are others: ours, its
    "afmoe": {
        ".mlp.gate.weight": ".mlp.router.gate.weight",
        ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
        ".mlp.switch_mlp.": ".mlp.experts.",
    },
    "dots1": {".mlp.switch_mlp.": ".mlp.experts."},
    "gemma4_text": {".switch_mlp.": ".experts.switch_glu."},
    "gpt_oss": {".mlp.switch_mlp.": ".mlp.experts."},
    "granitemoehybrid": {".block_sparse_moe.switch_mlp.": ".block_sparse_moe.experts."},
    "kimi_linear": {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
    "llama4_text": {".feed_forward.switch_mlp.": ".feed_forward.experts."},
    "minimax_m2": {".block_sparse_moe.gate.e_score_": ".block_sparse_moe.e_score_"},
    "nemotron_h": {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.": "backbone.",
        ".self_attn.": ".mixer.",
        ".switch_mlp.up_proj.": ".switch_mlp.fc1.",
        ".switch_mlp.down_proj.": ".switch_mlp.fc2.",
    },
}
_AS_MLX["nemotron_h_puzzle"] = _AS_MLX["nemotron_h"]
LAYER = re.compile(r"^(?:model\.|backbone\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_AHEAD = re.compile(r"(?:^|\.)(mtp[._].+)$")  # a module that predicts tokens further ahead
_PACKED = (".experts.gate_up_proj", ".experts.down_proj")  # stacks without ".weight"
_UNUSED = ("rotary_emb.inv_freq", "masked_bias")
_TABLES = ("pos_embed.weight", "position_embedding.weight")  # of a tower: they are no matrices


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output folder, before it is decided how it is stored."""

    name: str
    sources: tuple[str, ...]  # one, or one for each expert
    shape: tuple[int, ...]
    dtype: str  # of its values
    stored: str  # in the source, for people
    stored_bytes: int  # in the source
    lossless: MLXFormat | None = None
    scales_dtype: str = "float16"  # where codes are copied; float32: they are rounded
    dense: bool = False  # never stored quantised
    least_bits: int = 0  # beside those of recipes.py; 0: no limit
    ahead: bool = False  # of what predicts tokens further ahead, which a forward pass leaves out
    seeing: bool = False  # of the tower: what sees pictures

    @property
    def path(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def layer(self) -> int | None:
        """The decoder layer that it belongs to; None: none."""
        match = LAYER.search(self.path)
        return int(match[1]) if match else None

    @property
    def in_files(self) -> bool:
        """Whether it is a table whose rows are read from the files when tokens need them."""
        return is_row_table(self.name)

    @property
    def quantised(self) -> bool:
        return self.lossless is not None or self.stored not in ("bf16", "f16", "f32")

    @property
    def stored_bits(self) -> float:
        """Bits per weight in the source, with scales and the like."""
        return self.stored_bytes * 8 / max(1, self.num_weights)

    @property
    def num_weights(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ArrangedSource:
    """A source with the tensors that its output folder will have."""

    source: SourceModel
    config: LanguageConfig
    outputs: tuple[OutputTensor, ...]
    definition: Definition | None = None  # mlx-lm's, see zoo.py; None: a native family builds it

    @property
    def family_config(self) -> ModelConfig:
        assert isinstance(self.config, ModelConfig), self.config.model_type
        return self.config

    def blocks(self, output: OutputTensor, max_weights: int) -> Iterator[mx.array]:
        """The values (R, in_dims) in order, about `max_weights` numbers at a time.

        One expert of a stack, or one row, is the least that is read at once.
        """
        for name in output.sources:
            info = self.source.tensors[name]
            if len(info.shape) < 2:
                yield self.source.read(name).reshape(1, -1)
                continue
            step = max(1, max_weights // prod(info.shape[1:]))
            for start in range(0, info.shape[0], step):
                rows = slice(start, min(start + step, info.shape[0]))
                whole = rows == slice(0, info.shape[0])
                block = self.source.read(name, None if whole else rows)
                yield block.reshape(-1, info.shape[-1])

    def packed_blocks(self, output: OutputTensor, max_weights: int) -> Iterator[Packed]:
        """The codes in order, about `max_weights` numbers at a time, as `blocks` has values."""
        for name in output.sources:
            shape = self.source.tensors[name].shape
            step = shape[0] if self.source.reads_whole else max_weights // prod(shape[1:])
            for start in range(0, shape[0], max(1, step)):
                yield self.source.read_packed(name, slice(start, start + max(1, step)))

    def whole(self, output: OutputTensor) -> mx.array:
        parts = [self.source.read(name) for name in output.sources]
        whole = parts[0] if len(parts) == 1 else mx.stack(parts)
        mx.eval(whole)
        return whole


def arrange(source: SourceModel) -> ArrangedSource:
    config = normalise(source.config)
    builder = family(config.model_type)
    if not builder.packed_experts.outputs_first:
        _check_experts(source)
    rename = builder.tensor_name
    if config.tie_word_embeddings and not _is_tied(source, rename):
        config = replace(config, tie_word_embeddings=False)
    if not config.tie_word_embeddings and _gives_vectors(source, rename):
        config = replace(config, without_lm_head=True)
    sees = has_tower(source)
    prefix = _TEXT if sees else _prefix(source)
    unread = tuple(builder.unread(config, range(config.num_layers)))
    names = [n for n in source.tensors if not (unread and (rename(n) or "").startswith(unread))]
    heads = _heads(source)
    groups = expert_groups([name for name in names if name not in heads])
    stacked_as = {expert: name for name, experts in groups.items() for expert in experts}
    outputs = {output.name: output for output in heads.values()}
    for target in dict.fromkeys(stacked_as.get(name, name) for name in names if name not in heads):
        infos = [source.tensors[name] for name in groups.get(target, [target])]
        of_tower = sees and tower_name(target) is not None
        made = _of_tower(infos, target) if of_tower else _arranged(infos, target, config, prefix)
        if made is not None and made.name in outputs:
            raise CheckpointError(f"Two tensors of {source.label} become {made.name!r}.")
        if made is not None:
            outputs[made.name] = made
    if all(output.ahead for output in outputs.values()):
        raise CheckpointError(f"{source.label} has no tensors of a language model.")
    shapes = {name: output.shape for name, output in outputs.items()}
    check_complete(config, shapes, source.label)
    if sees:
        check_tower(Fields(source.config, "config.json"), shapes, source.label)
    return ArrangedSource(source, config, tuple(outputs.values()))


def _heads(source: SourceModel) -> dict[str, OutputTensor]:
    """The tensors of a classification head, by the source's names; they stay as they are."""
    if not classifies(Fields(source.config, "config.json")):
        return {}
    names = {name: head_name(name) for name in source.tensors}
    return {
        name: replace(output_of(ours, [source.tensors[name]], name), dense=True, lossless=None)
        for name, ours in names.items()
        if ours is not None
    }


def _gives_vectors(source: SourceModel, rename: Rename) -> bool:
    """Whether the source has no output matrix because it gives vectors or scores."""
    has_matrix = any(rename(name) == "lm_head.weight" for name in source.tensors)
    scores = classifies(Fields(source.config, "config.json"))
    return not has_matrix and (scores or "modules.json" in source.side_files())


def has_tower(source: SourceModel) -> bool:
    known = tower_builder(Fields(source.config, "config.json")) is not None
    return known and any(tower_name(name) is not None for name in source.tensors)


def _prefix(source: SourceModel) -> str:
    """The prefix of tensor names in the output: that of the text inside a larger model, or none."""
    nested = language_config(source.config) is not None
    return _NESTED[source.config["model_type"]] if nested else ""


def _of_tower(infos: list[SourceTensor], target: str) -> OutputTensor:
    name = target.removeprefix("model.")
    if name.startswith("visual."):
        name = f"vision_tower.{name.removeprefix('visual.')}"
    made = replace(output_of(name, infos, target), seeing=True)
    is_matrix = len(made.shape) == 2 and not name.endswith(_TABLES)
    return made if is_matrix else replace(made, dense=True, lossless=None)


def _arranged(
    infos: list[SourceTensor], target: str, config: ModelConfig, prefix: str
) -> OutputTensor | None:
    """The output of a tensor, or of the experts of a stack; None: it is left out."""
    builder = family(config.model_type)
    ours = builder.tensor_name(target)
    ahead = _ahead(target) if ours is None else None
    name = ahead or ours
    tied = config.tie_word_embeddings and (name or "").startswith("lm_head.")
    if name is None or tied or name.endswith(_UNUSED):
        return None
    for old, theirs in _AS_MLX.get(config.model_type, {}).items():
        name = name.replace(old, theirs)
    made = output_of(name if ahead else prefix + name, infos, target)
    if ahead or (made.layer is not None and made.layer >= config.num_layers):
        made = replace(made, ahead=True)
    return (
        replace(made, dense=True, lossless=None)
        if made.path.endswith(builder.dense_matrices)
        else made
    )


def _check_experts(source: SourceModel) -> None:
    """Raise UnsupportedModelError for stacks that have inputs before outputs, as on the hub."""
    for name in source.tensors:
        if name.endswith(_PACKED):
            raise UnsupportedModelError(
                f"{name!r} of {source.label} is a stack of experts with inputs before outputs, "
                "which cannot be converted here. Use the checkpoint as it is, or convert it with "
                "`mlx_lm.convert`."
            )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part about language of a config that stays nested in the output; None: none does."""
    inner = config.get("text_config")
    return inner if config.get("model_type") in _NESTED and isinstance(inner, Mapping) else None


def _is_tied(source: SourceModel, rename: Rename) -> bool:
    ours = {rename(name): name for name in source.tensors}
    head, table = ours.get("lm_head.weight"), ours.get("model.embed_tokens.weight")
    if head is None or table is None:
        return True
    shape = source.tensors[head].shape
    if shape != source.tensors[table].shape:
        return False
    for start in range(0, shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, shape[0]))
        if not mx.array_equal(source.read(head, rows), source.read(table, rows)):
            return False
    return True


def _ahead(name: str) -> str | None:
    """The output's name of a tensor of an `mtp` module, wherever the source keeps it; else None."""
    match = _AHEAD.search(name)
    if match is None:
        return None
    return match[1] + (".weight" if name.endswith(_PACKED) else "")


def output_of(name: str, infos: list[SourceTensor], target: str) -> OutputTensor:
    first = infos[0]
    if any((info.shape, info.dtype) != (first.shape, first.dtype) for info in infos):
        raise CheckpointError(f"The experts of {target} differ in shape or dtype.")
    formats = {info.lossless for info in infos}
    return OutputTensor(
        name=name,
        sources=tuple(info.name for info in infos),
        shape=first.shape if target == first.name else (len(infos), *first.shape),
        dtype=first.dtype,
        stored=first.stored,
        stored_bytes=sum(info.stored_bytes for info in infos),
        lossless=first.lossless if len(formats) == 1 else None,
        scales_dtype=first.scales_dtype,
    )


def check_tower(config: Fields, shapes: Mapping[str, tuple[int, ...]], label: str) -> None:
    """Raise CheckpointError unless the tower of a config has exactly these tensors. Reads none."""
    build = tower_builder(config)
    assert build is not None
    arrays = {name: mx.zeros(shape) for name, shape in shapes.items()}  # never computed
    weights = Weights(Checkpoint(arrays, tower_name), NOWHERE, dtype="float32")
    try:
        build(config, weights)
        weights.finish()
    except CheckpointError as error:
        raise CheckpointError(f"{label}, the part that sees pictures: {error}") from error


def check_complete(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], label: str) -> None:
    module = family(config.model_type)
    scores = classifies(config.fields)
    arrays = {
        name: mx.zeros(shape)  # never computed
        for name, shape in shapes.items()
        if not (scores and head_name(name))
    }
    weights = Weights(Checkpoint(arrays, module.tensor_name), NOWHERE, dtype="float32")
    try:
        module.build(replace(config, quantization=None), weights)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from error
