"""The tables of `bench memory`. Knows numbers; no engine."""

from collections.abc import Mapping, Sequence

from .memory_scenes import Change, Decode, Waste
from .report import Table, ratio

COLUMNS = ["", "mlxinfer", "mlx-lm", "ratio"]


def decode_table(found: Mapping[tuple[int, int], Sequence[Decode]]) -> Table:
    """Bytes and speed of decode steps, for each number of streams."""
    rows = []
    for (count, length), sides in found.items():
        label = f"{count} x {length:,}"
        held = [side.held_bytes for side in sides]
        extra = [side.extra_bytes for side in sides]
        speed = [side.tokens_per_s for side in sides]
        rows.append([f"{label}: KV held (MB)", *megabytes(held)])
        rows.append([f"{label}: peak above it (MB)", *megabytes(extra)])
        shares = [f"{side.extra_share:.2f}x" for side in sides]
        rows.append([f"{label}: peak above it / KV held", *_filled(shares)])
        cells = [f"{value:,.1f}" for value in speed]
        rows.append([f"{label}: tokens/s", *_filled(cells, ratio(speed[0], speed[-1]))])
    return Table(
        "Decode steps launched ahead (streams x tokens)",
        COLUMNS,
        rows,
        "A cache that is copied while it is updated would show as a peak as large as itself.",
    )


def waste_table(found: Sequence[Waste], lengths: Sequence[int]) -> Table:
    """Bytes held a live token."""
    rows = [
        ["live tokens (MB)", *_cells([w.live_bytes for w in found])],
        ["held (MB)", *megabytes([w.held_bytes for w in found])],
        ["of which tails (MB)", *_cells([w.tail_bytes for w in found])],
        [
            "held / live",
            *_filled([f"{w.held_bytes / w.live_bytes:.3f}x" for w in found]),
        ],
        [
            "held without tails / live in whole pages",
            *_filled([f"{(w.held_bytes - w.tail_bytes) / w.rounded_bytes:.3f}x" for w in found]),
        ],
    ]
    text = ", ".join(f"{length:,}" for length in lengths)
    return Table(f"KV held for streams of {text} tokens", COLUMNS, rows)


def change_table(found: Sequence[Change], count: int, length: int) -> Table:
    """Bytes above what is held, in three kinds of steps."""
    rows = [
        ["nobody comes or goes", *megabytes([c.steady_bytes for c in found])],
        ["a short prompt joins", *megabytes([c.join_bytes for c in found])],
        ["it leaves", *megabytes([c.leave_bytes for c in found])],
    ]
    return Table(
        f"Peak memory (MB) above what is held, {count} streams of {length:,} tokens",
        COLUMNS,
        rows,
    )


def megabytes(values: Sequence[int]) -> list[str]:
    """Ours, theirs and how many times less ours is."""
    return _filled(_cells(values)[: len(values)], ratio(values[-1], values[0]))


def _cells(values: Sequence[int]) -> list[str]:
    return _filled([f"{value / 1e6:,.2f}" for value in values])


def _filled(cells: list[str], last: str = "-") -> list[str]:
    """Two sides and a ratio; dashes where mlx-lm was not asked."""
    return [*cells, last] if len(cells) == 2 else [*cells, "-", "-"]
