"""mlx-lm under the same measurements: imported on use, driven as its own server drives it."""

import resource
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core import SamplingParams
from .driver import Work
from .meter import FORWARD, Meter
from .peer_version import require_peer


def load_peer_model(folder: Path) -> Any:
    """mlx-lm's model of a checkpoint folder, evaluated.

    Raises:
        BackendMissingError: mlx-lm is not installed.
    """
    return _module("mlx_lm.utils").load_model(folder)[0]


def peer_caches(model: Any, bits: int | None, count: int = 1) -> list[Any]:
    """A KV cache for each layer of mlx-lm's model, quantised from the first token on or plain.

    That of `mlx_lm.generate` for one sequence, that of its batches for more; its batches are never
    quantised, so that many equal prompts share one of the former.
    """
    caches = _module("mlx_lm.models.cache")
    if bits is not None:
        return [caches.QuantizedKVCache(group_size=64, bits=bits) for _ in model.layers]
    if count > 1:
        return [caches.BatchKVCache([0] * count) for _ in model.layers]
    return list(caches.make_prompt_cache(model))


def _module(name: str) -> Any:
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


class MeteredPeerModel:
    """mlx-lm's model, with its calls, rows and time counted."""

    def __init__(self, model: Any, meter: Meter) -> None:
        self.layers = model.layers
        self.work = Work()
        self.storing = False
        self._logits: mx.array | None = None
        self._forward = meter.timed(FORWARD, model)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        """inputs (B, L) -> logits (B, L, vocab)."""
        self.work = Work(self.work.passes + 1, self.work.rows + inputs.size)
        if self._logits is None or self._logits.shape[:2] != inputs.shape:
            logits = self._forward(inputs, cache=cache)
            if not self.storing:
                return logits
            mx.eval(logits)
            self._logits = logits
        return self._logits


class PeerDriver:
    """mlx-lm's BatchGenerator, with its defaults but for the number of requests at once.

    As in its server, every request brings its own sampler. Its prefill is done when `step` returns.
    """

    def __init__(self, model: Any, *, max_batch: int = 32) -> None:
        self.meter = Meter()
        self._model = MeteredPeerModel(model, self.meter)
        self._names: dict[int, str] = {}
        self._sampling = _module("mlx_lm.sample_utils")
        self._generator = _module("mlx_lm.generate").BatchGenerator(
            self._model, completion_batch_size=max_batch
        )

    @property
    def done(self) -> Work:
        """A step returns when its prefill is done."""
        return self._model.work

    def store_model(self) -> None:
        """Compute once more, then no more."""
        self._model.storing = True

    def add(self, name: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request."""
        sampler = self._sampling.make_sampler(
            temp=params.temperature,
            top_p=params.top_p if params.top_p < 1 else 0.0,
            min_p=params.min_p,
            top_k=params.top_k,
        )
        penalty = params.repetition_penalty
        processors = self._sampling.make_logits_processors(
            repetition_penalty=None if penalty == 1 else penalty
        )
        (uid,) = self._generator.insert(
            [prompt_ids],
            max_tokens=[params.max_tokens or 1 << 30],
            samplers=[sampler],
            logits_processors=[processors],
        )
        self._names[uid] = name

    def step(self) -> list[str]:
        """What its server calls in a loop."""
        return [self._names[response.uid] for response in self._generator.next()[1]]


class PeerStream:
    """One decode step of mlx-lm's model over B equal prompts, without sampling, again and again."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self.meter = Meter()
        self._model = MeteredPeerModel(model, self.meter)
        count = len(prompts)
        self._cache = peer_caches(model, None, count)
        self._ids = mx.array([[1]] * count, dtype=mx.int32)
        mx.eval(self._model(mx.array(prompts), cache=self._cache))

    def step(self) -> list[str]:
        """Build and evaluate one step, then forget its token."""
        mx.eval(self._model(self._ids, cache=self._cache))
        for layer in self._cache:
            layer.trim(1)
        return []
