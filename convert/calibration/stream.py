"""Runs a model one layer at a time with the library's own layers, and observes their inputs.

Hidden states of all texts go through layer after layer; a layer's weights are read, used for all of
them, and dropped. Attention sees whole sequences, so there is no KV cache.

Observed are the second moments of each matrix's inputs. An error in a weight costs its square times
the mean square of the input that it is multiplied with, so the moments weigh the squared errors
when scales are chosen (llama.cpp calls them the importance matrix).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ...layers.moe import Choose, ExpertProjection, MoE, Routed
from ...layers.step import Step
from ...metal_kernels.variants import KernelUse, ModelForm
from ...models.config import ModelConfig
from ...models.decoder import Model
from ...models.registry import family
from ...models.weights.source import Checkpoint, Rename
from ...models.weights.weights import Weights
from ..arrange import ArrangedSource, OutputTensor
from ..arrays import Floats, mx_dtype
from .caches import whole_sequences

LEAST = 1e-4  # of the mean: a channel that the text never used still has some weight


class Observer(Protocol):
    """Is shown what flows into the matrices of a layer."""

    def see(self, paths: Sequence[str], x: mx.array, experts: mx.array | None = None) -> None:
        """Inputs x (..., in_dims) of these matrices.

        Args:
            paths: matrices that share them.
            x: for experts (..., 1, in_dims).
            experts: which expert each goes to, (...); None: these are no experts.
        """
        ...


class Moments:
    """Sums of squares by path; counts only while `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self._squares: dict[str, Floats] = {}

    def see(self, paths: Sequence[str], x: mx.array, experts: mx.array | None = None) -> None:
        """Record inputs x (..., in_dims) of these matrices."""
        if not self.watching:
            return
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        squares = np.array(mx.sum(flat * flat, axis=0))
        for path in paths:
            known = self._squares.get(path)
            self._squares[path] = squares if known is None else known + squares

    def taken(self, path: str) -> Floats | None:
        """Remove and return the moments at `path`, (in_dims,), of mean 1; None: there are none."""
        squares = self._squares.pop(path, None)
        return None if squares is None else normalised(squares)


class ObservedProjection:
    """A projection that shows its inputs to an observer."""

    __slots__ = ("observer", "paths", "projection")

    def __init__(self, projection: Projection, paths: Sequence[str], observer: Observer) -> None:
        self.projection = projection
        self.paths = tuple(paths)
        self.observer = observer

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        self.observer.see(self.paths, x)
        return self.projection(x, residual)


class ObservedExperts:
    """The same for stacked experts."""

    __slots__ = ("experts", "observer", "paths")

    def __init__(self, experts: ExpertProjection, paths: Sequence[str], observer: Observer) -> None:
        self.experts = experts
        self.paths = tuple(paths)
        self.observer = observer

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        self.observer.see(self.paths, x, routed.experts)
        return self.experts(x, routed)


def observed_weights(
    tensors: Mapping[str, mx.array], rename: Rename, observer: Observer
) -> Weights:
    """Weights with projections that show their inputs to an observer."""

    def wrap(made: Projection, paths: Sequence[str]) -> Projection:
        return ObservedProjection(made, paths, observer)

    return Weights(Checkpoint(tensors, rename), wrap=wrap)


def observe_experts(mlp: FeedForward, paths: Sequence[str], observer: Observer) -> None:
    """Watch the experts of a mixture, stacked at `paths`."""
    if not isinstance(mlp, MoE):
        return
    down = [path for path in paths if path.endswith("down_proj")]
    others = [path for path in paths if not path.endswith("down_proj")]
    mlp.gate_up_proj = ObservedExperts(mlp.gate_up_proj, others, observer)
    mlp.down_proj = ObservedExperts(mlp.down_proj, down, observer)
    mlp.choose = WithoutGradients(mlp.choose)


class WithoutGradients:
    """The experts of each token without gradients, which indices have none of."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: they have no gradients."""
        return []

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """As of `Choose`."""
        weights, experts = self._choose(logits)
        return mx.stop_gradient(weights), mx.stop_gradient(experts)


def normalised(squares: Floats) -> Floats:
    """Sums of squares (in_dims,) as weights of mean 1."""
    mean = squares.mean()
    if not mean > 0:
        return np.ones_like(squares)
    found: Floats = np.maximum(squares / mean, np.float32(LEAST)).astype(np.float32)
    return found / found.mean()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_ROWS = 4096  # tokens that go through a layer at once
_NOT_BY_LAYER = "eos_token_ids"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """One decoder layer, ready to be run."""

    model: Model

    def __call__(self, x: mx.array, length: int) -> mx.array:
        """x (N * length, hidden): N sequences -> the same after the layer, evaluated."""
        sequences = max(1, MAX_ROWS // length) * length
        parts = []
        for start in range(0, x.shape[0], sequences):
            y = self.part(x[start : start + sequences], length)
            mx.eval(y)
            parts.append(y)
        return mx.concatenate(parts)

    def part(self, x: mx.array, length: int) -> mx.array:
        """The same at once, not evaluated."""
        caches = {mixer: whole_sequences(mixer.spec, length) for mixer in self.model.mixers}
        positions = mx.arange(x.shape[0]) % length
        return self.model.layers[0](x, None, Step(positions.astype(mx.int32), caches))[0]


class StreamedModel:
    """The layers of an arranged source, built when they are asked for."""

    def __init__(self, arranged: ArrangedSource, observer: Observer) -> None:
        self._arranged = arranged
        self._module = family(arranged.config.model_type)
        if not self._module.runs_by_layer(arranged.config):
            raise UnsupportedModelError(
                f"Layers of {arranged.config.model_type} cannot be run one by one, which "
                "calibration does; convert without it."
            )
        self._norm = f"{self._module.final_norm}.weight"
        self.config = arranged.config
        self.observer = observer
        self._by_name: dict[str, OutputTensor] = {
            self._module.tensor_name(output.name): output
            for output in arranged.outputs
            if not output.ahead
        }
        self.tied = HEAD not in self._by_name

    def output(self, name: str) -> OutputTensor:
        """The tensor of this name, as the decoder knows it."""
        return self._by_name[name]

    @property
    def head(self) -> OutputTensor:
        """The output projection; the embedding where they are one."""
        return self._by_name[EMBEDDING if self.tied else HEAD]

    def name_of(self, output: OutputTensor) -> str:
        """The decoder's name of a tensor."""
        name: str = self._module.tensor_name(output.name)
        return name

    def outputs_of(self, index: int) -> dict[str, OutputTensor]:
        """The tensors of a layer, by the decoder's names."""
        front = f"model.layers.{index}."
        return {name: out for name, out in self._by_name.items() if name.startswith(front)}

    def read_layer(self, index: int) -> dict[str, mx.array]:
        """All values of a layer, by the decoder's names."""
        outputs = self.outputs_of(index)
        return {name: self._arranged.whole(output) for name, output in outputs.items()}

    def layer(self, index: int, tensors: Mapping[str, mx.array]) -> LayerRun:
        """A layer of these tensors."""
        config = self._only(range(index, index + 1))
        named = {name.replace(f".{index}.", ".0.", 1): array for name, array in tensors.items()}
        observer = _Renamed(self.observer, index)
        weights = observed_weights(named | self._ends(), self._module.tensor_name, observer)
        model = self._module.build(config, weights)
        experts = [
            n.removesuffix(".weight").replace(f".{index}.", ".0.", 1)
            for n, out in self.outputs_of(index).items()
            if len(out.shape) == 3
        ]
        observe_experts(model.layers[0].mlp, experts, observer)
        return LayerRun(model)

    def embed(self, ids: Sequence[int], table: mx.array | None = None) -> mx.array:
        """ids -> (T, hidden), scaled as the family does; `table`: rows to use for unique ids."""
        unique, places = np.unique(np.array(ids), return_inverse=True)
        rows = self.embedding_rows(unique.tolist()) if table is None else table
        model = self._without_layers(len(unique), {EMBEDDING: rows})
        model.norm = _same
        x = model(mx.array(places.astype(np.int32)), Step(mx.zeros(len(ids), mx.int32), {}))
        mx.eval(x)
        return x

    def embedding_rows(self, ids: Sequence[int]) -> mx.array:
        """Rows (len(ids), hidden) of the table, for ids in rising order."""
        wanted = np.array(ids)
        found, start = [], 0
        for block in self._arranged.blocks(self.output(EMBEDDING), 1 << 22):
            inside = wanted[(wanted >= start) & (wanted < start + block.shape[0])] - start
            if len(inside):
                picked = block[mx.array(inside.astype(np.int32))]
                mx.eval(picked)
                found.append(picked)
            start += block.shape[0]
        return mx.concatenate(found)

    def normed(self, x: mx.array) -> mx.array:
        """After the final norm, float32."""
        norm = self._arranged.whole(self.output(self._norm))
        model = self._without_layers(1, {self._norm: norm})
        found = model.norm(x).astype(mx.float32)
        mx.eval(found)
        return found

    def _without_layers(self, vocab: int, tensors: dict[str, mx.array]) -> Model:
        config = replace(self._only(range(0)), vocab_size=vocab)
        tensors = self._ends() | tensors
        weights = observed_weights(tensors, self._module.tensor_name, self.observer)
        made: Model = self._module.build(config, weights)
        return made

    def _ends(self) -> dict[str, mx.array]:
        hidden, dtype = self.config.hidden_size, mx_dtype(self._arranged.source.dtype)
        return {EMBEDDING: mx.zeros((1, hidden), dtype), self._norm: mx.zeros((hidden,), dtype)}

    def _only(self, layers: range) -> ModelConfig:
        """The config of a model with these layers alone, its own table for output."""
        config = self.config
        changed: dict[str, Any] = {
            field.name: value[layers.start : layers.stop]
            for field in fields(config)
            if isinstance(value := getattr(config, field.name), tuple)
            and len(value) == config.num_layers
            and field.name != _NOT_BY_LAYER
        }
        changed |= {"num_layers": len(layers), "vocab_size": 1, "tie_word_embeddings": True}
        return replace(config, **changed, quantization=None)


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Shows the observer what layer `index` sees, which is built as layer 0."""

    observer: Observer
    index: int

    def see(self, paths: Sequence[str], x: mx.array, experts: mx.array | None = None) -> None:
        """As of Observer."""
        named = [path.replace(".0.", f".{self.index}.", 1) for path in paths]
        self.observer.see(named, x, experts)


def _same(x: mx.array) -> mx.array:
    return x
