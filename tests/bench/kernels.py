"""`bench kernels`: bytes of keys and values that attention kernels move, ours beside MLX's.

The kernels are executed on the CPU by tests/metal_cpu, which sees every load: the counts are exact,
and say nothing of a GPU's caches or speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import BackendMissingError
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.mla_attention import mla_attention_on_metal
from mlxinfer.metal_kernels.paged_attention import paged_attention_on_metal
from tests.bench.kernel_scenes import Inputs, Scene, build, vector_bytes

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
LATENT_HEADS = (16, 20, 128)
MLX = ("sdpa_vector", "2pass", "2pass_gqa")


def one_head(dim: int, bits: int, group: int, queries: int, tokens: int) -> Scene:
    """`group` query heads and `queries` query tokens of one KV head of `dim` numbers."""
    stored = (STORED[bits], STORED[bits])
    return Scene([tokens], [queries], group=group, key_dim=dim, value_dim=dim, bits=stored)


def latents(bits: int, heads: int, tokens: int) -> Scene:
    """One query token of a latent cache of 576 numbers."""
    stored = (STORED[bits], None)
    return Scene([tokens], [1], group=heads, key_dim=576, value_dim=8, bits=stored)


def run(*, head_dims: Sequence[int], tokens: int) -> Report:
    """All settings.

    Args:
        head_dims: of keys and values.
        tokens: of the one sequence.
    """
    attention, rows = [], []
    for dim, (group, queries) in product(head_dims, ROWS):
        scenes = {bits: one_head(dim, bits, group, queries, tokens) for bits in BITS}
        ours = {bits: moved(scene) for bits, scene in scenes.items()}
        mlx = moved_by_mlx(scenes[16])
        unfused = {bits: moved_unfused(scenes[bits]) for bits in BITS[1:]}
        data = {"ours": _data(ours), "mlx": _data(mlx), "unfused": unfused}
        attention.append({"head_dim": dim, "group": group, "queries": queries, **data})
        rows.append(
            [
                f"{dim}: {group} x {queries}",
                *(_pair(ours[bits]) for bits in BITS),
                f"{max(one.dequantised or 0 for one in ours.values()):.2f}",
                *(_pair(mlx[name]) for name in MLX),
                *(f"{share:.1f}" for share in unfused.values()),
            ]
        )
    names = [
        (f"{bits} bits, {heads}", (bits, heads)) for bits in BITS[:2] for heads in LATENT_HEADS
    ]
    latent = {name: moved_latents(latents(*sizes, tokens)) for name, sizes in names}
    tables = [_table(rows, tokens), _latent_table(latent, tokens)]
    return Report("kernels", tables, {"attention": attention, "latent_attention": _data(latent)})


def _data(found: Mapping[Any, Moved | None]) -> dict[Any, Any]:
    return {name: None if one is None else asdict(one) for name, one in found.items()}


def _table(rows: list[list[str]], tokens: int) -> Table:
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


def _latent_table(found: Mapping[str, Moved], tokens: int) -> Table:
    return Table(
        f"The same for a latent cache of 576 numbers, {tokens:,} tokens",
        ["bits, heads", "ours"],
        [[name, _pair(ours)] for name, ours in found.items()],
        "Keys and values are the same bytes. A threadgroup has 16 heads at most; each reads them.",
    )


def _pair(one: Moved | None) -> str:
    return "-" if one is None else f"{one.requested:.2f} / {one.unique:.2f}"
