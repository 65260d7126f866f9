"""What a simulation is built with, and how it is drawn. Knows no requests."""

import random
from dataclasses import dataclass

from mlxinfer.cache.pages import AttentionWindow


@dataclass(frozen=True)
class Sizes:
    """What a simulation is built with."""

    windows: tuple[AttentionWindow, ...]
    page_size: int
    num_pages: tuple[int, ...]  # by group
    max_batch: int
    prefill_chunk: int
    reuse: bool
    headroom: int
    vocab: int
    disk: bool
    num_stages: int = 1


def draw_reaches(rng: random.Random) -> tuple[AttentionWindow, ...]:
    """Layer groups as models have them: full, windows, both, with and without sinks."""
    window = rng.choice([1, 2, rng.randint(2, 9), rng.randint(5, 40)])
    sinks = rng.choice([0, 0, 0, rng.randint(1, 9)])
    other = rng.choice([1, rng.randint(2, 9), rng.randint(5, 40)])
    return rng.choice(
        [
            (AttentionWindow(),),
            (AttentionWindow(window, sinks),),
            (AttentionWindow(), AttentionWindow(window, sinks)),
            (AttentionWindow(), AttentionWindow(window, sinks)),
            (AttentionWindow(window, sinks), AttentionWindow(other + window)),
            (AttentionWindow(), AttentionWindow(window, sinks), AttentionWindow(other + window)),
        ]
    )


def draw_sizes(rng: random.Random, *, tight: bool, disk: bool, extra_pages: int) -> Sizes:
    """Pools from the least in which anything runs; windows as large as the engine makes them."""
    windows, page = draw_reaches(rng), 4 if disk else rng.choice([4, 4, 8, 16])
    max_batch, chunk = rng.randint(1, 6), page * rng.choice([1, 2, 3, 4, 8])
    full = rng.choice([rng.randint(2, 8), rng.randint(6, 14)]) if tight else rng.randint(8, 40)
    counts = []
    for window in windows:
        count = full
        if window.size is not None:
            held = -(-(window.size - 1) // page) + 2 + window.kept_pages(page)
            count = min(full, max_batch * held + chunk // page)
        counts.append(count + extra_pages)
    return Sizes(
        windows=windows,
        page_size=page,
        num_pages=tuple(counts),
        max_batch=max_batch,
        prefill_chunk=chunk,
        reuse=disk or rng.random() < 0.85,
        headroom=rng.choice([0, 2, 8]),
        vocab=rng.choice([2, 16, 1000]),
        disk=disk,
    )
