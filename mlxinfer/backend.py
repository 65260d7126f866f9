"""Imports MLX with limits that fit this machine, or says what to install. Knows no models."""

import importlib
import os
import platform
import sys
import weakref
from functools import cache

from .errors import BackendMissingError
from .memory import total_memory_bytes

# MLX keeps freed buffers for reuse, by default up to 1.5 times what the GPU should use in all
# (mlx/backend/metal/allocator.cpp). The buffers of a prompt's steps need far less.
CACHE_SHARE = 16
# MLX ends a Metal command buffer when the inputs of its operations have more than 40 to 50 Mi
# elements (mlx/backend/metal/device.cpp), and a layer of the KV cache alone may have more. Such a
# share of memory is above the 16-bit numbers of one of 32 layers that fill the memory. Temporary
# arrays are held until their command buffer ends, so the limit stays a limit.
BUFFER_SHARE = 64
# The number of operations is another limit, and stays MLX's own: see docs/options.md.
BUFFER_VARIABLE, OPERATIONS_VARIABLE = "MLX_MAX_MB_PER_BUFFER", "MLX_MAX_OPS_PER_BUFFER"
# Beside what models may take: the arrays of a step, and freed buffers.
SPARE_SHARE, MIN_SPARE = 1 / 16, 1 << 30

_promised: dict[int, int] = {}  # identity of a model -> bytes that it may take, while it lives


def require_mlx() -> None:
    """Import `mlx.core`, or say what to install. Call it before anything that imports mlx.

    The first call limits MLX's cache of freed buffers and, on a Mac, lets command buffers grow
    beyond the default unless the environment says otherwise.

    Raises:
        BackendMissingError: MLX is not installed, or has no backend for this machine.
    """
    if sys.platform == "darwin":  # MLX reads it when it first uses the GPU
        os.environ.setdefault(BUFFER_VARIABLE, str(command_buffer_mb(total_memory_bytes())))
    try:
        importlib.import_module("mlx.core")
    except (ImportError, OSError) as error:
        raise BackendMissingError(f"MLX cannot be loaded ({error}). {advice()}") from error
    _limit_cache()


def command_buffer_mb(memory_bytes: int) -> int:
    """The limit of a Metal command buffer on a machine with so much memory, in Mi elements."""
    return max(memory_bytes // BUFFER_SHARE >> 20, 50)


def command_buffer_limits() -> str:
    """The limits of a Metal command buffer: the environment's, else MLX's for any chip."""
    elements, operations = (
        os.environ.get(name, "40 to 50") for name in (BUFFER_VARIABLE, OPERATIONS_VARIABLE)
    )
    return f"{elements} Mi elements, {operations} operations"


@cache
def _limit_cache() -> None:
    mx = importlib.import_module("mlx.core")
    limit = total_memory_bytes() // CACHE_SHARE
    mx.set_cache_limit(min(limit, mx.set_cache_limit(limit)))  # a program may have set a lower one


def limit_memory(model: object, num_bytes: int) -> None:
    """Let MLX use what the models of this process may take, and some for steps.

    MLX frees buffers that it keeps for reuse when it reaches the limit. Where arrays in use alone
    reach it, MLX waits for operations in flight; it refuses none.

    Args:
        model: just loaded; it counts as long as it lives.
        num_bytes: of its weights and its KV cache at its largest.
    """
    mx = importlib.import_module("mlx.core")
    mx.clear_cache()  # of loading
    _promised[id(model)] = num_bytes
    weakref.finalize(model, _promised.pop, id(model), None).atexit = False
    unpromised = max(mx.get_active_memory() - sum(_promised.values()), 0)  # arrays of the program
    limit = memory_limit(sum(_promised.values()) + unpromised)
    mx.set_memory_limit(min(limit, _first_memory_limit()))


def memory_limit(num_bytes: int) -> int:
    return num_bytes + max(int(num_bytes * SPARE_SHARE), MIN_SPARE)


@cache
def _first_memory_limit() -> int:
    """MLX's own limit, or what the program has set before the first model."""
    mx = importlib.import_module("mlx.core")
    first: int = mx.set_memory_limit(1)
    mx.set_memory_limit(first)
    return first


def advice(system: str = sys.platform, machine: str | None = None) -> str:
    """Say how to install MLX on `system` (of sys.platform) and `machine` (of platform.machine)."""
    machine = machine or platform.machine()
    if system == "darwin" and machine == "arm64":
        return "Reinstall it: pip install --force-reinstall mlx"
    if system == "darwin":
        return (
            "MLX needs Apple silicon and a native Python; this one is built for "
            f"{machine} (Rosetta or an Intel Mac). Install an arm64 Python."
        )
    if system == "linux":
        return (
            'On Linux install a backend: pip install -e ".[cpu]" (or ".[cuda]") in a checkout of '
            "mlxinfer"
        )
    return "MLX runs on macOS with Apple silicon, and on Linux."
