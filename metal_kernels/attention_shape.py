"""Which threadgroup serves how many query rows of a KV head. Pure Python; knows no arrays."""

from dataclasses import dataclass
from functools import cache

from .attention_plan import BLOCK

FRAGMENT_ROWS = 8
FRAGMENTS = 32  # of outputs that a SIMD group may hold: 64 registers of each lane,
MAX_OWN_ROWS = 3  # of 8 rows each: scores and queries take registers too
SHARED_FRAGMENTS = 16  # the same where queries take registers too
STREAMS = 4  # SIMD groups that take blocks in turn
PAIRED_TEAMS = 4  # more than these many sets of rows have one SIMD group each
MAX_TILE_BYTES = 16_384  # keys and values together
LANES = 32
# What the smallest chips have, and what a kernel may take of it: 448 threads of 110 registers.
REGISTER_BUDGET = 448 * 110
THREADGROUP_BUDGET = 16_384  # bytes, so that two threadgroups share a core
WHOLE_DIM = 256  # larger vectors are halved between two SIMD groups
PREFILL_GROUPS = 8  # SIMD groups of a tile of a prompt


@dataclass(frozen=True, slots=True)
class Shape:
    """A threadgroup: how many SIMD groups, and which of them has which rows, tokens and numbers."""

    fragments: int  # of 8 query rows, of one SIMD group
    simd_groups: int
    partners: int  # SIMD groups with the same rows and other tokens
    shares: bool  # all read the same tiles
    halves: int = 1  # SIMD groups with the same rows and other numbers of keys and values

    @property
    def threads(self) -> int:
        """Of a threadgroup."""
        return self.simd_groups * LANES

    @property
    def rows(self) -> int:
        """Query rows that a threadgroup has room for."""
        return self.simd_groups // (self.partners * self.halves) * self.fragments * FRAGMENT_ROWS


@cache
def threadgroup_shape(num_rows: int, *, key_dim: int, value_dim: int, itemsize: int) -> Shape:
    """The threadgroup that serves `num_rows` query rows and loads each key and value once.

    While all rows fit into the registers of one SIMD group, every SIMD group has all of them and
    tokens of its own. Else they share tiles in threadgroup memory; of rows beyond `most_rows` each
    threadgroup takes a block, and loads keys and values again.
    """
    fragments = -(-num_rows // FRAGMENT_ROWS)
    if fragments <= MAX_OWN_ROWS and fragments * value_dim <= FRAGMENTS * FRAGMENT_ROWS:
        return Shape(fragments, STREAMS, STREAMS, shares=False)
    most = most_rows(key_dim, value_dim)
    num_blocks = -(-num_rows // most)
    fragments = -(-fragments // num_blocks)
    if max(key_dim, value_dim) > WHOLE_DIM:
        return Shape(1, fragments * 2, 1, shares=True, halves=2)
    own = max(1, SHARED_FRAGMENTS * FRAGMENT_ROWS // value_dim)
    teams = -(-fragments // own)
    half_tile = BLOCK * (key_dim + value_dim) * itemsize > MAX_TILE_BYTES
    partners = 1 if half_tile or teams > PAIRED_TEAMS else 2
    return Shape(own, teams * partners, partners, shares=True)


def most_rows(key_dim: int, value_dim: int) -> int:
    """Query rows of a threadgroup at most: 448 threads of 110 registers, or as much in all."""
    if max(key_dim, value_dim) > WHOLE_DIM:
        return 32
    return 128 if value_dim <= 128 else 64


@cache
def prefill_shape(*, key_dim: int, value_dim: int) -> Shape:
    """The threadgroup that serves a tile of a prompt's query rows.

    As many rows as registers hold: keys and values are loaded once for all of them, and each
    fragment from threadgroup memory is multiplied with two of rows where the head dim allows it.
    """
    if max(key_dim, value_dim) > WHOLE_DIM:
        return Shape(1, PREFILL_GROUPS, 1, shares=True, halves=2)
    return Shape(2 if value_dim <= 128 else 1, PREFILL_GROUPS, 1, shares=True)


def registers(
    shape: Shape, *, key_dim: int, value_dim: int, itemsize: int, codes: bool = False
) -> int:
    """32-bit registers that a lane needs at its peak: an estimate from what the source keeps.

    Outputs, queries where they are in registers, scores, fragments on their way, peaks, totals and
    positions of rows, and about 12 for places. Compilers find better and worse; the attribute
    `max_total_threads_per_threadgroup` makes them spill where they find worse.

    Args:
        shape: of the threadgroup.
        key_dim, value_dim: numbers of a key and of a value.
        itemsize: bytes of a number of a query.
        codes: keys and values are multiplied as codes: sums of queries and of biases beside them.
    """
    rows = shape.fragments
    kept = rows * value_dim // 4 // shape.halves + 3 * rows + 12
    if not shape.shares:
        keys = 4 * 8 * itemsize // 4 if key_dim % 64 == 0 else 4 * 4 * itemsize // 4
        sums = rows * (key_dim // 64 + value_dim // 64) + 4 * rows if codes else 0
        return kept + 4 * rows + keys + 2 * rows + 2 + sums
    queries = rows * key_dim // 8 // shape.halves * (2 * itemsize // 4)
    tile_tokens = 8 if shape.halves == 2 else 16
    if BLOCK * (key_dim + value_dim) * itemsize > MAX_TILE_BYTES:
        tile_tokens = 8
    scores = 2 * rows * tile_tokens // 8 // shape.partners
    return kept + queries + scores + 2 * rows + 2
