"""bench dispatches: kernels are in the graph, views are not counted, MLX is as before."""

import mlx.core as mx
import pytest

from tests.bench.bench_reports import check
from tests.bench.dispatches import MODEL, VIEWS, run, traced


def test_kernels_and_fused_operations_count_once() -> None:
    fused = mx.fast.rms_norm
    report = run(peer=False, requests=(1,), deep=MODEL, rounds=1)
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
        # Experts are chosen in one more, and weighed in a product.
        mixture, small = counts["experts", bits], counts["experts, 4 bits", bits]
        assert (mixture["kinds"]["CustomKernel"], mixture["per_layer"]) == (4, 12)
        assert (small["kinds"]["CustomKernel"], small["per_layer"]) == (6, 12)
    assert mx.fast.rms_norm is fused


def test_views_are_not_counted() -> None:
    counted = traced(lambda x: x.reshape(2, 4)[:, ::2].T + 1, mx.arange(8))
    assert [name for name in counted if name not in VIEWS] == ["Add"]


@pytest.mark.slow  # 17 s
def test_graphs_are_built_beside_mlx_lm() -> None:
    is_available = mx.metal.is_available
    report = run(requests=(1, 2), deep=MODEL, rounds=1)
    check(report)
    assert [(e["kv_bits"], e["requests"]) for e in report.data["build"]] == [
        (None, 1),
        (None, 2),
        (8, 1),
        (8, 2),
    ]
    assert all(time > 0 for entry in report.data["build"] for time in entry["build_us"])
    assert mx.metal.is_available is is_available
