"""mlx-lm on the same prompts, where it is installed. Imports it, and MLX, on use."""

import resource
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import BackendMissingError, UnsupportedModelError

Clock = Callable[[], float]  # seconds


def require_peer() -> str:
    """The version of mlx-lm that is installed. Raises BackendMissingError: none is."""
    try:
        return version("mlx-lm")
    except PackageNotFoundError:
        raise BackendMissingError(
            'There is no mlx-lm to compare with; pip install -e ".[bench]" in a checkout of '
            "mlxinfer, or use --skip-peer."
        ) from None


def peer_module(name: str) -> Any:
    """Import a module of mlx-lm; it lowers the limit of open files, which is put back."""
    require_peer()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    module = import_module(name)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    except ValueError:  # only root may raise the hard limit again
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], hard), hard))
    return module


def load_peer_model(folder: Path) -> Any:
    """mlx-lm's model of a checkpoint folder, evaluated.

    Raises:
        BackendMissingError: mlx-lm is not installed.
        UnsupportedModelError: it does not load this model.
    """
    try:
        return peer_module("mlx_lm.utils").load_model(folder)[0]
    except ValueError as error:
        raise UnsupportedModelError(f"mlx-lm does not load {folder}: {error}") from error


class PeerGeneration:
    """Batches of mlx-lm: `BatchGenerator` with the settings of its server.

    On MLX's CPU backend its activations are float32, as those of mlxinfer are there: 16-bit
    arithmetic takes ten times as long there, and would flatter the side that avoids it.
    """

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx

        self._model = load_peer_model(folder)
        if not mx.metal.is_available():
            self._model.set_dtype(mx.float32)
            mx.eval(self._model.parameters())

    def token_times(
        self, prompts: list[list[int]], enough: int, *, clock: Clock = time.perf_counter
    ) -> list[list[float]]:
        """Seconds from the start until each token of each answer, until all have `enough`.

        End tokens do not end an answer.
        """
        generator = peer_module("mlx_lm.generate").BatchGenerator(
            self._model, completion_batch_size=len(prompts)
        )
        times: dict[int, list[float]] = {}
        started = clock()
        for uid in generator.insert(prompts, max_tokens=[1 << 30] * len(prompts)):
            times[uid] = []
        try:
            while min(map(len, times.values())) < enough:
                _, generated = generator.next()
                now = clock() - started
                for response in generated:
                    times[response.uid].append(now)
        finally:
            generator.close()  # puts back MLX's limit of wired memory
        return list(times.values())
