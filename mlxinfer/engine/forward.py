"""The forward pass of a step, and the KV cache that it runs on. Knows no requests, samples nothing.

Where a model is spread over ranks all of them run the same steps: one of them schedules and
samples, and sends what a step is to the others before it runs it.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx

from ..cache.disk import namespace_key
from ..cache.inputs import CacheWork, Ints, Spill, StepMetadata
from ..cache.kv import KVCache
from ..cache.layout import LayerCache, kernel_uses, lay_out
from ..config import EngineConfig
from ..errors import RanksFailedError
from ..layers.ranks import AbsentMixer, Link
from ..layers.step import Step, Taps
from ..metal_kernels.variants import KernelUse
from ..models.adapters.folder import AdapterFolder
from ..models.language import LanguageModel
from .kernels import Chooser, Kernels
from .pagestore import OtherDisks


@dataclass(slots=True)
class StepInputs:
    """What a step computes: tokens, where they belong, and what is done to the cache before it."""

    segments: StepMetadata
    follows: bool  # its ids are the tokens of the step before, in order: the next two are None
    known_ids: Ints | None  # (T,) ids as far as the host knows them
    pending: Ints | None  # (T,) place among the tokens of the step before, -1: known; None: all are
    work: CacheWork
    num_slots: int  # tails that must be there
    new_slots: list[int]  # that have a new owner
    is_barrier: bool  # the step before must have ended
    rows: Ints | None  # (R,) flat rows that need logits; None: of all, in order
    num_rows: int  # R; 0: the step samples nothing
    prompt_rows: list[tuple[int, int]]  # [from, to) of other rows that need logits
    rope_variants: Ints | None = None  # (T,) as of `Model`; None: 0 for all
    adapters: Ints | None = None  # (T,) the same


@dataclass(slots=True)
class Computed:
    """What a forward pass gives, not evaluated yet."""

    ids: mx.array  # (T,)
    logits: mx.array | None  # (R, vocab)
    prompt_logits: list[mx.array]  # (n, vocab) of each of `prompt_rows`
    taps: Taps | None  # outputs of the layers that are wanted; on other ranks, of those they have
    hidden: list[mx.array]  # (T, hidden), where no row gives a token; else none
    outputs: list[mx.array] = field(default_factory=list)  # what the cache needs beside logits


class InFlight(Protocol):
    """A step that MLX is working on."""

    def wait(self) -> None:
        """Return when the step is done and MLX holds none of its inputs."""
        ...


class OtherAdapters(Protocol):
    """The adapters on the other ranks, each of which loads its part of them."""

    def check(self, number: int, adapter: AdapterFolder) -> Generator[float, None, int]:
        """Let them read an adapter; the most bytes on one of them. Raises CheckpointError.

        Yields seconds until the next look for their answers.
        """
        ...

    def begin_piece(self, number: int) -> None:
        """Let them load the next piece of it."""
        ...

    def end_piece(self, number: int, adapter: AdapterFolder) -> bool:
        """Wait until they have; whether that was all. Raises CheckpointError."""
        ...

    def remove(self, number: int) -> None:
        """Let them take an adapter off."""
        ...


class Followers(Protocol):
    """The other ranks, which run every step that is sent to them."""

    @property
    def disks(self) -> OtherDisks:
        """Their disk tiers."""
        ...

    @property
    def adapters(self) -> OtherAdapters:
        """Their parts of adapters."""
        ...

    @property
    def link(self) -> Link | None:
        """The link by which every rank gets the tokens of a step; None: only this one does."""
        ...

    @property
    def num_stages(self) -> int:
        """Ranks, this one included, that can work on different steps at the same time.

        1: all of them work on each step together.
        """
        ...

    def assembled(self, cache: KVCache, config: EngineConfig, taps: Sequence[int]) -> None:
        """Let them make a cache like this; every step gives the outputs of the layers `taps`.

        Raises:
            RanksFailedError: one of them cannot.
        """
        ...

    def send(self, step: StepInputs) -> None:
        """Let them run a step too; raises RanksFailedError where one of them cannot."""
        ...

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """End the oldest step that was sent and not read; `num_kept` as of `KVCache.commit`."""
        ...

    def carry_out(self, work: CacheWork) -> None:
        """Let them do to their caches what no step does."""
        ...

    def resize(self, num_pages: Sequence[int]) -> None:
        """So many pages of each layer group may be in use from now on."""
        ...

    def reset(self, error: BaseException) -> None:
        """A step failed by this error: what is in the cache is forgotten.

        Raises:
            RanksFailedError: the step failed on other ranks too, and nothing there can be trusted.
        """
        ...

    def fail(self, error: BaseException) -> RanksFailedError:
        """End the other ranks after a fault, and return the error to raise for it."""
        ...

    def release(self) -> None:
        """Let the other ranks go: the model is not used any more."""
        ...

    def stats(self) -> dict[str, Any]:
        """Plain numbers."""
        ...


class Forward:
    """A model, or the part of it that a rank has, and its KV cache.

    Args:
        taps: layers of which every step gives the outputs, see `Taps`.
        link: over which every rank gets the tokens of a step; None: this one has them.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        *,
        taps: Sequence[int] = (),
        link: Link | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._caches = dict(zip(model.mixers, cache.layers, strict=True))
        self._taps = tuple(taps)
        self._link = link

    def prepare(
        self, step: StepInputs, in_flight: InFlight | None
    ) -> tuple[bool, list[tuple[Spill, bytes]]]:
        """Do what must be done to the cache before a step.

        Returns:
            Whether the step before may still be in flight, and the pages that were read out.
        """
        cache, runs_ahead = self.cache, in_flight is not None
        if in_flight is not None and (step.is_barrier or cache.must_grow(step.num_slots)):
            in_flight.wait()
            runs_ahead = False
        if step.is_barrier:  # what was written and not read since would keep all of its prompt
            mx.eval([layer.arrays() for layer in cache.paged])
        cache.make_room(step.num_slots)
        return runs_ahead, cache.carry_out(step.work, new_slots=step.new_slots)

    def run(self, step: StepInputs, tokens: mx.array | None) -> Computed:
        """The forward pass.

        Args:
            step: of which `prepare` was called.
            tokens: (N,) that the step before samples; of other ranks, zeros. None: none of them is
                an input.
        """
        ids = self._ids(step, tokens)
        taps = Taps(self._taps) if self._taps else None
        self.cache.begin_step(step.segments)
        adapters = step.adapters
        seen = Step(
            mx.array(step.segments.turning),
            self._caches,
            rope_variants=step.rope_variants,
            adapters=adapters,
            taps=taps,
        )
        hidden = self.model(ids, seen)
        prompt = [
            self.model.logits(hidden[a:b], None if adapters is None else adapters[a:b])
            for a, b in step.prompt_rows
        ]
        logits = None
        if step.num_rows:
            wanted = hidden if step.rows is None else hidden[mx.array(step.rows)]
            if adapters is not None and step.rows is not None:
                adapters = adapters[step.rows]
            logits = self.model.logits(wanted, adapters)  # (R, vocab)
        unused = [] if step.num_rows else [hidden]
        return Computed(ids, logits, prompt, taps, unused, self.cache.step_outputs())

    def _ids(self, step: StepInputs, tokens: mx.array | None) -> mx.array:
        """(T,) token ids; those that are pending are taken from the step in flight."""
        known = None if step.known_ids is None else mx.array(step.known_ids)
        if known is not None and step.pending is None:
            return known
        assert tokens is not None
        if self._link is not None:
            tokens = self._link.sum(tokens.astype(mx.int32), "tokens")  # those of other ranks are 0
        if step.pending is None:
            return tokens
        if (step.pending >= 0).all():
            return tokens[mx.array(step.pending)]
        assert known is not None
        sampled = tokens[mx.array(step.pending.clip(0))]
        return mx.where(mx.array(step.pending >= 0), sampled, known)


