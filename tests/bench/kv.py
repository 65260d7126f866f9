"""`bench kv`: what a quantised KV cache saves and what it costs.

Quality over held-out text, tokens a second with many requests, peak memory of a long one. Times of
quantised arithmetic on MLX's CPU backend say nothing about a GPU. What carries over is how many
requests share a forward pass, and how many bytes are held.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlxinfer.bench.peer import load_peer_model, require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.config import KVOptions
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench.checkpoints import LAPTOP, TWO_LAYERS, Dense, random_prompt, write_checkpoint
from tests.bench.engines import Ask, OurEngine, Served, serve
from tests.bench.peer import PeerEngine, serve_one_by_one
from tests.bench.quality import DTYPE, Quality, measure
from tests.bench.tables import SIDES, sides

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
    asks = [Ask.of(str(i), random_prompt(prompt, dense.vocab, i), answer) for i in range(requests)]
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None
    found = []
    for label, options, bits in KINDS:
        ours: list[Served] = []
        theirs: list[Served] = []
        for limit in (1, *[None] * ROUNDS):  # the first time warms up
            ours.append(serve(OurEngine(model, kv=options), asks[:limit]))
            if peer:
                theirs.append(_peer_served(peer_model, asks[:limit], bits))
        found.append(Pair(label, _median(ours[1:]), _median(theirs[1:]) if theirs else None))
    return found


def _peer_served(model: Any, asks: list[Ask], bits: int | None) -> Served:
    return serve(PeerEngine(model), asks) if bits is None else serve_one_by_one(model, asks)


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
    context: int,
    chunk: int,
    peer: bool,
) -> list[Pair]:
    """Peak memory beside the weights of one context of `context` tokens, bytes.

    Args:
        folder: where the checkpoint goes.
        dense: sizes of the model.
        context: tokens of a prompt and of its short answer together.
        chunk: prompt tokens a step. MLX's CPU attention materialises scores, and a small chunk
            keeps them from hiding what the cache takes.
        peer: also mlx-lm.
    """
    write_checkpoint(folder, dense)
    ask = Ask.of("long", random_prompt(context - 4, dense.vocab, 0), 4)
    model = load(folder)
    peer_model = load_peer_model(folder) if peer else None
    found = []
    for label, options, bits in KINDS:
        ours = peak_bytes(partial(_ours_long, model, ask, options, chunk))
        theirs = None
        if peer:
            action = partial(serve_one_by_one, kv_bits=bits, prefill_step=chunk)
            theirs = peak_bytes(partial(action, peer_model, [ask]))
        found.append(Pair(label, ours, theirs))
    return found


def _ours_long(model: Model, ask: Ask, kv: KVOptions, chunk: int) -> None:
    serve(OurEngine(model, kv=kv, prefill_chunk=chunk, max_batch=1), [ask])


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


DEEP = Dense(hidden=64, inner=128, layers=8, heads=1, kv_heads=1, head_dim=64, vocab=256)


def run(
    *, model: str = "demo", long: int = 16_384, small: bool = False, peer: bool = True
) -> Report:
    """Quality, speed with 8 requests at once, and peak memory.

    Args:
        model: its quality is measured; it should know the language of `held_out.txt`.
        long: tokens of the long context.
        small: seconds instead of minutes.
        peer: also mlx-lm.
    """
    if peer:
        require_peer()
    length, limit = (128, 1) if small else (1024, None)
    quality, num_tokens = measure(model, length=length, limit=limit)
    with TemporaryDirectory() as scratch:
        found = speeds(
            Path(scratch) / "speed",
            TWO_LAYERS if small else LAPTOP,
            requests=8,
            prompt=20 if small else 70,
            answer=4 if small else 32,
            peer=peer,
        )
        long = min(long, 512) if small else long
        chunk = 16 if small else 64
        folder = Path(scratch) / "peak"
        peak = peaks(folder, DEEP, context=long, chunk=chunk, peer=peer)
    data = {
        "quality": {"tokens": num_tokens, "formats": [asdict(q) for q in quality]},
        "speed": [asdict(pair) for pair in found],
        "peak_bytes": {"context": long, "formats": [asdict(pair) for pair in peak]},
    }
    tables = [
        quality_table(quality, num_tokens, length, model),
        _speed_table(found),
        _peak_table(peak, long, chunk),
    ]
    return Report("kv", tables, data)


def quality_table(found: list[Quality], num_tokens: int, length: int, model: str) -> Table:
    """A row for each format."""
    rows = [
        [
            q.label,
            f"{q.bytes_per_token:,.0f}",
            f"{q.of_bfloat16:.2f}x",
            f"{q.kl_mean:.6f}",
            f"{q.kl_p99:.6f}",
            f"{q.top1:.2%}",
            f"{q.perplexity:.4f}",
        ]
        for q in found
    ]
    return Table(
        f"Quality of the KV cache, {model}, {num_tokens:,} held-out tokens",
        ["kv_bits", "bytes/token", "of bfloat16", "KL mean", "KL p99", "same top-1", "perplexity"],
        rows,
        f"In windows of {length:,} tokens through pages and chunks. KL in nats, from the plain "
        f"cache ({DTYPE}) to this one. 8, 4: keys in 8 bits, values in 4.",
    )


def _speed_table(found: list[Pair]) -> Table:
    rows = []
    for pair in found:
        both = [speed for speed in (pair.ours, pair.theirs) if speed is not None]
        rates = sides([speed.tokens_per_s for speed in both], ".2f", higher=True)
        waits = sides([speed.longest_first_s for speed in both], ".2f")
        rows.append([pair.label, "tokens/s", *rates])
        rows.append([pair.label, "longest wait for a first token (s)", *waits])
    return Table(
        "8 requests at once",
        ["kv_bits", "", *SIDES],
        rows,
        "Prompts of 70 tokens, answers of 32; prompts count in the time. mlx-lm's server answers "
        "one request at a time where --kv-bits is given, and its cache stays plain "
        "up to 5,000 tokens.",
    )


def _peak_table(found: list[Pair], context: int, chunk: int) -> Table:
    rows = [
        [pair.label, *sides([v / 1e6 for v in (pair.ours, pair.theirs) if v is not None], ",.1f")]
        for pair in found
    ]
    return Table(
        f"Peak memory beside the weights (MB), one context of {context:,} tokens",
        ["kv_bits", *SIDES],
        rows,
        f"{DEEP.layers} layers, float32; both prefill {chunk} tokens a step. MLX's CPU attention "
        "materialises scores; mlx-lm's quantised attention does so on every backend.",
    )
