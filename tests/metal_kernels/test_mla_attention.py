from itertools import product

import mlx.core as mx
import pytest
from attention_checks import check
from metal_cpu import requires_compiler
from models.runs import every
from scenes import Scene, build

from mlxinfer.metal_kernels.mla_attention import (
    mla_attention_gathered,
    mla_attention_on_metal,
    row_blocks,
)

DIMS = {"key_dim": 576, "value_dim": 8}  # the second plane is not used
BARE = {"key_dim": 512, "value_dim": 8}  # without a rotary part
SCENES = {
    "one token": Scene([1], [1], group=16, **DIMS),
    "ragged": Scene([15, 33, 40], [1, 1, 1], group=16, **DIMS),
    "8 bits, three blocks": Scene([40, 17], [2, 1], group=20, bits=(8, None), **DIMS),
    "split, five blocks": Scene([33], [1], group=70, item_blocks=1, **DIMS),
    "no rotary part": Scene([15, 33], [1, 2], group=16, **BARE),
    "no rotary part, 8 bits": Scene([40], [1], group=20, bits=(8, None), item_blocks=1, **BARE),
    "float32, window": Scene([64], [1], group=5, window=20, sinks=2, dtype=mx.float32, **DIMS),
}


def run(scene: Scene, seed: int = 0) -> float:
    inputs = build(scene)
    return check(
        mla_attention_on_metal,
        mla_attention_gathered,
        inputs,
        inputs.keys,
        seed=seed,
        scale=192**-0.5,
    )


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(2, SCENES))
def test_agrees_with_its_twin(name: str) -> None:
    run(SCENES[name], seed=len(name))


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bits", "rows"),
    list(product((mx.float32, mx.float16, mx.bfloat16), (None, 8), ((16, 1), (20, 4), (128, 1)))),
)
def test_random_scenes_agree_with_the_twin(
    dtype: mx.Dtype, bits: int | None, rows: tuple[int, int]
) -> None:
    group, queries = rows
    shares = []
    for index, lengths in enumerate(([16, 17], [31] * 9, [128], [129, 4, 65])):
        scene = Scene(
            lengths,
            [queries] * len(lengths),
            group=group,
            dtype=dtype,
            bits=(bits, None),
            item_blocks=(None, 2)[index % 2],
            seed=index,
            **DIMS,
        )
        shares.append(run(scene, seed=index))
    print(f"{dtype}, {bits}, {rows}: {len(shares)} clean, worst error {max(shares):.2f} of allowed")


def test_blocks_hold_all_rows() -> None:
    assert [row_blocks(rows) for rows in (1, 16, 17, 128)] == [1, 1, 2, 8]
