"""mlx-lm's models over a flat list of tokens, so that they run as native families do.

A model that is called with ids (T, 1) sees T sequences of one token. It is given caches in which
`offset` is the position of each token, so ropes turn every token by its own; what it hands to the
attention function goes to the engine's caches, which know the sequences. All other layers work
token by token. T = tokens of the step, H = heads, D = numbers of a key, V = of a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ...core import CacheSpec, KVSpec
from ...layers.attention import AttentionShape
from ...layers.step import Rows, Step
from ...metal_kernels.paged_attention import Softmax
from ..language import Replaceable
from .config import NO_ADAPTERS, ZooConfig
from .definitions import Definition
from .private_copy import AttendingCache, one_line


class NotFlatError(Exception):
    """A definition does something that does not work token by token; the message says what."""


@dataclass(frozen=True, slots=True)
class CausalMask:
    """What a flat cache gives where a definition asks for a mask: it says only how far to see."""

    window: int | None  # tokens, the newest included; None: all


class FlatCache(AttendingCache):
    """One attention layer's cache, in the place of mlx-lm's own.

    Args:
        max_size: of the ring that the definition asked for; None: it keeps all positions.

    Attributes:
        offset: (T,) the position of each token.
        window: tokens that the layer sees, as its last mask said; None: all.
    """

    __slots__ = ("_layer", "_stored", "max_size", "num_attended", "offset", "window")

    def __init__(self, max_size: int | None) -> None:
        self.max_size = max_size
        self.window = max_size
        self.offset: Any = None
        self.num_attended = 0
        self._layer: Any = None
        self._stored = False

    def begin(self, layer: Any, positions: mx.array) -> None:
        """A step begins; `layer` is the engine's cache of this layer."""
        self._layer = layer
        self.offset = positions
        self.num_attended, self._stored = 0, False

    def end(self) -> None:
        """A step has been built: hold nothing of it, or the next could not write in place."""
        self._layer = self.offset = None

    # -- what definitions call --------------------------------------------------------------------

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None
    ) -> CausalMask:
        """A mask for the attention function."""
        return CausalMask(window_size or self.max_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same (T, H, 1, ·): the engine stores what the layer makes of them as it attends."""
        if self._stored:
            raise NotFlatError("a layer stores keys and values twice")
        self._stored = True
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Store and attend: queries (T, H, 1, D) -> (T, H, 1, V)."""
        if not self._stored or keys.shape[2] != 1 or values.shape[2] != 1:
            raise NotFlatError("a layer attends over other keys than it has stored")
        self.window = self._seen(mask)
        self.num_attended += 1
        num_heads = queries.shape[1]
        parts = [part.squeeze(2).astype(values.dtype) for part in (queries, keys, values)]
        found = self._layer.attend(*parts, Softmax(scale, sinks))
        return mx.unflatten(found, -1, (num_heads, -1))[:, :, None]

    def _seen(self, mask: Any) -> int | None:
        """Tokens that a mask shows, the newest included; None: all."""
        if mask is None:
            return self.max_size
        if not isinstance(mask, CausalMask):
            raise NotFlatError("attention has a mask of its own")
        if self.max_size is not None and mask.window is None:
            raise NotFlatError("a layer keeps a window of positions and sees more")
        return mask.window


class _Recorder:
    """Learns what an attention layer needs of its cache; gives zeros."""

    shape: AttentionShape
    dtype: mx.Dtype

    def __init__(self) -> None:
        self.sizes: tuple[int, int, int] = (0, 0, 0)  # KV heads, key and value dimensions

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Note the shapes: queries (T, H, D), keys (T, Hkv, D), values (T, Hkv, V)."""
        (num_tokens, num_heads, dim), (_, kv_heads, value_dim) = queries.shape, values.shape
        if keys.shape != (num_tokens, kv_heads, dim) or num_heads % kv_heads:
            raise NotFlatError("queries, keys and values do not fit together")
        self.sizes = kv_heads, dim, value_dim
        self.shape = AttentionShape(num_heads, sinks=softmax.sinks)
        self.dtype = keys.dtype
        return mx.zeros((num_tokens, num_heads * value_dim), queries.dtype)


@dataclass(frozen=True, slots=True)
class Trace:
    """What was learnt by building one step of a definition without computing it."""

    caches: list[FlatCache]  # one for each of mlx-lm's own
    mixers: list[AttentionShape]  # of those that are used, in order
    specs: list[KVSpec]
    places: list[int]  # of these among `caches`
    dtype: mx.Dtype  # of keys and values
    vocab_size: int


NUM_TRACED = 3  # tokens


def trace(definition: Definition) -> Trace:
    """Build one step, and see what each layer asks of its cache.

    Raises:
        NotFlatError: the definition does not work token by token.
    """
    caches = [_flat(cache) for cache in definition.own_caches()]
    recorders = [_Recorder() for _ in caches]
    ids = mx.zeros((NUM_TRACED, 1), mx.int32)
    for cache, recorder in zip(caches, recorders, strict=True):
        cache.begin(recorder, mx.arange(NUM_TRACED))
    try:
        logits = definition(ids, caches)
    except NotFlatError:
        raise
    except Exception as error:  # the fault boundary of foreign code
        raise NotFlatError(_explained(error)) from error
    if any(cache.num_attended != cache._stored for cache in caches):
        raise NotFlatError("a layer does not attend through the shared function, once")
    if logits.ndim != 3 or logits.shape[:2] != (NUM_TRACED, 1):
        raise NotFlatError("logits do not come token by token")
    places = [i for i, cache in enumerate(caches) if cache.num_attended]
    if not places:
        raise NotFlatError("no layer attends")
    specs = [KVSpec(*recorders[i].sizes, caches[i].window) for i in places]
    dtypes = {recorders[i].dtype for i in places}
    if len(dtypes) > 1:
        raise NotFlatError("layers keep keys in different dtypes")
    return Trace(
        caches=caches,
        mixers=[recorders[i].shape for i in places],
        specs=specs,
        places=places,
        dtype=dtypes.pop(),
        vocab_size=logits.shape[-1],
    )


_SIGNS = {  # part of a message of foreign code -> what it means here
    CausalMask.__name__: "attention makes a mask of its own",
    "keys_and_values": "later layers read another layer's keys and values",
    "Only length-1 arrays": "positions are computed from one offset for all tokens",
}


def _explained(error: Exception) -> str:
    """Why a definition could not be built on flat caches."""
    found = next((why for sign, why in _SIGNS.items() if sign in str(error)), None)
    what = one_line(f"{type(error).__name__}: {error}", 90)
    return found or f"it does not take tokens one by one ({what})"


def _flat(cache: Any) -> FlatCache:
    """What stands for one of mlx-lm's caches."""
    kind = type(cache).__name__
    if kind == "KVCache":
        return FlatCache(None)
    if kind == "RotatingKVCache" and not cache.keep:
        return FlatCache(cache.max_size)
    raise NotFlatError(f"a layer keeps {_KEPT.get(kind, f'a {kind}')}")


_KEPT = {
    "ArraysCache": "the state of a recurrence or a convolution",
    "CacheList": "several caches",
    "ChunkedKVCache": "chunks of the context",
    "RotatingKVCache": "a ring with sinks",
}


class FlatModel:
    """A definition as the engine runs it, batched with all features of a native family.

    Args:
        config: for the engine.
        definition: with its weights.
        traced: what `trace` found.
    """

    lacks: ClassVar[Mapping[str, str]] = {"adapters": NO_ADAPTERS}
    expert_store: ClassVar[None] = None
    replaceable: ClassVar[Replaceable] = Replaceable()

    def __init__(self, config: ZooConfig, definition: Definition, traced: Trace) -> None:
        self.config = config
        self.definition = definition
        self.activation_dtype = traced.dtype
        self.mixers = traced.mixers
        self.cache_specs: list[CacheSpec] = [*traced.specs]
        self.num_bytes = definition.num_bytes
        self._caches = traced.caches
        self._used = [traced.caches[i] for i in traced.places]

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over T tokens of any sequences: ids (T,) -> (T, width)."""
        assert step.taps is None, "mlx-lm's definitions give no hidden states"
        for cache, mixer in zip(self._used, self.mixers, strict=True):
            cache.begin(step.caches[mixer], step.positions)
        try:
            return self.definition.hidden(ids[:, None], self._caches)[:, 0]
        finally:
            for cache in self._used:
                cache.end()

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, width) as `__call__` returns it -> (R, vocab_size)."""
        return self.definition.logits(hidden)

    def rope_variant(self, max_tokens: int) -> int:
        """All sequences have the same frequencies."""
        return 0
