"""mlx-lm's models one sequence after another, on their own caches, under the same scheduler.

For definitions that mix tokens along the sequence (recurrences, convolutions) or attend in a way of
their own. Requests still arrive, wait, run beside each other and stop as all others do; what is
lost is one forward pass for all of them, and what needs pages.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ...core import CacheSpec, OwnCacheSpec
from ...layers.step import Rows, Step
from ..language import Replaceable
from .config import NO_ADAPTERS, ZooConfig
from .definitions import Definition

LACKING = ("prefix_cache", "disk_cache", "speculation")  # bits and windows: see cache/formats.py
WHY = "it runs on caches of its own, one sequence after another"
ATTENTION_CACHES = ("KVCache", "RotatingKVCache")  # every output depends on what these keep
STEP = 256  # tokens for which mlx-lm's caches of attention make room at a time


class Kept:
    """mlx-lm's caches of one sequence."""

    __slots__ = ("caches",)

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    @property
    def num_bytes(self) -> int:
        """Of the arrays."""
        return sum(cache.nbytes for cache in self.caches if cache is not None)

    def unread(self) -> list[mx.array]:
        """States: the outputs of the step that made them do not depend on them."""
        return [array for cache in self.caches for array in _states(cache)]


def _states(cache: Any) -> list[mx.array]:
    """The arrays of a cache that does not belong to attention."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return [array for inner in cache.caches for array in _states(inner)]
    if cache is None or kind in ATTENTION_CACHES or cache.empty():
        return []
    return [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]


class AloneModel:
    """A definition as the engine runs it, sequence by sequence.

    Args:
        config: for the engine.
        definition: with its weights.
        dtype: of what the caches keep, to count it.
    """

    lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(LACKING, WHY) | {"adapters": NO_ADAPTERS}
    expert_store: ClassVar[None] = None
    replaceable: ClassVar[Replaceable] = Replaceable()

    def __init__(self, config: ZooConfig, definition: Definition, dtype: mx.Dtype) -> None:
        self.config = config
        self.definition = definition
        self.activation_dtype = dtype
        self.mixers = [self]
        self.cache_specs: list[CacheSpec] = [kept_by(definition, dtype)]
        self.num_bytes = definition.num_bytes

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over T tokens of any sequences: ids (T,) -> (T, width)."""
        assert step.taps is None, "mlx-lm's definitions give no hidden states"
        outputs = []
        for part in step.caches[self].parts:
            if part.cache is None:
                part.cache = Kept(self.definition.own_caches())
            outputs.append(self.definition.hidden(ids[part.rows][None], part.cache.caches)[0])
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, width) as `__call__` returns it -> (R, vocab_size)."""
        return self.definition.logits(hidden)

    def rope_variant(self, max_tokens: int) -> int:
        """All sequences have the same frequencies."""
        return 0


def kept_by(definition: Definition, dtype: mx.Dtype) -> OwnCacheSpec:
    """What a sequence keeps, learnt from the shapes of a short one: nothing is computed."""
    caches = definition.own_caches()
    definition(mx.zeros((1, 2), mx.int32), caches)
    step_bytes = sum(_step_bytes(cache) for cache in caches)
    numbers = -(-step_bytes // (STEP * dtype.size))
    return OwnCacheSpec(numbers=numbers, num_bytes=max(Kept(caches).num_bytes, 1))


def _step_bytes(cache: Any) -> int:
    """By how much a cache that has its first tokens grows with the next `STEP` ones."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return sum(_step_bytes(inner) for inner in cache.caches)
    size: int = 0 if cache is None or kind == "ArraysCache" else cache.nbytes
    return size
