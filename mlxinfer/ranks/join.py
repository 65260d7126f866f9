"""Joins the group of MLX's `distributed`: once in the life of a process."""

import json
import os
import tempfile
from importlib.metadata import version as installed

import mlx.core as mx

from .hosts import Place


def version() -> str:
    """Of what all ranks must have the same."""
    return f"mlxinfer {installed('mlxinfer')}, MLX {installed('mlx')}"


def join_group(place: Place) -> mx.distributed.Group:
    """The group of all ranks; waits for them.

    Raises:
        RuntimeError: MLX could not reach them, or has no such backend.
    """
    if not place.ring:
        return mx.distributed.init(strict=True, backend="mpi")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(place.ring, file)
        file.flush()
        given = {"MLX_RANK": str(place.rank), "MLX_HOSTFILE": file.name}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            return mx.distributed.init(strict=True, backend="ring")
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
