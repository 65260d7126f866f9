"""How much memory a piece of work takes of MLX."""

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

Result = TypeVar("Result")


def bytes_taken(work: Callable[[], Result]) -> tuple[Result, int, int]:
    """What it returns, and the bytes beyond those that were held before: at the peak, and left."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    mx.synchronize()
    return result, mx.get_peak_memory() - before, mx.get_active_memory() - before
