"""`mlxinfer bench convert`: what recipes cost in quality, and conversions in time and memory."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from ..convert.plots import available, plot_sizes
from ..errors import InvalidRequestError, ModelNotFoundError
from ..memory import parse_bytes
from .convert_quality import Recipe, measure
from .convert_speed import CAP, Converted, Ran, disk_speeds, speeds
from .peer_version import require_peer
from .report import Report, Table, ratio

DEMO = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "demo-bf16"


def run(
    *,
    model: Path | None = None,
    synthetic: str | None = None,
    plot: Path | None = None,
    runs: int = 1,
    small: bool = False,
    peer: bool = True,
) -> Report:
    """Measure.

    Args:
        model: a folder with unquantised weights; None: the demo model's, of a checkout.
        synthetic: instead of quality, speed: the size of random checkpoints, such as "3GB".
        plot: an SVG file for size against divergence.
        runs: with `synthetic`: of each converter; the quickest counts.
        small: few recipes on few tokens.
        peer: also mlx-lm.

    Raises:
        ModelNotFoundError: no such folder.
        InvalidRequestError: `plot` without matplotlib.
    """
    if peer:
        require_peer()
    folder = DEMO if model is None else model
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder} has no model. The demo model's bf16 weights are part of a checkout; give "
            "another folder with --model."
        )
    if plot is not None and not available():
        raise InvalidRequestError('--plot needs matplotlib: pip install "mlxinfer[plots]"')
    with TemporaryDirectory() as scratch:
        if synthetic is not None:
            size = parse_bytes(synthetic, param="synthetic")
            return _speed(speeds(Path(scratch), size, folder, runs=runs, peer=peer), Path(scratch))
        length, limit = (128, 2) if small else (1024, None)
        recipes, perplexity, num_tokens = measure(
            folder, Path(scratch), length=length, limit=limit, peer=peer, small=small
        )
    if plot is not None:
        points = [(r.label, r.bits_per_weight, r.kl_mean, r.converter) for r in recipes]
        plot_sizes(plot, points)
    table = _quality_table(recipes, perplexity, num_tokens, length)
    data = {"tokens": num_tokens, "source_perplexity": perplexity}
    return Report("convert", [table], {**data, "recipes": [asdict(r) for r in recipes]})


def _quality_table(recipes: list[Recipe], perplexity: float, num_tokens: int, length: int) -> Table:
    rows = [
        [
            r.converter,
            r.label,
            f"{r.bits_per_weight:.3f}",
            f"{r.kl_mean:.5f}",
            f"{r.kl_p99:.4f}",
            f"{r.top1:.2%}",
            f"{r.perplexity:.4f}",
        ]
        for r in sorted(recipes, key=lambda r: (r.bits_per_weight, r.kl_mean))
    ]
    return Table(
        f"Recipes by size, {num_tokens:,} held-out tokens",
        ["converter", "recipe", "bits/weight", "KL mean", "KL p99", "same top-1", "perplexity"],
        rows,
        f"In windows of {length:,} tokens; perplexity of the source {perplexity:.4f}. KL in nats, "
        "from the source to the recipe. mlxinfer calibrates on its own text, which shares nothing "
        "with the held-out one; all are run by mlxinfer.",
    )


def _speed(found: list[Converted], scratch: Path) -> Report:
    written, read = disk_speeds(scratch)
    rows = []
    for each in found:
        for label, ours in (
            ("--fast", each.fast),
            (f"--fast --max-memory {CAP}", each.capped),
            ("searched scales", each.searched),
        ):
            rows.append(_speed_row(f"{each.label}, {label}", ours, each.theirs))
    table = Table(
        f"Whole processes, {found[0].num_bytes / 1e9:.2f} GB of bf16 to 4 bits",
        ["", "s", "mlx-lm s", "times as fast", "CPU s", "mlx-lm CPU s", "peak MB",
         "mlx-lm peak MB", "share of its peak"],
        rows,
        f"The disk beside it: {written / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read "
        "(from memory, where it is cached). --fast: scales as mlx-lm's, nothing compared.",
    )  # fmt: skip
    data = {
        "disk_bytes_per_s": {"written": written, "read": read},
        "conversions": [asdict(each) for each in found],
    }
    return Report("convert", [table], data)


def _speed_row(label: str, ours: Ran, theirs: Ran | None) -> list[str]:
    row = [label, f"{ours.wall_s:.1f}"]
    if theirs is None:
        return [*row, "-", "-", f"{ours.cpu_s:.1f}", "-", f"{ours.peak_bytes / 1e6:,.0f}", "-", "-"]
    return [
        *row,
        f"{theirs.wall_s:.1f}",
        ratio(theirs.wall_s, ours.wall_s),
        f"{ours.cpu_s:.1f}",
        f"{theirs.cpu_s:.1f}",
        f"{ours.peak_bytes / 1e6:,.0f}",
        f"{theirs.peak_bytes / 1e6:,.0f}",
        f"{ours.peak_bytes / theirs.peak_bytes:.2f}",
    ]
