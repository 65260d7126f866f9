"""Pipeline stages: each rank has some consecutive layers of a model.

Rank 0 has the embedding, the first layers, the last norm and the output projection. The others have
only layers. Hidden states go from each rank to the next. The rows that need logits go from the last
rank back to rank 0. If hidden states are wanted beside logits (`Taps`), all rows come back, side by
side with the outputs of those layers. Per-layer inputs travel with the hidden states up to the
layers that read them. Layers that read the keys of other layers are on the same rank as those.
Source: GPipe, arXiv:1811.06965.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx

from ..cache_specs import CacheSpec
from ..errors import UnsupportedModelError
from ..layers.attention import Mixer
from ..layers.ranks import Link
from ..layers.step import FINAL, Rows, Step, Taps
from .config import ModelConfig
from .decoder import Model
from .language import arrays
from .towers import Tower
from .weights.source import Checkpoint
from .weights.tensors import FileTensor
from .weights.weights import StagePart, Weights, layer_of


@dataclass(frozen=True, slots=True)
class BetweenStages:
    """The arrays that go from one layer to the next; a family states them."""

    stream: tuple[int, ...]  # of a token: (hidden,), or (streams, hidden)
    per_layer: int = 0  # numbers of the input that each layer has of its own
    bound: frozenset[int] = frozenset()  # layers that must lie on the same rank as the one before


def divide(
    tensors: Mapping[str, FileTensor],
    rename: Callable[[str], str | None],
    num_layers: int,
    size: int,
    *,
    bound: frozenset[int] = frozenset(),
) -> list[range]:
    """Divide layers among `size` ranks so that the largest part is as small as possible.

    Args:
        rename: its names as the decoder has them; None: a tensor that is left out.
        size: ranks; rank 0 has what is in no layer, too.
        bound: layers that stay with the layer before them.
    """
    starts = [index for index in range(num_layers) if index not in bound]
    if len(starts) < size:
        together = f" {len(bound)} of which stay with the one before," if bound else ""
        raise UnsupportedModelError(
            f"The model has {num_layers} layers,{together} which {size} pipeline stages cannot "
            f"share; use {len(starts)} ranks at most."
        )
    layer_bytes, tables = _sizes(tensors, rename, num_layers)

    @cache
    def best(first: int, rank: int) -> tuple[int, int, tuple[int, ...]]:
        """For layers and ranks from here on: the largest part, the sum of squares, each end."""
        cuts = []
        last = rank == size - 1
        # The layers that the next rank may begin with: enough are left for the ranks behind it.
        begins = [index for index in starts[: len(starts) - (size - rank - 2)] if index > first]
        for stop in [num_layers] if last else begins:
            most, squares, stops = (0, 0, ()) if last else best(stop, rank + 1)
            num_bytes = sum(layer_bytes[first:stop], 0 if rank else tables)
            cuts.append((max(num_bytes, most), num_bytes * num_bytes + squares, (stop, *stops)))
        return min(cuts)

    stops = best(0, 0)[2]
    return [range(a, b) for a, b in zip((0, *stops), stops, strict=False)]


def _sizes(
    tensors: Mapping[str, FileTensor], rename: Callable[[str], str | None], num_layers: int
) -> tuple[list[int], int]:
    """The bytes of each layer, and of all tensors in no layer; same arguments as `divide`."""
    layer_bytes, tables = [0] * num_layers, 0
    for name, tensor in tensors.items():
        ours = rename(name)
        if ours is None:
            continue
        index = layer_of(ours)
        if index is None:
            tables += tensor.nbytes
        elif index < num_layers:  # those behind predict tokens further ahead
            layer_bytes[index] += tensor.nbytes
    return layer_bytes, tables


class StageModel:
    """One rank's layers, linked to the other ranks' layers; see `language.LanguageModel`.

    All ranks build the same steps in the same order. Each operation of the link is launched as it
    is built: arrays that are received depend on nothing, so that MLX knows no order among them.

    Args:
        part: the model with `AbsentLayer` in place of other ranks' layers.
        between: what goes from one to the next.
        all_bytes: of the weights of all ranks, which a step reads one after the other.
    """

    def __init__(
        self,
        part: Model,
        link: Link,
        layers: Sequence[range],
        between: BetweenStages,
        all_bytes: int,
    ) -> None:
        self.part = part
        self.all_bytes = all_bytes
        self._link = link
        self._layers = layers
        self._between = between
        self._rows_are_back = False  # all of the step that is being built, on rank 0
        self._is_first, self._is_last = link.rank == 0, link.rank == link.size - 1
        self.config: ModelConfig = part.config
        self.mixers: Sequence[Mixer] = part.mixers
        self.cache_specs: Sequence[CacheSpec] = part.cache_specs
        self.kernels = part.kernels
        self.activation_dtype = part.activation_dtype
        self.expert_store = part.expert_store
        self.rope_axes, self.rope_variant = part.rope_axes, part.rope_variant

    @property
    def tower(self) -> Tower | None:
        """The part that sees, on rank 0."""
        return self.part.tower

    @property
    def lacks(self) -> Mapping[str, str]:
        """Features are added on rank 0 alone."""
        num_deep = 0 if self.tower is None else self.tower.width // self.config.hidden_size - 1
        if num_deep <= len(self._layers[0]):
            return self.part.lacks
        reason = (
            f"pictures add to its first {num_deep} layers, of which the first pipeline stage has "
            f"{len(self._layers[0])}; use fewer ranks, or ranks that share layers"
        )
        return {**self.part.lacks, "pictures": reason}

    @property
    def num_bytes(self) -> int:
        weights = self.part.arrays() if self._is_first else arrays(self.part.layers)
        return sum(array.nbytes for array in weights)

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """Run this rank's layers; same arguments and result as `Model`."""
        self.part.begin_adapters(step.adapters, step.read_rows)
        step.late = None  # what is sent is launched as it is built
        taps, rank, num_rows = step.taps, self._link.rank, step.positions.shape[-1]
        tapped: list[mx.array] = []  # of layers of ranks 1 and on, in their order
        if self._is_first:
            x = self.part.enter(ids, step)
        else:
            x, tapped = self._receive(num_rows, step, self._tapped(taps, rank))
        normed = None
        for index in self._layers[rank]:
            if index == self.part.last_to_store and step.read_rows is not None:
                step.begin_last_to_store(index)
            x, normed = self.part.layers[index](x, normed, step)
            x, normed = self.part.after_layer(index, x, normed, step)
            if taps is not None:
                tapped += [x] if index in taps.layers and rank else []
        self._rows_are_back = taps is not None
        if self._rows_are_back or not self._is_last:
            self._send(x, step, tapped)
        mx.async_eval(x)
        return self._all_rows(num_rows, step, taps) if taps is not None and self._is_first else x

    def _all_rows(self, num_rows: int, step: Step, taps: Taps) -> mx.array:
        """Return all rows (T, hidden_size) after the last norm. The last rank sends them."""
        wanted = self._tapped(taps, self._link.size)
        x, outputs = self._receive(num_rows, step, wanted)
        for index, output in zip(wanted, outputs, strict=True):
            taps.put(index, output)
        x = self.part.norm(x)
        taps.put(FINAL, x)
        return x

    def _tapped(self, taps: Taps | None, rank: int) -> list[int]:
        """Return the tapped layers of ranks from 1 up to the one before `rank`."""
        behind = range(self._layers[0].stop, self._layers[rank - 1].stop)
        return [] if taps is None else [index for index in behind if index in taps.layers]

    def _send(self, x: mx.array, step: Step, tapped: Sequence[mx.array]) -> None:
        """Send to the next rank, side by side: x, inputs of later layers, and `tapped`."""
        parts = [x, *tapped]
        if step.per_layer is not None and not self._is_last:
            parts.insert(1, step.per_layer[:, self._layers[self._link.rank].stop :])
        flat = [part.flatten(1) for part in parts]
        mx.async_eval(self._link.send(flat[0] if len(flat) == 1 else mx.concatenate(flat, axis=-1)))

    def _receive(
        self, num_rows: int, step: Step, tapped: Sequence[int]
    ) -> tuple[mx.array, list[mx.array]]:
        """Receive from the rank before: x (T, ...), and the outputs (T, ...) of layers `tapped`.

        Inputs of layers from this rank's on are left in the step.
        """
        stream, per_layer = self._between.stream, self._between.per_layer
        first = self._layers[self._link.rank].start or self.config.num_layers  # rank 0: none
        inputs = (self.config.num_layers - first) * per_layer
        widths = [prod(stream), inputs, *[prod(stream)] * len(tapped)]
        joined = self._link.receive((num_rows, sum(widths)), self.activation_dtype)
        mx.async_eval(joined)
        x, per_layer_rows, *outputs = mx.split(joined, [*accumulate(widths[:-1])], axis=-1)
        if inputs:
            rows = mx.unflatten(per_layer_rows, -1, (-1, per_layer))
            step.per_layer = mx.pad(rows, [(0, 0), (first, 0), (0, 0)])
        shape = num_rows, *stream
        return x.reshape(shape), [output.reshape(shape) for output in outputs]

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, hidden_size), rows that `__call__` returned -> (R, vocab_size) on rank 0.

        On the others it returns rows that have no meaning there.
        """
        if self._rows_are_back:
            return self.part.logits(hidden, adapters) if self._is_first else hidden
        if self._is_last:
            hidden = self._link.send(hidden)
        elif self._is_first:
            hidden = self._link.receive(hidden.shape, hidden.dtype)
        mx.async_eval(hidden)
        return self.part.logits(self.part.norm(hidden), adapters) if self._is_first else hidden


def load_stage(
    tensors: dict[str, FileTensor], config: ModelConfig, builder: Any, link: Link, **others: Any
) -> tuple[StageModel, int]:
    """Load the layers of one rank; returns them and the bytes that were read.

    Args:
        others: see `Weights`.
    """
    between = builder.between_stages(config)
    layers = divide(tensors, builder.tensor_name, config.num_layers, link.size, bound=between.bound)
    stage = StagePart(layers[link.rank], has_tables=link.rank == 0)
    weights = Weights(Checkpoint(tensors, builder.tensor_name), stage=stage, **others)
    part = builder.build(config, weights)
    all_bytes = sum(t.nbytes for name, t in tensors.items() if builder.tensor_name(name))
    return StageModel(part, link, layers, between, all_bytes), weights.bytes_read


def load_tables(
    tensors: dict[str, FileTensor], config: ModelConfig, builder: Any, **others: Any
) -> Model:
    """Load a model without its layers, for a head that shares its tables. Arguments as above."""
    stage = StagePart(range(0), has_tables=True)
    weights = Weights(Checkpoint(tensors, builder.tensor_name), stage=stage, **others)
    model: Model = builder.build(config, weights)
    return model
