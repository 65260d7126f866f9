"""Whether MLX can be imported, and what to install where it cannot. Knows nothing else of it."""

import importlib
import platform
import sys

from .errors import BackendMissingError


def require_mlx() -> None:
    """Import `mlx.core`, or say what to install. Call it before anything that imports mlx.

    Raises:
        BackendMissingError: MLX is not installed, or has no backend for this machine.
    """
    try:
        importlib.import_module("mlx.core")
    except (ImportError, OSError) as error:
        raise BackendMissingError(f"MLX cannot be loaded ({error}). {advice()}") from error


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
