"""The next token of every row of a batch of mixed settings, in one dispatch. Knows no requests.

R = rows, V = vocabulary. A row's token depends on its own logits, settings, stream and count alone.

A row keeps the logits from the k-th largest up. Of these it keeps the smallest set of the largest
that reaches top-p of the whole mass, and among them those at least min-p times as probable as the
most probable. Equal logits stay or go together. Then one token is drawn: the first, by id, at which
the cumulated mass exceeds a uniform number's share of the whole. Masses are whole numbers of 2**-40
of the most probable token's mass, so that sums are exact in any order; a token of less mass is
never drawn. Kernel and twin can differ only where their exponentials do, in the last bit: where
a mass lies within some 1e-6 of a cut or of the drawn share.
"""

from functools import cache, lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .bitmask import LARGE_VOCAB, SMALL_VOCAB, allowed, random_logits, random_mask
from .launch import MAX_LAUNCHES, MIN_NUMBERS, Launch, MetalKernel
from .variants import IN_MLX, Case, Kind, Variant, dtype_name

THREADS = 512
MAX_VOCAB = 1 << 20  # bins of the draw times tokens in one of them
ONE = 2.0**40
TEMPERATURE, TOP_P = 0.7, 0.9  # of rows that are timed

SETTINGS = np.dtype(
    [
        ("temperature", np.float32),  # 0: the most probable token
        ("top_k", np.uint32),  # 0: all
        ("top_p", np.float32),  # from 1: all
        ("min_p", np.float32),  # 0: all
        ("stream", np.uint64),  # of random numbers
        ("count", np.uint32),  # index of the number that is drawn, from 0
        ("unused", np.uint32),
    ]
)
NUM_WORDS = SETTINGS.itemsize // 4  # 8, so that even one row is not passed as a short array

KERNEL = MetalKernel(
    name="sample",
    inputs=("logits", "settings", "mask"),
    outputs=("tokens",),
    body="""
        threadgroup uint low[BINS];
        threadgroup ulong2 wide_high[BINS / 4];
        threadgroup ulong parts[32];
        threadgroup float highest[SIMDGROUPS], lowest[SIMDGROUPS];
        threadgroup uint first[SIMDGROUPS];
        threadgroup uint count;
        const uint row = threadgroup_position_in_grid.x;
        const uint vocab_size = logits_shape[1];
        const uint num_words = mask_shape[1];
        const auto tokens_of_row = row_of<T, MASKED, WIDE>(
            logits + ulong(row) * vocab_size, mask + row * num_words, vocab_size, num_words * 32);
        const Bins bins = {
            reinterpret_cast<threadgroup atomic_uint*>(low),
            reinterpret_cast<threadgroup atomic_uint*>(wide_high), parts,
            thread_position_in_threadgroup.x};
        const Shared shared = {
            highest, first, lowest, reinterpret_cast<threadgroup atomic_uint*>(&count)};
        const uint token = sample<T>(tokens_of_row, bins, shared, settings + row * 8);
        if (thread_position_in_threadgroup.x == 0) {
            tokens[row] = int(token);
        }
    """,
    includes=("bins.h",),
)


def settings_array(rows: NDArray[np.void]) -> mx.array:
    """(R,) SETTINGS -> what `sample` takes, (R, 8) uint32: one upload a step."""
    assert rows.dtype == SETTINGS
    return mx.array(np.ascontiguousarray(rows).view(np.uint32).reshape(len(rows), NUM_WORDS))


def sample(logits: mx.array, settings: mx.array, mask: mx.array | None = None) -> mx.array:
    """Choose a token for each row.

    Args:
        logits: (R, V) float32, float16 or bfloat16, V at most 2**20. NaN counts as -inf. Four are
            read at once where V is a multiple of 4; rows of one array, not a slice of some row.
        settings: (R, 8) uint32, from `settings_array`.
        mask: (R, W) uint32 tokens that a grammar allows, one bit each; W may be less than V / 32:
            tokens without a bit are forbidden.

    Returns:
        (R,) int32. 0 where a row has no finite logit.
    """
    _check(logits, settings, mask)
    launch = _launch(*logits.shape, logits.dtype, mask is not None)
    # Without a mask the kernel does not read the third input.
    (tokens,) = launch([logits, settings, settings if mask is None else mask])
    return tokens


@lru_cache(MAX_LAUNCHES)
def _launch(num_rows: int, vocab_size: int, dtype: mx.Dtype, masked: bool) -> Launch:
    return Launch(
        KERNEL,
        template=[
            ("T", dtype),
            ("MASKED", masked),
            ("WIDE", 4 if vocab_size % 4 == 0 and vocab_size * num_rows >= MIN_NUMBERS else 1),
        ],
        grid=(THREADS * num_rows, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_rows,)],
        output_dtypes=[mx.int32],
    )


