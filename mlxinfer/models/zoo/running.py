"""mlx-lm's models as the engine runs them: batched, or one sequence after another.

Batched, a model runs over a flat list of tokens, as native families do. A model that is called with
ids (T, 1) sees T sequences of one token. It is given caches in which `offset` is the position of
each token, so ropes rotate every token by its own; its attention function passes queries, keys and
values to the engine's caches, which know the sequences. All other layers work token by token.
T = tokens of the step, H = heads, D = numbers of a key, V = of a value.

Definitions that mix tokens along the sequence (recurrences, convolutions) or attend in a way of
their own run one sequence after another, on mlx-lm's caches. Requests still arrive, wait, run
beside each other and stop as all others do; they lose the common forward pass, and pages.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ...cache_specs import CacheSpec, KVSpec, OwnCacheSpec
from ...layers.attention import AttentionShape
from ...layers.step import Rows, Step
from ...metal_kernels.paged_attention import Softmax
from ...metal_kernels.variants import KernelUse
from ..config import eos_token_ids
from ..jsonfields import Fields
from ..quantization import Quantization, read_quantization
from .compared import verdict_of
from .definitions import AttendingCache, Definition, installed, one_line

# Spellings of one thing; the first that is stated counts.
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len",
    "model_max_length", "seq_length", "block_size", "context_length", "max_context_length",
)  # fmt: skip
WIDTH = ("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "dim")
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
# Projections that give keys, alone or with others.
KEY_BIAS = re.compile(
    r"(^|[._])(k|kv|qkv|wqkv|c_attn|query_key_value|key|wk)(_proj|_lin)?(\.linear)?\.bias$", re.I
)
NO_ADAPTERS = "it is mlx-lm's definition: its projections take no adapters here"
UNSTATED_CONTEXT = 1 << 20  # tokens; recurrent models state none, and have none


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooConfig:
    """As `ModelConfig`, of a model that mlx-lm defines."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    tie_word_embeddings: bool
    max_context: int  # tokens
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None
    qkv_bias: bool
    cache_specs: tuple[CacheSpec, ...]
    alone_because: str | None  # why it runs one sequence after another; None: it runs batched

    @property
    def definition(self) -> str:
        return "mlx-lm"

    @property
    def definition_version(self) -> str:
        """Another version may compute other keys and values."""
        return f" mlx-lm {installed()}"

    @property
    def verdict(self) -> str:
        return verdict_of(self.model_type)[0]

    @property
    def compared(self) -> str:
        return verdict_of(self.model_type)[1]

    @property
    def extra_specs(self) -> tuple[()]:
        return ()

    def cache_spec(self, index: int) -> CacheSpec:
        return self.cache_specs[index]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each of them sees; None: all."""
        return tuple(s.window if isinstance(s, KVSpec) else None for s in self.cache_specs)


def read_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    parameters: Iterable[str],
    vocab_size: int,
    cache_specs: Iterable[CacheSpec],
    alone_because: str | None,
) -> ZooConfig:
    """Read what is not learnt from the definition."""
    top = Fields(raw, "config.json")
    inner = top.fields("text_config", "llm_config", "language_config") or top

    def stated(keys: tuple[str, ...], default: int) -> int:
        return inner.integer(*keys, low=0, default=None) or top.integer(
            *keys, low=0, default=default
        )

    return ZooConfig(
        model_type=top.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=stated(WIDTH, 0),
        num_layers=stated(LAYERS, 0),
        num_experts=stated(EXPERTS, 0),
        experts_per_token=stated(CHOSEN, 0),
        tie_word_embeddings=not any("lm_head" in name for name in parameters),
        max_context=min(stated(CONTEXT, UNSTATED_CONTEXT), 2**31 - 1),
        eos_token_ids=eos_token_ids(raw, inner, generation, vocab_size),
        quantization=read_quantization(top),
        qkv_bias=any(KEY_BIAS.search(name) for name in parameters),
        cache_specs=tuple(cache_specs),
        alone_because=alone_because,
    )


class NotFlatError(Exception):
    """A definition does something that does not work token by token; the message says what."""


@dataclass(frozen=True, slots=True)
class CausalMask:
    """The mask that a flat cache returns; it only says how far a token sees."""

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
        attended = self._layer.attend(*parts, Softmax(scale, sinks))
        return mx.unflatten(attended, -1, (num_heads, -1))[:, :, None]

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
        self, queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax
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
    """Facts about a definition, learnt by building one step without computing it."""

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
    reason = next((why for sign, why in _SIGNS.items() if sign in str(error)), None)
    what = one_line(f"{type(error).__name__}: {error}", 90)
    return reason or f"it does not take tokens one by one ({what})"


def _flat(cache: Any) -> FlatCache:
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


class _ZooModel:
    """The part of a model that does not depend on how its sequences run."""

    lacks: ClassVar[Mapping[str, str]] = {"adapters": NO_ADAPTERS}
    expert_store: ClassVar[None] = None
    tower: ClassVar[None] = None
    rope_axes = 1

    def __init__(self, config: ZooConfig, definition: Definition, dtype: mx.Dtype) -> None:
        self.config = config
        self.definition = definition
        self.activation_dtype = dtype
        self.num_bytes = definition.num_bytes

    def kernels(self) -> list[KernelUse]:
        """None: the layers are mlx-lm's."""
        return []

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, width) as `__call__` returns it -> (R, vocab_size)."""
        return self.definition.logits(hidden)

    def rope_variant(self, max_tokens: int) -> int:
        """All sequences have the same frequencies."""
        return 0


class FlatModel(_ZooModel):
    """A definition as the engine runs it, batched with all features of a native family.

    Args:
        traced: what `trace` found.
    """

    def __init__(self, config: ZooConfig, definition: Definition, traced: Trace) -> None:
        super().__init__(config, definition, traced.dtype)
        self.mixers = traced.mixers
        self.cache_specs: list[CacheSpec] = [*traced.specs]
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


LACKING = ("prefix_cache", "disk_cache", "speculation")  # bits and windows: see cache/formats.py
WHY = "it runs on caches of its own, one sequence after another"
ATTENTION_CACHES = ("KVCache", "RotatingKVCache")  # every output depends on what these keep
STEP = 256  # tokens for which mlx-lm's caches of attention make room at a time


@dataclass(slots=True, eq=False)
class SequenceCaches:
    """mlx-lm's caches of one sequence."""

    caches: list[Any]

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches if cache is not None)

    def unread(self) -> list[mx.array]:
        """States: the outputs of the step that made them do not depend on them."""
        return [array for cache in self.caches for array in _states(cache)]


