"""Runs a model one layer at a time with the library's own layers, and observes their inputs.

Hidden states of all texts go through layer after layer; a layer's weights are read, used for all of
them, and dropped. Sequences are whole, as rows of a pass without a KV cache are (pooling/segments).
Where MLX runs on the CPU layers are computed in float32, which its matrix products are fastest in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...cache_specs import BlockSpec, KVSpec, LatentSpec, PooledSpec, StateSpec
from ...errors import ConversionError
from ...layers.latent_attention import LatentProjection
from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ...layers.moe import Choose, ExpertProjection, MoE, Routed
from ...layers.ngrams import Int64s
from ...layers.step import Step
from ...metal_kernels.paged_attention import Softmax
from ...metal_kernels.variants import KernelUse, ModelForm
from ...models.config import ModelConfig
from ...models.decoder import Model
from ...models.registry import family
from ...models.weights.source import Checkpoint
from ...models.weights.weights import Weights
from ...pooling.segments import Masks, RowGroup, SegmentAttention, SegmentStates
from ..arrange import ArrangedSource, OutputTensor
from ..arrays import mx_dtype

Change = Callable[[mx.array], mx.array]
See = Callable[[Sequence[str], mx.array, mx.array | None], None]
"""Is shown what flows into matrices: their paths, the inputs x (..., in_dims) that they share, and
for experts, where x is (..., 1, in_dims), which expert each row goes to, (...)."""


class ObservedProjection(Projection):
    """A projection that shows its inputs to an observer."""

    __slots__ = ("paths", "projection", "see")

    def __init__(self, projection: Projection, paths: Sequence[str], see: See) -> None:
        self.projection = projection
        self.paths = tuple(paths)
        self.see = see

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        self.see(self.paths, x, None)
        return self.projection(x, residual)


class ObservedExperts:
    """The same for stacked experts."""

    __slots__ = ("experts", "paths", "see")

    def __init__(self, experts: ExpertProjection, paths: Sequence[str], see: See) -> None:
        self.experts = experts
        self.paths = tuple(paths)
        self.see = see

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        self.see(self.paths, x, routed.experts)
        return self.experts(x, routed)


def observe_experts(mlp: FeedForward, paths: Sequence[str], see: See) -> None:
    """Watch the experts of a mixture, stacked at `paths`."""
    if not isinstance(mlp, MoE):
        return
    down = [path for path in paths if path.endswith("down_proj")]
    others = [path for path in paths if not path.endswith("down_proj")]
    mlp.gate_up_proj = ObservedExperts(mlp.gate_up_proj, others, see)
    mlp.down_proj = ObservedExperts(mlp.down_proj, down, see)
    mlp.choose = WithoutGradients(mlp.choose)


class WithoutGradients:
    """The experts of each token without gradients, which indices have none of."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: they have no gradients."""
        return []

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        weights, experts = self._choose(logits)
        return mx.stop_gradient(weights), mx.stop_gradient(experts)


class WholeLatents:
    """Latent attention over whole sequences, expanded."""

    def __init__(self, expanded: SegmentAttention) -> None:
        self._expanded = expanded

    def attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        *,
        projection: LatentProjection,
        scale: float,
        index: object = None,
        choice: object = None,
    ) -> mx.array:
        """-> (T, H, dv), see LatentCache; no index leaves any of so few tokens out."""
        k_nope, values = projection.expand(latent)
        k_rope = mx.broadcast_to(k_rope[:, None], q_rope.shape)
        keys = mx.concatenate([k_nope, k_rope], axis=-1)
        queries = mx.concatenate([q_nope, q_rope], axis=-1)
        return self._expanded.attend(queries, keys, values, Softmax(scale)).reshape(values.shape)


def _keys_values(spec: KVSpec, group: RowGroup, masks: Masks) -> SegmentAttention:
    if spec.chunked and spec.window is not None:
        _check_length(group, spec.window)
    return SegmentAttention([group], masks, spec.window)