def sample_twin(logits: mx.array, settings: mx.array, mask: mx.array | None = None) -> mx.array:
    """The same in plain MLX, with a sort of every row."""
    _check(logits, settings, mask)
    top_k = settings[:, 1:2]  # (R, 1)
    temperature, top_p, min_p = (settings[:, i : i + 1].view(mx.float32) for i in (0, 2, 3))
    streams, counts = mx.contiguous(settings[:, 4:6]).view(mx.uint64), settings[:, 6:7]
    rows = _values(logits, mask)
    highest = mx.maximum(rows.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
    probabilities = mx.exp((rows - highest) / mx.where(temperature > 0, temperature, 1.0))
    weights = (probabilities * ONE).astype(mx.uint64)  # (R, V)
    order = mx.argsort(-rows, axis=-1)
    falling = mx.take_along_axis(rows, order, axis=-1)
    num_tokens = mx.array(rows.shape[1], mx.uint32)
    last = mx.where(top_k > 0, mx.minimum(top_k, num_tokens), num_tokens) - 1
    weights = _only(rows >= mx.take_along_axis(falling, last, axis=-1), weights)
    mass = mx.cumsum(mx.take_along_axis(weights, order, axis=-1), axis=-1)
    enough = mx.argmax(mass > _goal(mass[:, -1:], top_p), axis=-1, keepdims=True)
    last = mx.where(top_p < 1, enough, num_tokens - 1)
    kept = rows >= mx.take_along_axis(falling, last, axis=-1)
    mass = mx.cumsum(_only(kept & (probabilities >= min_p), weights), axis=-1)
    target = _share(mass[:, -1:], random_bits(streams, counts), 24)
    drawn = mx.argmax(mass > target, axis=-1)
    greedy = mx.argmax(rows, axis=-1)
    return mx.where(temperature[:, 0] > 0, drawn, greedy).astype(mx.int32)


def _only(kept: mx.array, weights: mx.array) -> mx.array:
    return mx.where(kept, weights, mx.zeros_like(weights))


def random_bits(streams: mx.array, counts: mx.array) -> mx.array:
    """uint64 below 2**24: SplitMix64, number `count` of each stream (Steele et al., 2014)."""
    golden, first, second = (
        mx.array([low, high], mx.uint32).view(mx.uint64)  # no Python int of 64 bits is taken
        for high, low in (
            (0x9E3779B9, 0x7F4A7C15),
            (0xBF58476D, 0x1CE4E5B9),
            (0x94D049BB, 0x133111EB),
        )
    )
    bits = streams + (counts.astype(mx.uint64) + 1) * golden
    bits = (bits ^ (bits >> 30)) * first
    bits = (bits ^ (bits >> 27)) * second
    return (bits ^ (bits >> 31)) >> 40


def _values(logits: mx.array, mask: mx.array | None) -> mx.array:
    """(R, V) float32 without NaN and +inf; -inf where the mask forbids."""
    rows = mx.minimum(logits.astype(mx.float32), mx.finfo(mx.float32).max)
    bad = mx.isnan(rows)
    if mask is not None:
        bad = mx.logical_or(bad, mx.logical_not(allowed(mask, logits.shape[1])))
    return mx.where(bad, -mx.inf, rows)


def _goal(total: mx.array, top_p: mx.array) -> mx.array:
    bits = (mx.minimum(top_p, 1 - 2.0**-24) * 2.0**32).astype(mx.uint64)
    goal = _share(total, bits, 32)
    whole = (((total & 0xFFFFFFFF) * bits) & 0xFFFFFFFF) == 0
    return mx.where(mx.logical_and(whole, goal > 0), goal - 1, goal)


def _share(total: mx.array, numerator: mx.array, bits: int) -> mx.array:
    """floor(total * numerator / 2**bits) of uint64, without overflow for totals below 2**61."""
    low = total & ((1 << bits) - 1)
    return (total >> bits) * numerator + ((low * numerator) >> bits)


def _check(logits: mx.array, settings: mx.array, mask: mx.array | None) -> None:
    num_rows, vocab_size = logits.shape
    assert vocab_size <= MAX_VOCAB, vocab_size
    assert (settings.shape, settings.dtype) == ((num_rows, NUM_WORDS), mx.uint32)
    assert mask is None or (mask.shape[0], mask.dtype) == (num_rows, mx.uint32)


# -- uses and self-checks -----------------------------------------------------------------------


@cache
def sample_variant(dtype: mx.Dtype, *, masked: bool) -> Variant:
    """The kernel for logits of this dtype, with or without a grammar's mask."""
    return Variant.of("sample", dtype=dtype_name(dtype), masked=masked)


def _sample_case(variant: Variant) -> Case:
    rows = repeated_settings()
    logits, mask = _logits_and_mask(variant, len(rows), SMALL_VOCAB)
    settings = settings_array(rows)
    return Case(
        lambda: [sample(logits, settings, mask)],
        lambda: [sample_twin(logits, settings, mask)],
        (0.0,),
    )


def _timed_sample(variant: Variant, sequences: int, _: int) -> Case:
    """Beside what the sampler does in plain MLX for rows with top-p; greedy rows need no kernel."""
    rows = np.zeros(sequences, SETTINGS)
    rows["temperature"], rows["top_p"] = TEMPERATURE, TOP_P
    logits, mask = _logits_and_mask(variant, sequences, LARGE_VOCAB)
    settings = settings_array(rows)
    uniforms = (mx.arange(sequences)[:, None] + 0.5) / sequences
    return Case(
        lambda: [sample(logits, settings, mask)],
        lambda: [sample_twin(logits, settings, mask)],
        (0.0,),
        instead={IN_MLX: lambda: [by_one_sort(logits, uniforms, mask)]},
    )


def by_one_sort(logits: mx.array, uniforms: mx.array, mask: mx.array | None) -> mx.array:
    """Tokens (R,) at TEMPERATURE and TOP_P: as few operations over the row as plain MLX needs.

    Args:
        logits: (R, V)
        uniforms: (R, 1) in [0, 1).
        mask: as for `sample`.
    """
    rows = logits.astype(mx.float32)
    if mask is not None:
        rows = mx.where(allowed(mask, rows.shape[1]), rows, -mx.inf)
    weights = mx.exp((rows - rows.max(axis=-1, keepdims=True)) / TEMPERATURE)
    # Floats that are at least 0 order as the integers of the same bits do, which sort faster.
    rising = mx.sort(weights.view(mx.int32), axis=-1).view(mx.float32)
    mass = mx.cumsum(rising, axis=-1, reverse=True)  # of each and of all that are larger
    lowest = (mass >= TOP_P * mass[:, :1]).sum(axis=-1, keepdims=True) - 1
    floor = mx.take_along_axis(rising, lowest, axis=-1)
    drawn_from = mx.cumsum(mx.where(weights >= floor, weights, 0.0), axis=-1)
    return mx.argmax(drawn_from > uniforms * drawn_from[:, -1:], axis=-1).astype(mx.int32)


def _logits_and_mask(
    variant: Variant, num_rows: int, vocab_size: int
) -> tuple[mx.array, mx.array | None]:
    logits = random_logits(num_rows, vocab_size).astype(variant.dtype)
    return logits, random_mask(num_rows, vocab_size) if variant["masked"] else None


STREAM_OF_ZERO = np.uint64(2**64 - 0x9E3779B97F4A7C15)  # its first number is 0
DRAWS_ZERO = 55  # of `repeated_settings`; of 5 tokens that it may take the first by id


def mixed_settings() -> NDArray[np.void]:
    """(16,) SETTINGS, some rows for every way through the kernel."""
    rows = np.zeros(16, SETTINGS)
    rows["temperature"] = [0, 1, 0.7, 1, 1.2, 0.3, 100, 0.8, 1, 3, 1e-30, 1.5, 50, 9, 90, 40]
    rows["top_k"] = [0, 0, 2, 0, 0, 1, 0, 5, 1_200, 1_000, 7, 0, 3, 0, 600, 40]
    rows["top_p"] = [1, 1, 1, 0.6, 0.96, 1, 0.5, 0.7, 1, 0.8, 0.9, 1e-10, 1, 0.1, 1, 1]
    rows["min_p"] = [0, 0.3, 0, 0, 0, 0, 0, 0.05, 0, 0, 0, 0, 0, 0.8, 0, 0.95]
    rows["stream"] = np.arange(16, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return rows


def repeated_settings() -> NDArray[np.void]:
    """(64,) SETTINGS: mixed_settings four times, with numbers drawn anew; one draws 0."""
    rows = np.tile(mixed_settings(), 4)
    rows["count"] = np.arange(len(rows)) * 7  # none of them next to where rounding decides
    rows["stream"][DRAWS_ZERO], rows["count"][DRAWS_ZERO] = STREAM_OF_ZERO, 0
    return rows


# Settings 8, logits 4, three masses of 64 bits, extremes, keys and candidates 8, arrays 8.
SAMPLE = Kind(
    name="sample",
    files=("sample.metal", "bins.h", "sample.py", "bitmask.py"),
    case=_sample_case,
    timed=_timed_sample,
    registers=lambda variant: 12 + 8 + 4 + 6 + 8 + 8,
    samples=tuple(
        Variant.of("sample", dtype=dtype, masked=masked)
        for dtype in ("float32", "bfloat16", "float16")
        for masked in (False, True)
    ),
)
