"""The kernels that sample and mask: their uses, and inputs and tolerances of their self-checks."""

from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .bitmask import WORD_BITS, allowed, bitmask, bitmask_twin
from .sample import MAX_VOCAB, SETTINGS, sample, sample_twin, settings_array
from .variants import ANY_ROWS, DTYPES, Case, KernelUse, Kind, ReadyFor, Variant, dtype_name, never

SMALL_VOCAB, LARGE_VOCAB = 1_501, 151_936
MASKED_ROWS = 8
TEMPERATURE, TOP_P = 0.7, 0.9  # of rows that are timed


def sample_variant(dtype: mx.Dtype, *, masked: bool) -> Variant:
    """What `sample` compiles for logits of this dtype, with or without a grammar's mask."""
    return Variant.of("sample", dtype=dtype_name(dtype), masked=masked)


def bitmask_variant(dtype: mx.Dtype) -> Variant:
    """What `bitmask` compiles for logits of this dtype."""
    return Variant.of("bitmask", dtype=dtype_name(dtype))


class SamplingKernels:
    """The kernels of the sampler, for logits of any dtype.

    Args:
        vocab_size: of the logits.
        dtype: of the model's logits: only the kernel that samples from them is checked at load.
    """

    def __init__(self, vocab_size: int, dtype: mx.Dtype) -> None:
        self._has_kernels = vocab_size <= MAX_VOCAB
        self._dtype = dtype
        self._ready: dict[tuple[str, mx.Dtype, bool], ReadyFor] = {}

    def kernels(self) -> list[KernelUse]:
        """The kernels for each dtype: with a mask of a grammar, without one, and of masks alone."""
        if not self._has_kernels:
            return []
        uses = []
        for dtype in DTYPES.values():
            for masked in (False, True):
                first = (ANY_ROWS,) if dtype == self._dtype and not masked else ()
                install = partial(self._ready.__setitem__, ("sample", dtype, masked))
                variant = sample_variant(dtype, masked=masked)
                uses.append(KernelUse({ANY_ROWS: [variant]}, install, first))
            install = partial(self._ready.__setitem__, ("bitmask", dtype, True))
            uses.append(KernelUse({ANY_ROWS: [bitmask_variant(dtype)]}, install, ()))
        return uses

    def samples(self, dtype: mx.Dtype, *, masked: bool) -> bool:
        """Whether a kernel samples from logits of this dtype, with or without a grammar's mask."""
        return self._ready.get(("sample", dtype, masked), never)(1)

    def masks(self, dtype: mx.Dtype) -> bool:
        """Whether a kernel applies masks to logits of this dtype."""
        return self._ready.get(("bitmask", dtype, True), never)(1)


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
        lambda: [by_one_sort(logits, uniforms, mask)],
        (),
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
    return logits, _mask(num_rows, vocab_size) if variant["masked"] else None


def mixed_settings() -> NDArray[np.void]:
    """(16,) SETTINGS, some rows for every way through the kernel."""
    rows = np.zeros(16, SETTINGS)
    rows["temperature"] = [0, 1, 0.7, 1, 1.2, 0.3, 100, 0.8, 1, 3, 1e-30, 1.5, 50, 9, 90, 40]
    rows["top_k"] = [0, 0, 2, 0, 0, 1, 0, 5, 1_200, 1_000, 7, 0, 3, 0, 600, 40]
    rows["top_p"] = [1, 1, 1, 0.6, 0.96, 1, 0.5, 0.7, 1, 0.8, 0.9, 1e-9, 1, 0.1, 1, 1]
    rows["min_p"] = [0, 0.3, 0, 0, 0, 0, 0, 0.05, 0, 0, 0, 0, 0, 0.8, 0, 0.95]
    rows["stream"] = np.arange(16, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return rows


def repeated_settings() -> NDArray[np.void]:
    """(64,) SETTINGS: mixed_settings four times, with numbers drawn anew."""
    rows = np.tile(mixed_settings(), 4)
    rows["count"] = np.arange(len(rows)) * 7  # none of them next to where rounding decides
    return rows


def _bitmask_case(variant: Variant) -> Case:
    return _masking(variant, MASKED_ROWS, SMALL_VOCAB)


def _timed_bitmask(variant: Variant, sequences: int, _: int) -> Case:
    return _masking(variant, sequences, LARGE_VOCAB)


def _masking(variant: Variant, num_rows: int, vocab_size: int) -> Case:
    logits = random_logits(num_rows, vocab_size).astype(variant.dtype)
    mask = _mask(num_rows, vocab_size)
    return Case(lambda: [bitmask(logits, mask)], lambda: [bitmask_twin(logits, mask)], (0.0,))


def random_logits(num_rows: int, vocab_size: int) -> mx.array:
    """(R, V) float32, the same every time."""
    rng = np.random.default_rng(vocab_size)
    return mx.array(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))


def _mask(num_rows: int, vocab_size: int) -> mx.array:
    rng = np.random.default_rng(num_rows)
    words = rng.integers(0, 2**32, (num_rows, -(-vocab_size // WORD_BITS)), dtype=np.uint32)
    return mx.array(words)


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
BITMASK = Kind(
    name="bitmask",
    files=("bitmask.metal", "bitmask.py"),
    case=_bitmask_case,
    timed=_timed_bitmask,
    registers=lambda variant: 12,
    samples=tuple(Variant.of("bitmask", dtype=d) for d in ("float32", "bfloat16", "float16")),
)
