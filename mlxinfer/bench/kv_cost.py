"""What a quantised KV cache costs: tokens a second with many requests, peak memory of a long one.

Times of quantised arithmetic on MLX's CPU backend say nothing about a GPU. What carries over is how
many requests share a forward pass, and how many bytes are held.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import KVOptions
from ..models import load
from ..models.decoder import Model
from .checkpoints import Dense, random_prompt, write_checkpoint
from .our_server import OurServer
from .peer import load_peer_model
from .peer_server import PeerServer, serve_one_by_one
from .served import Ask, Served, serve

EIGHT = KVOptions(bits=(8, 8))
Kind = tuple[str, KVOptions, int | None]  # a name, ours, mlx-lm's kv_bits
KINDS: tuple[Kind, ...] = (
    ("plain", KVOptions(), None),
    ("8", EIGHT, 8),
)
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Of some requests that arrive at once."""

    tokens_per_s: float  # of answers, prompts included in the time
    longest_first_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours and mlx-lm's; None where it was not asked."""

    label: str
    ours: Any
    theirs: Any


def speeds(
    folder: Path, dense: Dense, *, requests: int, prompt: int, answer: int, peer: bool
) -> list[Pair]:
    """Plain and 8 bits, `requests` at once; the sides alternate."""
    write_checkpoint(folder, dense)
    asks = [
        Ask(str(i), [("user", random_prompt(prompt, dense.vocab, i))], answer)
        for i in range(requests)
    ]
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None
    found = []
    for label, options, bits in KINDS:
        ours: list[Served] = []
        theirs: list[Served] = []
        for limit in (1, *[None] * ROUNDS):  # the first time warms up
            ours.append(serve(OurServer(model, kv=options), asks[:limit]))
            if peer:
                theirs.append(_peer_served(peer_model, asks[:limit], bits))
        found.append(Pair(label, _median(ours[1:]), _median(theirs[1:]) if theirs else None))
    return found


def _peer_served(model: Any, asks: list[Ask], bits: int | None) -> Served:
    return serve(PeerServer(model), asks) if bits is None else serve_one_by_one(model, asks)


def _median(rounds: list[Served]) -> Speed:
    return Speed(
        statistics.median(served.num_tokens / served.seconds for served in rounds),
        statistics.median(
            max(answer.first_s for answer in served.answers.values()) for served in rounds
        ),
    )


def peaks(
    folder: Path,
    dense: Dense,
    *,
    kinds: Sequence[Kind],
    context: int,
    chunks: tuple[int, int],
    peer: bool,
) -> list[Pair]:
    """Peak memory beside the weights of one context of `context` tokens, bytes.

    Args:
        folder: where the checkpoint goes.
        dense: sizes of the model.
        kinds: ways to keep the cache.
        context: tokens of a prompt and of its short answer together.
        chunks: prompt tokens a step, of mlxinfer and of mlx-lm. MLX's CPU attention materialises
            scores, and a small chunk keeps them from hiding what the cache takes.
        peer: also mlx-lm.
    """
    write_checkpoint(folder, dense)
    ask = Ask("long", [("user", random_prompt(context - 4, dense.vocab, 0))], 4)
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None
    found = []
    for label, options, bits in kinds:
        ours = peak_bytes(partial(_ours_long, model, ask, options, chunks[0]))
        theirs = None
        if peer:
            action = partial(serve_one_by_one, kv_bits=bits, prefill_step=chunks[1])
            theirs = peak_bytes(partial(action, peer_model, [ask]))
        found.append(Pair(label, ours, theirs))
    return found


def _ours_long(model: Model, ask: Ask, kv: KVOptions, chunk: int) -> None:
    serve(OurServer(model, kv=kv, prefill_chunk=chunk, max_batch=1), [ask])


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that MLX held during `action`, above what it held before."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return int(mx.get_peak_memory() - before)
