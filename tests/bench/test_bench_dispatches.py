"""bench dispatches: kernels are in the graph, views are not counted, MLX is as before."""

from pathlib import Path

import mlx.core as mx
import pytest
from bench.bench_parts import check
from models.tiny import tiny_checkpoint

from benchmarks.dispatches import VIEWS, as_on_metal, our_steps, run, traced


def test_kernels_and_fused_operations_count_once() -> None:
    fused = mx.fast.rms_norm
    report = run(peer=False)
    check(report)
    counts = {(e["model"], e["kv_bits"]): e["counts"][0] for e in report.data["dispatches"]}
    for bits in (None, 8):  # keys and values go to the tails in one of the kernels
        dense, small = counts["dense", bits], counts["dense, 4 bits", bits]
        assert "ScatterAxis" not in dense["kinds"]
        # Gate and up are multiplied in the kernel of their activation.
        assert dense["kinds"]["CustomKernel"] == 3
        assert dense["per_layer"] == sum(dense["kinds"].values()) == 8
        # Products of codes add no residual: that and the norm are one kernel, twice a layer.
        assert small["kinds"] == {"QuantizedMatmul": 3, "CustomKernel": 5}
        # Experts are chosen in one more, and weighed in a product. Their activation is three
        # operations here; MLX compiles the three into one.
        mixture, small = counts["experts", bits], counts["experts, 4 bits", bits]
        assert (mixture["kinds"]["CustomKernel"], mixture["per_layer"]) == (3, 14)
        assert (small["kinds"]["CustomKernel"], small["per_layer"]) == (5, 14)
    assert mx.fast.rms_norm is fused


def test_views_are_not_counted() -> None:
    counted = traced(lambda x: x.reshape(2, 4)[:, ::2].T + 1, mx.arange(8))
    assert [name for name in counted if name not in VIEWS] == ["Add"]


@pytest.mark.parametrize(("bits", "most"), [(None, 12), (8, 12), (4, 13)])
def test_a_layer_that_takes_keys_for_values(bits: int | None, most: int, tmp_path: Path) -> None:
    """As many as others, and one that brings values back into their order."""
    sizes = {"head_dim": 64, "global_head_dim": 256}
    sizes |= {"enable_moe_block": False, "max_position_embeddings": 256}
    counts = []
    for number in (1, 2):
        layers = ["sliding_attention", *["full_attention"] * number]
        sizes |= {"num_hidden_layers": len(layers), "layer_types": layers}
        folder = tiny_checkpoint(tmp_path / str(number), "gemma4_text-v4", **sizes)
        with as_on_metal():
            step = our_steps(folder, bits)
            names = traced(step, mx.zeros((1,), mx.int32))
        counts.append(sum(name not in VIEWS for name in names))
    assert counts[1] - counts[0] <= most
