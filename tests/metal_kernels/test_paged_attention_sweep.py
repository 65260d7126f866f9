"""Every dtype, format and head dim, each with drawn scenes. Slow: select it with -m slow -s.

Decode and verification, and prompts in tiles: `pytest -m slow -s tests/metal_kernels`.
"""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attention_checks import check_scene
from metal_cpu import requires_compiler
from scenes import Scene

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
FORMATS = {"plain": (None, None), "8": (8, 8), "4": (4, 4), "8, 4": (8, 4), "4, plain": (4, None)}
DIMS = (64, 80, 96, 112, 128, 192, 256)
LARGE = [(dtype, bits, 512) for dtype in ("float16", "bfloat16") for bits in FORMATS]
NUM_SCENES = 10
# Few, so that most scenes of a head dim share their compiled kernels: group, query tokens.
ROWS = ((1, 1), (4, 1), (8, 1), (16, 1), (1, 8), (4, 4), (3, 2), (16, 4), (5, 7), (16, 8))
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 200)
REACHES = ((None, 0), (1, 0), (16, 0), (33, 4), (40, 17), (100, 1))
ALL = [*product(DTYPES, FORMATS, DIMS), *LARGE]


def draw(rng: np.random.Generator, index: int, dim: int, **fixed: object) -> Scene:
    """The `index`-th scene: each listed value comes in turn, and with others at random."""
    group, most = ROWS[index % len(ROWS)]
    batch = int(rng.choice(BATCHES))
    queries = [most, *rng.integers(1, most + 1, batch - 1).tolist()]
    lengths = [max(int(rng.choice(LENGTHS)), count) for count in queries]
    shape = shape_of(rng, group, dim)
    blocks = None if index % 2 else int(rng.choice([1, 2, 4]))
    return Scene(lengths, queries, **shape, item_blocks=blocks, seed=index, **fixed)


def shape_of(rng: np.random.Generator, group: int, dim: int) -> dict[str, Any]:
    """Of a scene, what no scene has of its own."""
    window, sinks = REACHES[int(rng.integers(len(REACHES)))]
    shape = {"kv_heads": int(rng.integers(1, 3)), "group": group, "key_dim": dim, "value_dim": dim}
    page_size = int(rng.choice([16, 16, 32]))
    return {**shape, "window": window, "sinks": sinks, "page_size": page_size}


CHUNKS = ((1, [9]), (1, [40, 17]), (2, [64]), (4, [33, 12, 20]), (6, [25]), (8, [21]), (16, [12]))
NUM_CHUNK_SCENES = 7


def draw_chunks(rng: np.random.Generator, index: int, dim: int, **fixed: object) -> Scene:
    """Chunks of some sequences, whole or with something before them."""
    group, queries = CHUNKS[index % len(CHUNKS)]
    lengths = [count + int(rng.choice([0, 1, 15, 16, 64, 100])) for count in queries]
    shape = shape_of(rng, group, dim)
    blocks = 1 if index % 3 == 2 else None
    return Scene(lengths, queries, **shape, item_blocks=blocks, prefill=True, seed=index, **fixed)


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bits", "dim"), ALL)
@pytest.mark.parametrize("prompts", [False, True], ids=["tokens", "prompts"])
def test_random_scenes_agree_with_the_twin(dtype: str, bits: str, dim: int, prompts: bool) -> None:
    rng = np.random.default_rng([len(dtype), len(bits), dim])
    make, count = (draw_chunks, NUM_CHUNK_SCENES) if prompts else (draw, NUM_SCENES)
    shares = [
        check_scene(
            make(rng, index, dim, dtype=DTYPES[dtype], bits=FORMATS[bits]),
            seed=int(rng.integers(0, 4)),
            sinks=index % 4 < 2,
            log_sums=not prompts and index % 2 == 0,
            soft_cap=[None, 5.0, 30.0][index % 3],
        )
        for index in range(count)
    ]
    print(f"{dtype}, {bits}, {dim}: {len(shares)} clean, worst error {max(shares):.2f} of allowed")
