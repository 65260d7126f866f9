"""Imports MLX with limits that fit this machine, or says what to install. Knows no models."""

import importlib
import os
import platform
import sys
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
BUFFER_VARIABLE = "MLX_MAX_MB_PER_BUFFER"


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


@cache
def _limit_cache() -> None:
    mx = importlib.import_module("mlx.core")
    limit = total_memory_bytes() // CACHE_SHARE
    mx.set_cache_limit(min(limit, mx.set_cache_limit(limit)))  # a program may have set a lower one


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
        return 'On Linux install a backend: pip install "mlxinfer[cpu]" (or "mlxinfer[cuda]")'
    return "MLX runs on macOS with Apple silicon, and on Linux."
