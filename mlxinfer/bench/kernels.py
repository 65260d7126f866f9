"""`bench kernels`: bytes that attention kernels move, ours beside MLX's. Assembles the tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .kernel_scenes import Scene
from .kernel_traffic import Moved, moved, moved_by_mlx, moved_latents, moved_unfused
from .report import Report, Table

STORED: dict[int, int | None] = {16: None, 8: 8, 4: 4}
BITS = tuple(STORED)
ROWS = tuple((group, queries) for queries in (1, 4) for group in (1, 4, 8, 16))
LATENT_ROWS = ((16, 1), (20, 1), (128, 1))
MLX = ("sdpa_vector", "2pass", "2pass_gqa")


@dataclass(frozen=True, slots=True)
class Found:
    """`group` query heads and `queries` query tokens of a KV head, ours beside theirs."""

    head_dim: int
    group: int
    queries: int
    ours: dict[int, Moved]  # by bits
    mlx: dict[str, Moved | None]  # of plain keys and values
    unfused: dict[int, float]  # by bits


def run(*, head_dims: Sequence[int] = (64, 128, 256), tokens: int = 500) -> Report:
    """All settings.

    Args:
        head_dims: of keys and values.
        tokens: of the one sequence.
    """
    found = [compare(dim, *rows, tokens) for dim in head_dims for rows in ROWS]
    latents = [
        (bits, rows, _latents(bits, rows, tokens)) for bits in BITS[:2] for rows in LATENT_ROWS
    ]
    data = {
        "attention": [asdict(one) for one in found],
        "latent_attention": [
            {"bits": bits, "heads": rows[0], "moved": asdict(ours)} for bits, rows, ours in latents
        ],
    }
    return Report("kernels", [_table(found, tokens), _latent_table(latents, tokens)], data)


def compare(dim: int, group: int, queries: int, tokens: int) -> Found:
    """One KV head of `dim` numbers, in all formats."""
    scenes = {
        bits: Scene(
            [tokens], [queries], group=group, key_dim=dim, value_dim=dim, bits=(stored, stored)
        )
        for bits, stored in STORED.items()
    }
    return Found(
        dim,
        group,
        queries,
        {bits: moved(scene) for bits, scene in scenes.items()},
        moved_by_mlx(scenes[16]),
        {bits: moved_unfused(scene) for bits, scene in scenes.items() if STORED[bits]},
    )


def _latents(bits: int, rows: tuple[int, int], tokens: int) -> Moved:
    heads, queries = rows
    stored = (STORED[bits], None)
    return moved_latents(
        Scene([tokens], [queries], group=heads, key_dim=576, value_dim=8, bits=stored)
    )


def _table(found: list[Found], tokens: int) -> Table:
    rows = [
        [
            f"{one.head_dim}: {one.group} x {one.queries}",
            *(_pair(one.ours[bits]) for bits in BITS),
            f"{max(ours.dequantised or 0 for ours in one.ours.values()):.2f}",
            *(_pair(one.mlx[name]) for name in MLX),
            *(f"{one.unfused[bits]:.1f}" for bits in BITS[1:]),
        ]
        for one in found
    ]
    ours, unfused = ([f"{who}, {bits}" for bits in BITS] for who in ("ours", "unfused"))
    return Table(
        f"Bytes of keys and values that attention moves, {tokens:,} tokens",
        ["head dim: GQA x queries", *ours, "dequantised", *MLX, *unfused[1:]],
        rows,
        "Over the least: each byte once per KV head. First what threads request, then what a "
        "threadgroup requests at least once, summed over threadgroups. 16, 8, 4: bits of keys and "
        "values; dequantised: loads of a code, at most. Ours reads shuffled pages and a tail; "
        "MLX's kernels (16 bits) one piece of keys. Counted while the kernels run on the CPU. "
        "Unfused: mlx-lm's quantised attention, computed from the shapes of its operations, scores "
        "included. -: there is no such kernel.",
    )


def _latent_table(found: list[tuple[int, tuple[int, int], Moved]], tokens: int) -> Table:
    return Table(
        f"The same for a latent cache of 576 numbers, {tokens:,} tokens",
        ["bits, heads", "ours"],
        [[f"{bits} bits, {rows[0]}", _pair(ours)] for bits, rows, ours in found],
        "Keys and values are the same bytes. A threadgroup has 32 heads at most; each reads them.",
    )


def _pair(one: Moved | None) -> str:
    return "-" if one is None else f"{one.requested:.2f} / {one.unique:.2f}"
