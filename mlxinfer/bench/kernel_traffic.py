"""Bytes of keys and values that attention kernels move, as shares of the least there is to move.

The kernels are executed on the CPU by the machine in tests/metal_cpu, which sees every load: so
this is exact, and says nothing of a GPU's caches or speed. A checkout has the machine, a wheel
does not.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..errors import BackendMissingError
from ..metal_kernels import launch
from ..metal_kernels.launch import running_on
from ..metal_kernels.mla_attention import mla_attention_on_metal
from ..metal_kernels.paged_attention_kernel import paged_attention_on_metal
from .kernel_scenes import Inputs, Scene, build

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
    """A module of the machine that executes kernels.

    Raises:
        BackendMissingError: this is no checkout, or the compiler is missing.
    """
    tests = Path(launch.__file__).resolve().parents[1] / "tests"
    if not (tests / "metal_cpu").is_dir():
        raise BackendMissingError(
            f"There is no machine that executes Metal kernels in {tests / 'metal_cpu'}: it comes "
            "with a checkout of mlxinfer, not with a wheel. Run this in a checkout."
        )
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
    if not import_module("metal_cpu").compiler_is_here():
        raise BackendMissingError(
            "The machine that executes Metal kernels needs a compiler: pip install ziglang"
        )
    return import_module(name)


def moved(scene: Scene) -> Moved:
    """What the paged kernels move."""
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
    """What the latent kernel moves; of the scene's planes the first is the latents."""
    inputs = build(scene)
    report = _report(
        inputs,
        lambda: mla_attention_on_metal(inputs.queries, inputs.keys, inputs.plan, scale=1.0),
    )
    width = inputs.keys.pages[0].shape[-1]
    codes = inputs.visible * width if scene.bits[0] else None
    return _shares(report, inputs.visible * inputs.keys.vector_bytes, codes)


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
    """What MLX's own kernels move for one sequence of plain keys in one piece.

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
    """What mlx-lm's quantised attention moves, from the shapes of its operations.

    Two quantised products, of queries with keys and of weights with values, whose batch repeats
    keys and values for every query head of a group; between them the scores are written, read and
    written by the softmax, and read. Query rows of one head share a product.
    """
    (length,), (rows,) = scene.lengths, scene.queries
    inputs = build(scene)
    scores = scene.kv_heads * scene.group * rows * length * scene.dtype.size
    return (scene.group * inputs.least_bytes + 4 * scores) / inputs.least_bytes