def _states(spec: StateSpec, group: RowGroup, masks: Masks) -> SegmentStates:
    return SegmentStates([group], spec)


class WholeBlocks:
    """The index of a layer over sequences so short that it leaves nothing out."""

    def choose(self, *index: object) -> None:
        """None: every token sees all before it."""


def _blocks(spec: BlockSpec, group: RowGroup, masks: Masks) -> WholeBlocks:
    _check_length(group, spec.num_ranked * spec.block)
    return WholeBlocks()


def _pools(spec: PooledSpec, group: RowGroup, masks: Masks) -> WholeBlocks:
    _check_length(group, spec.num_ranked * spec.ratio)
    return WholeBlocks()


def _latents(spec: LatentSpec, group: RowGroup, masks: Masks) -> WholeLatents:
    if spec.index_dim:
        _check_length(group, spec.num_ranked)
    return WholeLatents(SegmentAttention([group], masks, spec.window))


def _check_length(group: RowGroup, most: int) -> None:
    """Raise ConversionError where an index would leave tokens out."""
    if group.length > most:
        raise ConversionError(
            f"This model sees at most {most} tokens of a text, and calibration needs texts of "
            f"{group.length}; convert it without calibration (--calibration none)."
        )


STAND_INS: dict[type, Callable[[Any, RowGroup, Masks], Any]] = {
    BlockSpec: _blocks,
    KVSpec: _keys_values,
    LatentSpec: _latents,
    PooledSpec: _pools,
    StateSpec: _states,
}
"""Spec of a layer -> the class that takes the place of its cache."""


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_ROWS = 2048  # tokens that go through a layer at once
NEAR_ROWS = 16  # of a table, between two that are read together
_NOT_BY_LAYER = "eos_token_ids"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """One decoder layer, ready to be run."""

    model: Model

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """x (N * length, width) of ids (N, length) -> the same after the layer, not evaluated."""
        group, masks = RowGroup(0, *ids.shape), Masks(bidirectional=False)
        caches = {
            mixer: STAND_INS[type(mixer.spec)](mixer.spec, group, masks)
            for mixer in self.model.mixers
        }
        positions = mx.arange(x.shape[0]) % ids.shape[1]
        step = Step(positions.astype(mx.int32), caches)
        step.ids = ids.flatten()
        return self.model.layers[0](x, None, step)[0]


