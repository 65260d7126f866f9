"""The next token of every row of a batch of mixed settings, in one dispatch. Knows no requests.

R = rows, V = vocabulary. A row's token depends on its own logits, settings, stream and count alone.

What a row keeps: of its logits those from the k-th largest up; of these the smallest set of the
largest whose mass reaches top-p of the whole; of these the ones at least min-p times as probable
as the most probable. Equal logits stay or go together. Then one is drawn: the first token, by id,
at which the cumulated mass exceeds a uniform number's share of the whole. Masses are whole numbers
of 2**-40 of the most probable token's, so that sums are exact in any order; what weighs less is
never drawn. Kernel and twin can differ only where their exponentials do, in the last bit: where
a mass lies within some 1e-6 of a cut or of the drawn share.
"""

import mlx.core as mx

from .bitmask import allowed
from .launch import MetalKernel

THREADS = 512
MAX_VOCAB = 1 << 20  # bins of the draw times tokens in one of them
ONE = 2.0**40

KERNEL = MetalKernel(
    name="sample",
    inputs=("logits", "settings", "streams", "counts", "mask"),
    outputs=("tokens",),
    body="""
        threadgroup atomic_uint low[BINS];
        threadgroup atomic_uint high[BINS];
        threadgroup ulong parts[32];
        threadgroup Extremes shared[SIMDGROUPS];
        const uint row = threadgroup_position_in_grid.x;
        const uint vocab_size = logits_shape[1];
        const uint num_words = mask_shape[1];
        const auto tokens_of_row = row_of<T, MASKED>(
            logits + ulong(row) * vocab_size, mask + row * num_words, vocab_size, num_words * 32);
        const Bins bins = {low, high, parts, thread_position_in_threadgroup.x};
        const uint token = sample<T>(
            tokens_of_row, bins, shared, settings + row * 4, streams[row], counts[row]);
        if (thread_position_in_threadgroup.x == 0) {
            tokens[row] = int(token);
        }
    """,
    includes=("bins.h",),
)


def sample(
    logits: mx.array,
    settings: mx.array,
    streams: mx.array,
    counts: mx.array,
    mask: mx.array | None = None,
) -> mx.array:
    """Choose a token for each row.

    Args:
        logits: (R, V) float32, float16 or bfloat16, V at most 2**20. NaN counts as -inf.
        settings: (R, 4) float32: temperature (0: the most probable token), top-k (0: all), top-p
            (from 1: all), min-p (0: all).
        streams: (R,) uint64 streams of random numbers.
        counts: (R,) uint32 index of the number that is drawn, counted from 0.
        mask: (R, W) uint32 tokens that a grammar allows, one bit each; W may be less than V / 32:
            tokens without a bit are forbidden.

    Returns:
        (R,) int32. 0 where a row has no finite logit.
    """
    num_rows = _checked(logits, settings, streams, counts, mask)
    words = counts[:, None] if mask is None else mask  # anything: it is not read
    (tokens,) = KERNEL(
        [logits, settings, streams, counts, words],
        template=[("T", logits.dtype), ("MASKED", mask is not None)],
        grid=(THREADS * num_rows, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(num_rows,)],
        output_dtypes=[mx.int32],
    )
    return tokens


def sample_twin(
    logits: mx.array,
    settings: mx.array,
    streams: mx.array,
    counts: mx.array,
    mask: mx.array | None = None,
) -> mx.array:
    """The same in plain MLX, with a sort of every row."""
    _checked(logits, settings, streams, counts, mask)
    temperature, top_k, top_p, min_p = mx.split(settings, 4, axis=-1)  # (R, 1) each
    rows = _values(logits, mask)
    highest = mx.maximum(rows.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
    probabilities = mx.exp((rows - highest) / mx.where(temperature > 0, temperature, 1.0))
    weights = (probabilities * ONE).astype(mx.uint64)  # (R, V)
    order = mx.argsort(-rows, axis=-1)
    falling = mx.take_along_axis(rows, order, axis=-1)
    last = mx.where(top_k > 0, mx.minimum(top_k, rows.shape[1]), rows.shape[1]) - 1
    kept = rows >= mx.take_along_axis(falling, last.astype(mx.int32), axis=-1)
    weights = mx.where(kept, weights, mx.zeros_like(weights))
    mass = mx.cumsum(mx.take_along_axis(weights, order, axis=-1), axis=-1)
    enough = mass > _goal(mass[:, -1:], top_p)
    first = mx.where(top_p < 1, mx.argmax(enough, axis=-1, keepdims=True), rows.shape[1] - 1)
    kept = rows >= mx.take_along_axis(falling, first, axis=-1)
    kept = mx.logical_and(kept, probabilities >= min_p)
    mass = mx.cumsum(mx.where(kept, weights, mx.zeros_like(weights)), axis=-1)
    target = _share(mass[:, -1:], random_bits(streams, counts)[:, None], 24)
    drawn = mx.argmax(mass > target, axis=-1)
    chosen = mx.where(temperature[:, 0] > 0, drawn, mx.argmax(rows, axis=-1))
    return chosen.astype(mx.int32)


def random_bits(streams: mx.array, counts: mx.array) -> mx.array:
    """(R,) uint64 below 2**24: SplitMix64, number `count` of each stream (Steele et al., 2014)."""
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
    """What a mass must exceed to reach top_p of the total: the next smaller whole number."""
    bits = (mx.minimum(top_p, 1 - 2.0**-24) * 2.0**32).astype(mx.uint64)
    goal = _share(total, bits, 32)
    whole = (((total & 0xFFFFFFFF) * bits) & 0xFFFFFFFF) == 0
    return mx.where(mx.logical_and(whole, goal > 0), goal - 1, goal)


def _share(total: mx.array, numerator: mx.array, bits: int) -> mx.array:
    """floor(total * numerator / 2**bits) of uint64, without overflow for totals below 2**61."""
    low = total & ((1 << bits) - 1)
    return (total >> bits) * numerator + ((low * numerator) >> bits)


def _checked(
    logits: mx.array,
    settings: mx.array,
    streams: mx.array,
    counts: mx.array,
    mask: mx.array | None,
) -> int:
    num_rows, vocab_size = logits.shape
    assert vocab_size <= MAX_VOCAB, vocab_size
    assert (settings.shape, settings.dtype) == ((num_rows, 4), mx.float32)
    assert (streams.shape, streams.dtype) == ((num_rows,), mx.uint64)
    assert (counts.shape, counts.dtype) == ((num_rows,), mx.uint32)
    assert mask is None or (mask.shape[0], mask.dtype) == (num_rows, mx.uint32)
    return int(num_rows)
