"""`bench kernels`: bytes of keys and values that attention kernels move, ours beside MLX's.

The kernels are executed on the CPU by tests/metal_cpu, which sees every load: the counts are exact,
and say nothing of a GPU's caches or speed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import BackendMissingError
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.mla_attention import mla_attention_on_metal
from mlxinfer.metal_kernels.paged_attention import paged_attention_on_metal
from mlxinfer.metal_kernels.selfcheck import KINDS
from tests.bench.kernel_scenes import Inputs, Scene, build, vector_bytes
from tests.bench.launches import launch_size, launch_table

TWO_PASS_BLOCKS = 32
SHARED_HEADS = {(8, 64): 8, (8, 128): 4}  # (group, head dim) that MLX's sharing kernel has


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of keys and values over the least there is: each once per KV head.

    Attributes:
        requested: by all threads. A scale or bias that several lanes of a SIMD group load at once
            counts once, numbers and codes count for each lane.
        unique: that a threadgroup loads at least once, summed over threadgroups: what comes from
            memory where only threads of one threadgroup share a cache.
        dequantised: how often each code is loaded, and so dequantised; None: plain.
    """

    requested: float
    unique: float
    dequantised: float | None = None


def machine(name: str = "metal_cpu") -> ModuleType:
    """A module of the machine that executes kernels, tests/metal_cpu.

    Raises:
        BackendMissingError: the compiler is missing.
    """
    if not import_module("metal_cpu").compiler_is_here():
        raise BackendMissingError(
            "The machine that executes Metal kernels needs a compiler: pip install ziglang"
        )
    return import_module(name)


def moved(scene: Scene) -> Moved:
    """Count the bytes that the paged kernels move."""
    inputs = build(scene)
    report = _report(
        inputs,
        lambda: paged_attention_on_metal(
            inputs.queries,
            inputs.keys,
            inputs.values,
            inputs.plan,
            scale=scene.key_dim**-0.5,
            value_dim=scene.value_dim,
        ),
    )
    codes = _codes_bytes(inputs) if scene.bits != (None, None) else None
    return _shares(report, inputs.least_bytes, codes)


def moved_latents(scene: Scene) -> Moved:
    """Count the bytes that the latent kernel moves; the scene's first plane holds the latents."""
    inputs = build(scene)
    report = _report(
        inputs,
        lambda: mla_attention_on_metal(inputs.queries, inputs.keys, inputs.plan, scale=1.0),
    )
    width = inputs.keys.pages[0].shape[-1]
    codes = inputs.visible * width if scene.bits[0] else None
    return _shares(report, inputs.visible * vector_bytes(inputs.keys), codes)


def _report(inputs: Inputs, call: Any) -> Any:
    split = ("outputs", "figures") if inputs.plan.is_split else ()
    device = machine().MetalCPU(may_stay_unwritten=split)
    with running_on(device):
        call()
    device.assert_clean()
    return device.reports[0]


def _shares(report: Any, least: int, codes: int | None) -> Moved:
    names = [
        name
        for name in report.buffers
        if name.startswith(("key_", "value_", "tail_", "latent_")) and not name.endswith("_shape")
    ]
    numbers = report.total([name for name in names if name.endswith("codes")])
    groups = report.total([name for name in names if not name.endswith("codes")])
    requested = numbers.requested_bytes + groups.requested_once_per_simdgroup_bytes
    unique = numbers.unique_per_threadgroup_bytes + groups.unique_per_threadgroup_bytes
    return Moved(
        requested / least,
        unique / least,
        None if codes is None else numbers.requested_bytes / codes,
    )


def _codes_bytes(inputs: Inputs) -> int:
    heads = inputs.keys.pages[0].shape[0]
    widths = sum(plane.pages[0].shape[-1] for plane in (inputs.keys, inputs.values))
    return inputs.visible * heads * widths


def moved_by_mlx(scene: Scene) -> dict[str, Moved | None]:
    """Count the bytes that MLX's own kernels move for one sequence of plain keys in one piece.

    None where MLX does not run such a kernel for these sizes.
    """
    kernels = machine("metal_cpu.mlx_kernels")
    (length,), (rows,), dim = scene.lengths, scene.queries, scene.key_dim
    shape = (1, scene.kv_heads, length, dim)
    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    queries = mx.random.normal((1, scene.kv_heads * scene.group, rows, dim))
    call = kernels.Attention(
        *(array.astype(scene.dtype) for array in (queries, keys, values)),
        num_keys=length,
        scale=dim**-0.5,
        mask="causal" if rows > 1 else None,
    )
    least = 2 * scene.kv_heads * length * dim * scene.dtype.size
    shared = SHARED_HEADS.get((scene.group, dim)) if rows == 1 else None
    few = scene.group * rows <= 32  # else MLX materialises the scores
    runs = {
        "sdpa_vector": few and kernels.sdpa_vector(call),
        "2pass": few and kernels.sdpa_vector_2pass(call, blocks=TWO_PASS_BLOCKS),
        "2pass_gqa": shared
        and kernels.sdpa_vector_2pass(call, blocks=TWO_PASS_BLOCKS, shared=shared),
    }
    return {name: _mlx_shares(run.reports[0], least) if run else None for name, run in runs.items()}


def _mlx_shares(report: Any, least: int) -> Moved:
    total = report.total(["keys", "values"])
    return Moved(total.requested_bytes / least, total.unique_per_threadgroup_bytes / least)


def moved_unfused(scene: Scene) -> float:
    """Count the bytes that mlx-lm's quantised attention moves, from the shapes of its operations.

    Two quantised products, of queries with keys and of weights with values; its batch repeats
    keys and values for every query head of a group; between them the scores are written, read and
    written by the softmax, and read. Query rows of one head share a product.
    """
    (length,), (rows,) = scene.lengths, scene.queries
    inputs = build(scene)
    scores = scene.kv_heads * scene.group * rows * length * scene.dtype.size
    return (scene.group * inputs.least_bytes + 4 * scores) / inputs.least_bytes


STORED: dict[int, int | None] = {16: None, 8: 8, 4: 4}
BITS = tuple(STORED)
ROWS = tuple((group, queries) for queries in (1, 4) for group in (1, 4, 8, 16))
LAUNCHED = tuple(KINDS)
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
    samples = [variant for kind in LAUNCHED for variant in KINDS[kind].samples]
    sizes = [launch_size(variant, machine().MetalCPU(checked=False)) for variant in samples]
    data = {
        "launches": [asdict(size) for size in sizes],
        "attention": [asdict(one) for one in found],
        "latent_attention": [
            {"bits": bits, "heads": rows[0], "moved": asdict(ours)} for bits, rows, ours in latents
        ],
    }
    tables = [_table(found, tokens), _latent_table(latents, tokens)]
    return Report("kernels", [*tables, launch_table(sizes)], data)


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
        "Keys and values are the same bytes. A threadgroup has 16 heads at most; each reads them.",
    )


def _pair(one: Moved | None) -> str:
    return "-" if one is None else f"{one.requested:.2f} / {one.unique:.2f}"