@dataclass(slots=True)
class HiddenStates:
    """Hidden states of sequences of one length, which a layer replaces part by part."""

    parts: list[mx.array]  # (N * length, width) each
    ids: list[mx.array]  # (N, length) of each part's tokens

    @classmethod
    def of(cls, x: mx.array, sequences: Sequence[Sequence[int]]) -> "HiddenStates":
        """x (N * length, width) of N sequences in parts of about MAX_ROWS rows."""
        ids = mx.array(np.array(sequences, np.int32))
        length = ids.shape[1]
        count = max(1, MAX_ROWS // length)
        starts = range(0, len(ids), count)
        parts = [x[start * length : (start + count) * length] for start in starts]
        return cls(parts, [ids[start : start + count] for start in starts])

    @property
    def length(self) -> int:
        return self.ids[0].shape[1]

    def advance(self, layer: LayerRun, tell: Callable[[int], None] = lambda _: None) -> None:
        """Go through a layer; `tell` is called after each part, with 1."""
        for index, part in enumerate(self.parts):
            self.parts[index] = layer(part, self.ids[index])
            mx.eval(self.parts[index])
            tell(1)

    def picked(self, sequences: Sequence[int]) -> mx.array:
        """Those of some of the sequences, (len(sequences) * length, width)."""
        per_part = max(1, self.parts[0].shape[0] // self.length)
        places = (divmod(number, per_part) for number in sequences)
        size = self.length
        return mx.concatenate([self.parts[p][at * size : (at + 1) * size] for p, at in places])


class StreamedModel:
    """The layers of an arranged source, built when they are asked for.

    `see`: is shown what flows into the matrices of all layers; None: nothing is.
    """

    def __init__(self, arranged: ArrangedSource) -> None:
        self._arranged = arranged
        self.see: See | None = None
        self.config = arranged.family_config
        self._module = family(self.config.model_type)
        assert self._module.whole_because(self.config) is None, self.config.model_type
        self._by_name: dict[str, OutputTensor] = {
            self._module.tensor_name(output.name): output
            for output in arranged.outputs
            if not (output.ahead or output.seeing)
        }
        norm = f"{self._module.final_norm}."
        self._norms = [name for name in self._by_name if name.startswith(norm)]
        self.tied = HEAD not in self._by_name

    def output(self, name: str) -> OutputTensor:
        return self._by_name[name]

    @property
    def head(self) -> OutputTensor:
        return self._by_name[EMBEDDING if self.tied else HEAD]

    def name_of(self, output: OutputTensor) -> str:
        name: str = self._module.tensor_name(output.name)
        return name

    def outputs_of(self, index: int) -> dict[str, OutputTensor]:
        front = f"model.layers.{index}."
        return {name: out for name, out in self._by_name.items() if name.startswith(front)}

    def read_layer(self, index: int) -> dict[str, mx.array]:
        return {
            name: self.zeros(out) if out.in_files else self._computed(self._arranged.whole(out))
            for name, out in self.outputs_of(index).items()
        }

    def zeros(self, output: OutputTensor, *, rows: int | None = None) -> mx.array:
        """As a tensor, or as its first rows; they take no memory unless they are evaluated."""
        shape = output.shape if rows is None else (rows, *output.shape[1:])
        return self._computed(mx.zeros(shape, mx_dtype(self._arranged.source.dtype)))

    def states(
        self, sequences: Sequence[Sequence[int]], change: Change = lambda rows: rows
    ) -> HiddenStates:
        """The inputs of the first layer for sequences of one length.

        `change`: of the rows of the embedding.
        """
        ids = [token for sequence in sequences for token in sequence]
        table = change(self.rows(self.output(EMBEDDING), np.unique(np.array(ids)).tolist()))
        return HiddenStates.of(self.embed(ids, table), sequences)

    def layer(self, index: int, tensors: Mapping[str, mx.array]) -> LayerRun:
        config = self._only(range(index, index + 1))
        named = {name.replace(f".{index}.", ".0.", 1): array for name, array in tensors.items()}
        model = self._built(config, named, index)
        experts = [
            n.removesuffix(".weight").replace(f".{index}.", ".0.", 1)
            for n, out in self.outputs_of(index).items()
            if len(out.shape) == 3
        ]
        observe_experts(model.layers[0].mlp, experts, self._shown(index))
        return LayerRun(model)

    def _shown(self, index: int) -> See:
        """Shows `see` what layer `index` sees, which is built as layer 0."""

        def show(paths: Sequence[str], x: mx.array, experts: mx.array | None) -> None:
            if self.see is not None:
                named = [path.replace(".0.", f".{index}.", 1) for path in paths]
                self.see(named, x, experts)

        return show

    def _built(self, config: ModelConfig, tensors: dict[str, mx.array], index: int = 0) -> Model:
        def wrap(made: Projection, paths: Sequence[str]) -> Projection:
            return ObservedProjection(made, paths, self._shown(index))

        checkpoint = Checkpoint(self._ends() | tensors, self._module.tensor_name)
        table = partial(SourceTable, self, index)
        made: Model = self._module.build(config, Weights(checkpoint, wrap=wrap, table=table))
        return made

    def embed(self, ids: Sequence[int], table: mx.array | None = None) -> mx.array:
        """ids -> (T, hidden), scaled as the family does; `table`: rows to use for unique ids."""
        unique, places = np.unique(np.array(ids), return_inverse=True)
        if table is None:
            table = self.rows(self.output(EMBEDDING), unique.tolist())
        rows = self._computed(table)
        model = self._without_layers(len(unique), {EMBEDDING: rows})
        model.norm = lambda hidden: hidden
        x = model(mx.array(places.astype(np.int32)), Step(mx.zeros(len(ids), mx.int32), {}))
        mx.eval(x)
        return x

    def rows(self, output: OutputTensor, ids: Sequence[int]) -> mx.array:
        """Rows (len(ids), in_dims) of a matrix, for ids in rising order. Only they are read."""
        parts = []
        gap = output.shape[0] if self._arranged.source.reads_whole else NEAR_ROWS
        for first, last in _spans(ids, gap):
            part = self._arranged.source.read(output.sources[0], slice(first, last + 1))
            inside = [token - first for token in ids if first <= token <= last]
            mx.eval(part := part[mx.array(inside, mx.int32)])
            parts.append(part)
        return mx.concatenate(parts)

    def final_norm(self) -> Callable[[mx.array], mx.array]:
        """The function that makes float32 inputs (T, hidden) of the output projection."""
        whole = self._arranged.whole
        norms = {name: self._computed(whole(self.output(name))) for name in self._norms}
        model = self._without_layers(1, norms)

        def normed(x: mx.array) -> mx.array:
            states = model.norm(x).astype(mx.float32)
            mx.eval(states)
            return states

        return normed

    def _computed(self, array: mx.array) -> mx.array:
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        return array.astype(mx.float32) if on_cpu else array

    def _without_layers(self, vocab: int, tensors: dict[str, mx.array]) -> Model:
        return self._built(replace(self._only(range(0)), vocab_size=vocab), tensors)

    def _ends(self) -> dict[str, mx.array]:
        ends = {name: self.zeros(self.output(name)) for name in self._norms}
        return ends | {EMBEDDING: self.zeros(self.output(EMBEDDING), rows=1)}

    def _only(self, layers: range) -> ModelConfig:
        config = self.config
        changed: dict[str, Any] = {
            field.name: value[layers.start : layers.stop]
            for field in fields(config)
            if isinstance(value := getattr(config, field.name), tuple)
            and len(value) == config.num_layers
            and field.name != _NOT_BY_LAYER
        }
        changed |= {"num_layers": len(layers), "vocab_size": 1, "tie_word_embeddings": True}
        changed["first_layer"] = layers.start
        return replace(config, **changed, quantization=None)


class SourceTable:
    """A table that stays in the source's files; see `layers.ngrams.RowTable`.

    Args:
        index: of the layer, which is built as layer 0.
        paths: of the table's parts, one behind the other.
    """

    def __init__(
        self, streamed: StreamedModel, index: int, paths: Sequence[str], dtype: mx.Dtype
    ) -> None:
        self._streamed, self._dtype = streamed, dtype
        names = [f"{path.replace('.0.', f'.{index}.', 1)}.weight" for path in paths]
        self._parts = [streamed.output(name) for name in names]
        self._ends = np.cumsum([part.shape[0] for part in self._parts])
        self.num_rows = int(self._ends[-1])
        self.row_bytes = self._parts[0].shape[1] * 4

    def read(self, rows: Int64s, memory: memoryview) -> None:
        once, places = np.unique(rows, return_inverse=True)
        of_part = np.split(once, np.searchsorted(once, self._ends[:-1]))
        starts = [0, *self._ends[:-1].tolist()]
        read = [
            self._streamed.rows(part, (rows_of_part - start).tolist()).astype(mx.float32)
            for part, rows_of_part, start in zip(self._parts, of_part, starts, strict=True)
            if len(rows_of_part)
        ]
        values = np.array(mx.concatenate(read))
        np.frombuffer(memory, np.float32).reshape(len(rows), -1)[:] = values[places]

    def decode(self, stored: mx.array) -> mx.array:
        return stored.view(mx.float32).astype(self._dtype)


def _spans(ids: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """First and last id of each run in which neighbours lie at most `gap` apart."""
    starts = [i for i, token in enumerate(ids) if i == 0 or token - ids[i - 1] > gap]
    ends = [*(i - 1 for i in starts[1:]), len(ids) - 1]
    return [(ids[first], ids[last]) for first, last in zip(starts, ends, strict=True)]