def _states(cache: Any) -> list[mx.array]:
    kind = type(cache).__name__
    if kind == "CacheList":
        return [array for inner in cache.caches for array in _states(inner)]
    if cache is None or kind in ATTENTION_CACHES or cache.empty():
        return []
    return [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]


class AloneModel(_ZooModel):
    """A definition as the engine runs it, sequence by sequence.

    Args:
        dtype: of what the caches keep, to count it.
    """

    lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(LACKING, WHY) | {"adapters": NO_ADAPTERS}

    def __init__(self, config: ZooConfig, definition: Definition, dtype: mx.Dtype) -> None:
        super().__init__(config, definition, dtype)
        self.mixers = [self]
        self.cache_specs: list[CacheSpec] = [kept_by(definition, dtype)]

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over T tokens of any sequences: ids (T,) -> (T, width)."""
        assert step.taps is None, "mlx-lm's definitions give no hidden states"
        outputs = []
        alone = step.caches[self]
        for rows, slot in alone.parts:
            if slot not in alone.caches:
                alone.caches[slot] = SequenceCaches(self.definition.own_caches())
            outputs.append(self.definition.hidden(ids[rows][None], alone.caches[slot].caches)[0])
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def kept_by(definition: Definition, dtype: mx.Dtype) -> OwnCacheSpec:
    """Learn from the shapes of a short sequence what a sequence keeps. Nothing is computed."""
    caches = definition.own_caches()
    definition(mx.zeros((1, 2), mx.int32), caches)
    step_bytes = sum(_step_bytes(cache) for cache in caches)
    numbers = -(-step_bytes // (STEP * dtype.size))
    return OwnCacheSpec(numbers=numbers, num_bytes=max(SequenceCaches(caches).num_bytes, 1))


def _step_bytes(cache: Any) -> int:
    """By how much a cache that has its first tokens grows with the next `STEP` ones."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return sum(_step_bytes(inner) for inner in cache.caches)
    size: int = 0 if cache is None or kind == "ArraysCache" else cache.nbytes
    return size