def absent_layers(model: LanguageModel) -> set[int]:
    """Which of `cache_specs` are of other ranks, and take no memory here."""
    return {i for i, mixer in enumerate(model.mixers) if isinstance(mixer, AbsentMixer)}


def cache_layers(model: LanguageModel, config: EngineConfig) -> list[LayerCache]:
    """The layers of a model's cache, without arrays. Raises InvalidRequestError."""
    key_bias, dtype = model.config.qkv_bias, model.activation_dtype
    layers = lay_out(model.cache_specs, config.kv, dtype=dtype, key_bias=key_bias)
    for layer, mixer in _present(model, layers):
        layer.take_from(mixer)
    return layers


def attention_kernels(model: LanguageModel, layers: Sequence[LayerCache]) -> list[KernelUse]:
    """The kernels for the attention of a model's layers."""
    return kernel_uses(_present(model, layers))


def _present(model: LanguageModel, layers: Sequence[LayerCache]) -> list[tuple[LayerCache, Any]]:
    """Layers of the cache that this rank has, each with its mixer."""
    absent = absent_layers(model)
    pairs = zip(layers, model.mixers, strict=True)
    return [pair for i, pair in enumerate(pairs) if i not in absent]


def make_cache(model: LanguageModel, config: EngineConfig, layers: Sequence[LayerCache]) -> KVCache:
    """The KV cache of a model, as an engine of this config has it."""
    return KVCache(
        layers,
        page_size=config.page_size,
        max_batch=config.max_batch,
        prefill_chunk=config.prefill_chunk,
        budget_bytes=config.kv_budget_bytes,
        num_pages=config.num_pages,
        absent=absent_layers(model),
    )


def cache_of(model: LanguageModel, config: EngineConfig, chooser: Chooser) -> KVCache:
    """The KV cache of a rank without a loop, which runs the steps that rank 0 sends."""
    layers = cache_layers(model, config)
    Kernels([*model.kernels(), *attention_kernels(model, layers)], chooser)
    return make_cache(model, config, layers)


def disk_namespace(identity: str, cache: KVCache, form: str) -> bytes:
    """Pages on disk are shared only between equal weights, versions, device and KV format.

    Args:
        identity: of the weights.
        cache: what is stored.
        form: what part of a model spread over ranks this is; empty: it is not spread.
    """
    return namespace_key(
        identity,
        f"mlxinfer {version('mlxinfer')} MLX {version('mlx')} {mx.default_device()}",
        f"{cache.page_size} {cache.identity}",
        *([form] if form else []),
    )
