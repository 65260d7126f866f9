"""The parts of an engine around one model: cache, scheduler, runner, tiers, adapters, limits."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..cache.pages import ENDLESS
from ..config import EngineConfig
from ..core import TokenEvent
from ..errors import InvalidRequestError
from ..models.language import LanguageModel
from ..sampling.sampler import Sampler
from .adapters import AdapterTable
from .features import PictureCounts, PictureFeatures
from .followers import NO_FOLLOWERS, Followers
from .kernels import Chooser, Kernels, choose_none
from .kv_manager import KVManager
from .limits import EngineLimits, GroupLimits
from .model_cache import attention_kernels, cache_layers, cache_stats, disk_identity, make_cache
from .pagestore import PageStore
from .peers import PeerFetches
from .prompt_pictures import PictureLimits
from .proposals import Proposer
from .queues import EngineCounters
from .runner import Launched, Runner
from .scheduler import Scheduler
from .suspects import Suspects

OPEN_WAIT_S = 0.25  # for the identity of the weights: enough where it is remembered
RECEIVED_SHARE = 4  # a quarter of the KV cache's bytes is for pages that come from peers


class EngineParts:
    """The parts that a `Loop` moves; a draft model has them without a loop.

    All methods are called from one thread, which owns MLX.

    Args:
        emit: called with the events of requests, in order; the last event of each request has a
            finish_reason.
        kernels: says which Metal kernels may be used.
        kernels_when_idle: kernels that the first steps do not need are checked later, by
            `Loop.idle_work`.
        proposer: of tokens that steps verify; None: every step gives a sequence one token.

    Attributes:
        limits: of requests; a new value whenever they change.
        post: lets a function run on the engine's thread between two turns; for any thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        emit: Callable[[list[TokenEvent]], None] = lambda events: None,
        *,
        kernels: Chooser = choose_none,
        kernels_when_idle: bool = False,
        proposer: Proposer | None = None,
        followers: Followers = NO_FOLLOWERS,
    ) -> None:
        self.model = model
        self._emit = emit
        self.post: Callable[[Callable[[], None]], None] = lambda function: None
        self._followers = followers
        self.config = config
        if proposer is not None and "speculation" in model.lacks:
            raise InvalidRequestError(
                f"Speculation does not go with this model: {model.lacks['speculation']}."
            )
        self._layers = cache_layers(model, config)
        self._sampler = Sampler(model.config.vocab_size)
        attention = attention_kernels(model, self._layers)
        self.kernels = Kernels(
            [*model.kernels(), *attention, *self._sampler.kernels(model.activation_dtype)],
            kernels,
            when_idle=kernels_when_idle,
        )
        self.suspects = Suspects(self.kernels, followers.leave_out)
        self._num_stages = followers.num_stages
        self.store: PageStore | None = None
        self._peers: PeerFetches | None = None
        self._proposer = proposer
        self.adapters = AdapterTable(model, self._reserve, self._state_limits, followers.adapters)
        self._counters = EngineCounters()  # kept where the loop starts afresh, as are the next
        self._picture_counts = PictureCounts()
        self.assemble()

    def assemble(self) -> None:
        config = self.config
        self._in_flight: deque[Launched] = deque()  # steps that were not read, oldest first
        self.cache = make_cache(self.model, config, self._layers)
        taps = () if self._proposer is None else self._proposer.taps
        self._sees_spans = any(group.window.sees_spans for group in self.cache.groups)
        self._followers.assembled(self.cache, config, taps)
        self._keep_for_adapters(self.adapters.num_bytes, [])
        if (config.disk or config.peers) and self.store is None:
            self.store = PageStore(
                None,
                groups=self.cache.groups,
                states=self.cache.state_group,
                max_bytes=0 if config.disk is None else config.disk.max_bytes,
                max_received_bytes=config.kv_budget_bytes // RECEIVED_SHARE,
                others=self._followers.disks,
            )
            if config.peers and config.peers.asked:
                self._peers = PeerFetches(self.store, config.peers)
            self.open_tiers(OPEN_WAIT_S)
        self.features = PictureFeatures(
            self.model.tower,
            dtype=self.model.activation_dtype,
            max_bytes=config.feature_bytes,
            slice_s=config.prefill_slice_s,
            counts=self._picture_counts,
        )
        self.scheduler = self._make_scheduler()
        self._sampler.reset()
        self.runner = Runner(
            self.model,
            self.cache,
            self._sampler,
            taps=taps,
            followers=self._followers,
            gather=self.features.gather,
        )
        self._state_limits()

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        kv_manager = KVManager(
            self.cache.groups,
            reuse=config.prefix_cache,
            states=self.cache.state_group,
            store=self.store,
        )
        return Scheduler(
            kv_manager,
            max_batch=self.cache.max_batch,
            prefill_chunk=config.prefill_chunk,
            prefill_slice_s=config.prefill_slice_s,
            prefill_fixed=config.prefill_fixed,
            proposer=self._proposer,
            counters=self._counters,
            num_stages=self._num_stages,
            features=self.features,
        )

    def open_tiers(self, wait_s: float = 0.0) -> None:
        """Open the tiers once the weights' identity is known; wait at most `wait_s` for that.

        Until then nothing is stored or found, and requests are served from memory alone.
        """
        disk, store = self.config.disk, self.store
        options = disk or self.config.peers
        if options is None or store is None or store.tiers or self.suspects.kinds:
            return
        identity = options.identity(wait_s)
        if identity is not None:
            kernels, form = self.kernels.identity, store.others.form
            parts = disk_identity(identity, self.model, self.cache, kernels, form)
            store.open("" if disk is None else str(disk.folder.resolve()), parts)

    def _state_limits(self) -> None:
        self.limits = EngineLimits(
            vocab_size=self.model.config.vocab_size,
            adapters=self.adapters.names,
            page_size=self.config.page_size,
            max_context=self.config.max_context,
            max_batch=self.config.max_batch,
            max_positions=self.cache.max_tokens,
            groups=tuple(
                GroupLimits(g.allocator.num_pages, g.page_bytes, g.max_pages(ENDLESS))
                for g in self.cache.groups
            ),
            pictures=self._picture_limits(),
        )

    def _picture_limits(self) -> PictureLimits:
        model, config = self.model, self.config
        if model.tower is None:
            return PictureLimits()
        if "pictures" in model.lacks:
            reason = model.lacks["pictures"]
            return PictureLimits(refusal=f"Here this model takes no pictures: {reason}.")
        return PictureLimits(
            refusal=None,
            feature_bytes=model.tower.width * model.activation_dtype.size,
            max_bytes=config.feature_bytes,
            max_span=config.prefill_chunk if self._sees_spans else None,
        )

    def _reserve(self, num_bytes: int) -> bool:
        """Keep memory for adapters, which the KV cache may not grow into; False: too little."""
        lengths = [sequence.max_known for sequence in self.scheduler.queues.unfinished()]
        is_there = self._keep_for_adapters(num_bytes, lengths)
        self._state_limits()
        return is_there

    def _keep_for_adapters(self, num_bytes: int, lengths: list[int]) -> bool:
        """Limit the pages of every rank so that the adapters fit; False: they do not."""
        beyond = max(num_bytes - self.config.adapter_bytes, 0)  # what was kept for them at load
        is_there = self.cache.reserve(beyond, lengths)
        self._followers.resize([g.allocator.num_pages for g in self.cache.groups])
        return is_there

    def stats(self) -> dict[str, Any]:
        """Plain numbers; those of parts that the model or its options lack are left out."""
        queues, prefix = self.scheduler.queues, self.scheduler.kv_manager.prefix
        parts: dict[str, Any] = {
            "disk": self.store if self.config.disk else None,
            "peers": self._peers,
            "speculation": self._proposer,
            "adapters": self.adapters,
            "pictures": None if self.model.tower is None else self.features,
            "experts": self.model.expert_store,
            "kernels": self.kernels,
        }
        ranks = self._followers.stats()
        return {
            **asdict(self._counters),
            "running": len(queues.running),
            "waiting": sum(sequence.fetch is None for sequence in queues.waiting),
            **cache_stats(self.cache, prefix),
            **{name: part.stats() for name, part in parts.items() if part is not None},
            "adapter_bytes": self.adapters.num_bytes,
            **({"ranks": ranks} if ranks else {}),
        }
