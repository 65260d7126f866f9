"""How much of a model's answers a quantised KV cache changes. Knows LLM and numpy; no cache.

The text is `held_out.txt`: conversations of the demo model's own corpus generator with questions
that its training never saw (`examples/demo_model/corpus.py`, `held=True`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxinfer.llm import LLM

HELD_OUT = Path(__file__).with_name("held_out.txt")
DTYPE, DTYPE_BYTES = "float32", 4  # of activations and of what is not quantised
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("8", {"kv_bits": 8}),
    ("8, 4", {"kv_bits": (8, 4)}),
    ("4", {"kv_bits": 4}),
    ("4, plain ends", {"kv_bits": 4, "kv_plain_ends": True}),
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one format, over all positions of all windows."""

    label: str
    bytes_per_token: float
    of_bfloat16: float  # bytes, as a share of what a bfloat16 cache takes
    kl_mean: float  # KL(plain || this), nats
    kl_p99: float
    top1: float  # share of positions where the most probable token is the same
    perplexity: float


def windows(ids: Sequence[int], length: int, limit: int | None = None) -> list[list[int]]:
    """Whole windows of `length` tokens, one after the other; `limit` of them at most."""
    count = len(ids) // length
    count = count if limit is None else min(count, limit)
    return [list(ids[i * length : (i + 1) * length]) for i in range(count)]


def measure(
    model: str, *, length: int = 1024, limit: int | None = None
) -> tuple[list[Quality], int]:
    """Every format against the plain one; and over how many tokens."""
    text = HELD_OUT.read_text(encoding="utf-8")
    reference: list[Floats] = []
    found: list[Quality] = []
    chunks: list[list[int]] = []
    plain_bytes = 0.0
    for label, options in FORMATS:
        with LLM(model, dtype=DTYPE, **options) as llm:
            chunks = chunks or windows(
                llm.tokenizer.encode(text, parse_special=True), length, limit
            )
            stats = llm.stats()
            logprobs = [log_softmax(llm.logits(chunk)) for chunk in chunks]
        bytes_per_token = sum(g["page_bytes"] for g in stats["groups"]) / stats["page_size"]
        reference, plain_bytes = reference or logprobs, plain_bytes or bytes_per_token
        found.append(
            compared(
                label,
                chunks,
                reference,
                logprobs,
                bytes_per_token=bytes_per_token,
                of_bfloat16=bytes_per_token / (plain_bytes / DTYPE_BYTES * 2),
            )
        )
    return found, sum(len(chunk) for chunk in chunks)


def compared(
    label: str,
    chunks: Sequence[Sequence[int]],
    reference: Sequence[Floats],
    logprobs: Sequence[Floats],
    *,
    bytes_per_token: float,
    of_bfloat16: float,
) -> Quality:
    """Compare two sets of log-probabilities, (T, vocab) for each chunk."""
    pairs = list(zip(reference, logprobs, strict=True))
    kl = np.concatenate([divergence(plain, other) for plain, other in pairs])
    same = np.concatenate([plain.argmax(-1) == other.argmax(-1) for plain, other in pairs])
    losses = np.concatenate(list(_losses(chunks, logprobs)))
    return Quality(
        label=label,
        bytes_per_token=bytes_per_token,
        of_bfloat16=of_bfloat16,
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float(same.mean()),
        perplexity=float(np.exp(losses.mean())),
    )


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """(T, vocab) -> (T, vocab) float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def divergence(plain: Floats, other: Floats) -> Floats:
    """KL(plain || other) of each position, (T, vocab) -> (T,), nats."""
    found: Floats = (np.exp(plain) * (plain - other)).sum(axis=-1)
    return found


def _losses(chunks: Sequence[Sequence[int]], logprobs: Sequence[Floats]) -> Iterator[Floats]:
    for ids, each in zip(chunks, logprobs, strict=True):
        yield -each[np.arange(len(ids) - 1), np.array(ids[1:])]
