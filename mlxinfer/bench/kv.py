"""`bench kv`: what a quantised KV cache saves and what it costs. Assembles the parts and tables."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from .checkpoints import LAPTOP, TWO_LAYERS, Dense
from .kv_cost import KINDS, Pair, peaks, speeds
from .kv_quality import DTYPE, Quality, measure
from .peer_version import require_peer
from .report import Report, Table, ratio

DEEP = Dense(hidden=64, inner=128, layers=8, heads=1, kv_heads=1, head_dim=64, vocab=256)


def run(
    *, model: str = "demo", long: int = 16_384, small: bool = False, peer: bool = True
) -> Report:
    """Quality, speed with 8 requests at once, and peak memory.

    Args:
        model: whose quality is measured; it should know the language of `held_out.txt`.
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
        peak = peaks(folder, DEEP, kinds=KINDS, context=long, chunks=(chunk, chunk), peer=peer)
        peak += peaks(folder, DEEP, kinds=KINDS[1:], context=long, chunks=(256, 2048), peer=peer)
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
        for what, field in (
            ("tokens/s", lambda s: s.tokens_per_s),
            ("longest wait for a first token (s)", lambda s: s.longest_first_s),
        ):
            values = [field(speed) for speed in (pair.ours, pair.theirs) if speed is not None]
            better = values if what != "tokens/s" else values[::-1]
            rows.append([pair.label, what, *_cells(values, ".2f", better)])
    return Table(
        "8 requests at once",
        ["kv_bits", "", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        "Prompts of 70 tokens, answers of 32; prompts count in the time. mlx-lm's server answers "
        "one request at a time where --kv-bits is given, and its cache stays plain "
        "up to 5,000 tokens.",
    )


def _peak_table(found: list[Pair], context: int, chunk: int) -> Table:
    rows = []
    for pair in found:
        values = [v / 1e6 for v in (pair.ours, pair.theirs) if v is not None]
        rows.append([pair.label, *_cells(values, ",.1f", values)])
    plain, eight, own = found
    shares = [_share(plain.ours, eight.ours), _share(plain.theirs, eight.theirs)]
    rows.insert(2, ["8 / plain", *shares, "-"])
    rows[-1][0] = f"{own.label}, each engine's own prefill"
    return Table(
        f"Peak memory beside the weights (MB), one context of {context:,} tokens",
        ["kv_bits", "mlxinfer", "mlx-lm", "ratio"],
        rows,
        f"{DEEP.layers} layers, float32; both prefill {chunk} tokens a step but in the last row: "
        "there mlxinfer 256 and mlx-lm 2,048. MLX's CPU attention materialises scores; mlx-lm's "
        "quantised attention does so on every backend.",
    )


def _share(plain: int | None, eight: int | None) -> str:
    return f"{eight / plain:.2f}x" if plain and eight else "-"


def _cells(values: list[float], form: str, compared: list[float]) -> list[str]:
    """Ours, theirs and how many times better ours is."""
    shown = [format(value, form) for value in values]
    if len(values) == 1:
        return [*shown, "-", "-"]
    return [*shown, ratio(compared[1], compared[0])]
