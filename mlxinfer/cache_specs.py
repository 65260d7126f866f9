"""The kinds of cache that layers need, one class each. No MLX."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that one attention layer keeps per token, and for how long."""

    num_kv_heads: int
    key_dim: int  # head_dim of K
    value_dim: int  # head_dim of V
    window: int | None = None  # a token sees itself and window - 1 before it; None: all
    sinks: int = 0  # with a window: the first positions, which stay visible
    # The context is cut into chunks of `window` tokens, and a token sees its own chunk alone.
    chunked: bool = False
    key_bias: bool = False  # the layer says what a bias adds to its keys, see `KeyBias`
    rope_axes: int = 1  # positions by which a key rotates: 3 with M-RoPE
    # Dimensions of a key that rope rotates, where its other dimensions equal the value's: the first
    # half of them are the key's first, the second half begin at its middle. 0: K and V differ.
    rope_dims: int = 0
    sees_spans: bool = False  # features of a picture see each other here, where it says so
    relative: bool = False  # scores have a bias by distance, which no kernel of attention knows
    unit: ClassVar[int] = 1  # the number of tokens in a page must be a multiple of this

    @property
    def joint_dim(self) -> int:
        """Numbers of a vector that holds a head's key and value; 0: each has one of its own."""
        return self.value_dim + self.rope_dims if self.rope_dims else 0

    @property
    def numbers(self) -> int:
        """Numbers kept per token."""
        return self.num_kv_heads * ((self.rope_dims or self.key_dim) + self.value_dim)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The one vector that a latent attention layer (MLA) keeps per token: keys and values in one.

    Its first `latent_dim` numbers are the compressed keys and values of all heads, the others the
    rotary part of the keys, which all heads share. Source: DeepSeek-V2, arXiv:2405.04434.
    """

    latent_dim: int
    rope_dim: int
    window: int | None = None  # as in `KVSpec`
    sinks: int = 0
    index_dim: int = 0  # numbers of the key that an indexer ranks a token by; 0: there is none
    num_ranked: int = 0  # tokens that one sees, those of the highest rank; 0: all
    sees_spans: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    @property
    def numbers(self) -> int:
        return self.latent_dim + self.rope_dim + self.index_dim


@dataclass(frozen=True, slots=True)
class PooledSpec:
    """The keys by which an index ranks blocks of tokens: one key for each block, see `PooledLayer`.

    A block is `ratio` tokens from a multiple of it. Its key is made from all of its tokens, so the
    open block at the end of a sequence has no key yet.
    """

    dim: int  # numbers of a key, a multiple of `ratio`
    raw_dim: int  # numbers that a token brings to the key of its block
    ratio: int
    num_ranked: int  # complete blocks that a token sees, those of the highest rank
    rope_axes: int = 1  # positions by which a key rotates: 3 with M-RoPE
    window: ClassVar[None] = None
    sinks: ClassVar[int] = 0
    sees_spans: ClassVar[bool] = False

    @property
    def unit(self) -> int:
        """The number of tokens in a page must be a multiple of this."""
        return self.ratio

    @property
    def numbers(self) -> int:
        return self.dim // self.ratio


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Compressed vectors: one stands for a block of tokens in attention, see `CompressedLayer`.

    Blocks: see `PooledSpec`. A vector is key and value in one. A sequence can be cut
    where a number of tokens ends that is a multiple of `unit`.
    """

    dim: int  # numbers of a vector, a multiple of `ratio`
    raw_dim: int  # numbers that a token brings to its block
    ratio: int
    unit: int  # tokens, a multiple of `ratio`
    index_dim: int = 0  # numbers of the key by which a vector ranks; 0: all are seen
    num_ranked: int = 0  # vectors that a token sees, those of the highest rank
    carried: int = 0  # of what a token brings, the first numbers, which the next block needs too
    rope_axes: ClassVar[int] = 1
    window: ClassVar[None] = None
    sinks: ClassVar[int] = 0
    sees_spans: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers that pages have for each token: of its block's index key, of its vector, and of
        what the next block needs of the last one before a place where a sequence can be cut."""
        parts = self.index_dim // self.ratio, self.dim // self.ratio
        return *parts, self.carried * self.ratio // self.unit

    @property
    def numbers(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The keys by which an index ranks blocks of tokens: one key for each token, see `BlockLayer`.

    Blocks are `block` tokens from a multiple of it. Each head of the index chooses for itself.
    """

    dim: int  # numbers of a key
    block: int
    num_ranked: int  # blocks that a token sees, those of the highest rank
    num_near: int  # of these, its own and those right before it, whatever their rank
    window: ClassVar[None] = None
    sinks: ClassVar[int] = 0
    sees_spans: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    @property
    def numbers(self) -> int:
        return self.dim


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one recurrent layer keeps of a sequence: arrays of fixed size, no positions.

    The state before the first token is all zeros.
    """

    shapes: tuple[tuple[tuple[int, ...], str], ...]  # (shape, dtype such as "float32") of each
    window: ClassVar[None] = None
    sees_spans: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    @property
    def numbers(self) -> int:
        """Numbers kept per token: none."""
        return 0


@dataclass(frozen=True, slots=True)
class OwnCacheSpec:
    """The caches of a model that brings its own, all layers together. They cannot go back.

    Memory is counted in pages as for the others, but nothing lies in them.
    """

    numbers: int  # kept per token
    num_bytes: int  # kept of a sequence beside that, whatever its length
    window: ClassVar[None] = None
    sees_spans: ClassVar[bool] = False
    unit: ClassVar[int] = 1


IndexSpec = PooledSpec | CompressedSpec | BlockSpec  # what chooses the tokens that a layer sees
PagedSpec = KVSpec | LatentSpec | IndexSpec  # what lies in pages, for each token
CacheSpec = PagedSpec | StateSpec | OwnCacheSpec
