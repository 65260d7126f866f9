"""Bytes of keys and values that the attention kernels move, over the least there is to move."""

from itertools import product

import pytest
from attention_checks import BITS, ROWS, Moved, latents, moved, moved_latents, one_head
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from scenes import Scene, build

from mlxinfer.metal_kernels.attention_plan import AttentionPlan
from mlxinfer.metal_kernels.paged_attention import Softmax, paged_attention_on_metal

SAMPLE = [(64, 8, 8, 1), (128, 16, 4, 1), (128, 4, 1, 1), (128, 4, 16, 1), (256, 16, 8, 1)]
SAMPLE += [(128, 8, 4, 4), (256, 4, 16, 4)]


def attended(scene: Scene, replace: dict[str, str] | None = None) -> tuple[MetalCPU, AttentionPlan]:
    """The machine on which attention ran without a fault, and the plan of it."""
    made, machine = build(scene), MetalCPU(replace=replace)
    arguments = made.queries, made.keys, made.values, made.plan
    machine.clean(lambda: paged_attention_on_metal(*arguments, Softmax(1.0)))
    return machine, made.plan


def assert_least(ours: Moved, group: int, queries: int, most: float = 1.05) -> None:
    assert 1 <= ours.unique <= 1.05
    assert 1 <= ours.requested <= (most if group <= 8 and queries == 1 else 2)
    assert ours.dequantised is None or 1 <= ours.dequantised <= 1.05


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(("dim", "bits", "group", "queries"), every(2, SAMPLE))
def test_each_key_and_value_is_loaded_once(dim: int, bits: int, group: int, queries: int) -> None:
    assert_least(moved(one_head(dim, bits, group, queries, 300)), group, queries)


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "bits", "rows"), list(product((64, 80, 96, 112, 128, 192, 256), BITS, ROWS))
)
def test_each_key_is_read_once_for_every_size(dim: int, bits: int, rows: tuple[int, int]) -> None:
    # Where a group of codes is no whole number of runs, lanes ask for its scale more than once.
    most = 1.05 if bits == 16 or dim % 64 == 0 else 1.4
    assert_least(moved(one_head(dim, bits, *rows, 300)), *rows, most)


@requires_compiler
def test_a_window_is_all_that_is_read() -> None:
    scene = Scene([400], [1], group=4, key_dim=128, value_dim=128, window=70, sinks=4)
    assert_least(moved(scene), 4, 1)


@requires_compiler
@pytest.mark.parametrize("bits", [pytest.param((None, None), marks=pytest.mark.ci), (8, 8)])
def test_keys_in_values_come_from_memory_once(bits: tuple[int | None, int | None]) -> None:
    """640 numbers of 1,024: all are keys or values, 384 of them both."""
    scene = Scene([300], [1], group=4, key_dim=512, value_dim=512, rope_dims=128, bits=bits)
    traffic = moved(scene)
    assert traffic.unique <= 1.05
    assert traffic.requested <= 1.05 * 1024 / 640


@requires_compiler
def test_split_sequences_of_a_batch_too() -> None:
    scene = Scene([400, 3, 50], [1, 1, 1], kv_heads=2, group=4, item_blocks=4)
    assert_least(moved(scene), 4, 1)


PAIR = "reinterpret_cast<const device vec<S, 2>*>(groups)[token * GROUPS + group]"
HALVES = "{groups[2 * (token * GROUPS + group)], groups[2 * (token * GROUPS + group) + 1]}"


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("bits", "prefill", "replace", "loads"),
    every(
        2,
        [
            (8, False, {}, 1),
            (4, False, {}, 1),
            (8, True, {}, 1),
            (4, False, {PAIR: HALVES}, 2),  # what the test would see if they were loaded one by one
        ],
    ),
)
def test_scale_and_bias_are_one_load_of_four_bytes(
    bits: int, prefill: bool, replace: dict[str, str], loads: int
) -> None:
    scene = Scene([150], [20 if prefill else 1], bits=(bits, bits), prefill=prefill)
    machine, _ = attended(scene, replace)
    buffers = machine.reports[0].buffers
    for kind in ("key", "value"):
        groups = buffers[f"{kind}_groups"]
        assert groups.num_loads * 4 == groups.requested_bytes * loads > 0
        # Lanes share the load, and no SIMD group repeats it.
        assert groups.requested_once_per_simdgroup_bytes == groups.unique_bytes
        assert groups.unique_bytes * 64 * bits == 8 * 4 * buffers[f"{kind}_codes"].unique_bytes


@requires_compiler
@pytest.mark.parametrize("heads", [16, 20, 48])
def test_latents_are_read_once_for_16_heads(heads: int) -> None:
    ours = moved_latents(latents(8, heads, 100))
    assert ours.unique == ours.dequantised == -(-heads // 16)  # by each threadgroup


@requires_compiler
def test_the_second_pass_reads_partials_once_and_shares_them_among_simd_groups() -> None:
    barriers = set()
    for items in (8, 40):
        machine, plan = attended(Scene([16 * items], [1], group=2, item_blocks=1))
        first, reduce = machine.reports
        assert (reduce.kernel, plan.num_items) == ("attention_reduce", items)
        partials, figures = (reduce.buffers[name] for name in ("partials", "figures"))
        assert partials.requested_bytes == partials.unique_bytes
        assert partials.unique_bytes == first.buffers["outputs"].stored_bytes
        # Peaks, then peaks and totals by one thread each; peaks again by the 32 lanes of one group.
        assert figures.num_loads == 2 * items * (3 + 32)
        barriers.add(reduce.num_threadgroup_barriers)
    assert len(barriers) == 1
