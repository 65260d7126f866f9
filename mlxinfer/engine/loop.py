"""The loop, turn by turn: schedule, launch, read the step before. Knows no threads, no text."""

import contextlib
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.disk import DiskTier, namespace_key
from ..cache.formats import lay_out
from ..cache.kv import KVCache
from ..cache.transfer import payload_bytes
from ..config import DiskOptions, EngineConfig
from ..core import FinishReason, Request, TokenEvent, TokenLogprobs
from ..models.decoder import Model
from ..sampling.sampler import Sampler
from .batch import Batch, Sampling
from .failures import failed, let_go, stuck_in_grammar, without_numbers
from .grammar_masks import GrammarMasks, follow
from .kernels import Chooser, choose_kernels, choose_none
from .limits import EngineLimits
from .pagestore import PageStore
from .runner import Launched, Runner
from .scheduler import CommitResult, Scheduler
from .sequence import Sequence
from .stats import stats_of


class Loop:
    """Many requests over one model. All methods are called from one thread, which owns MLX.

    Args:
        model: evaluated and ready.
        config: sizes.
        emit: called with what is to be said of requests, in order; of each the last event has a
            finish_reason.
        kernels: says which Metal kernels may be used.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        emit: Callable[[list[TokenEvent]], None],
        *,
        kernels: Chooser = choose_none,
    ) -> None:
        self.model = model
        self.config = config
        self._layout = lay_out(model.cache_specs, config.kv, key_bias=model.config.qkv_bias)
        self.kernels = choose_kernels(model, *self._layout, kernels)
        self.kernels.put_into(model)
        self._emit = emit
        self._in_flight: Launched | None = None
        self.store: PageStore | None = None
        self.assemble()

    def assemble(self) -> None:
        """A fresh cache, scheduler and runner around the model."""
        config = self.config
        specs, bits = self._layout
        self.cache = KVCache(
            specs,
            bits=bits,
            dtype=self.model.activation_dtype,
            page_size=config.page_size,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            budget_bytes=config.kv_budget_bytes,
            num_pages=config.num_pages,
            kernel_layers=self.kernels.attention,
            heads=self.kernels.heads,
        )
        if config.disk is not None and self.store is None:
            self.store = _open_store(config.disk, self.cache)
        self.scheduler = Scheduler(
            windows=[group.window for group in self.cache.groups],
            allocators=[group.allocator for group in self.cache.groups],
            page_size=config.page_size,
            max_batch=self.cache.max_batch,
            prefill_chunk=config.prefill_chunk,
            reuse=config.prefix_cache,
            store=self.store,
        )
        sampler = Sampler(
            self.model.config.vocab_size,
            kernel=self.kernels.samples,
            mask_kernel=self.kernels.masks,
        )
        self.runner = Runner(self.model, self.cache, sampler)
        self.grammar_masks = GrammarMasks(self.model.config.vocab_size)
        self._in_flight = None

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return self._in_flight is None and self.scheduler.queues.idle

    def turn(self) -> None:
        """Launch the next step, then read the one before it: Python works while MLX does.

        A step with somebody's first token is read at once: that is what he waits for.
        """
        previous, self._in_flight = self._in_flight, None
        if previous is not None and previous.batch.begins_answers:
            self._commit(previous)
            previous = None
        batch = self.scheduler.next_batch()
        current = self._launch(batch, previous) if batch else None
        if previous is not None and not self._commit(previous):
            current = None  # it ran on what the failed step left
        if (
            current is not None
            and current.constrained_logits is not None
            and not self._sample_constrained(current)
        ):
            current = None
        if current is not None and not self.config.launch_ahead:
            self._commit(current)
            current = None
        self._in_flight = current

    # -- requests -------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        """What requests must fit into."""
        return EngineLimits.of(self.config, self.model.config.vocab_size, self.cache)

    def check(self, request: Request) -> int:
        """How many tokens the answer may have at most; errors as of `EngineLimits.check`."""
        return self.limits.check(request)

    def add(self, request: Request, max_output: int) -> None:
        """Queue a request that `check` passed."""
        sequence = self.scheduler.queues.add(request, max_output=max_output)
        sequence.rope_variant = self.model.rope_variant(sequence.max_known)

    def abort(self, request_id: str) -> None:
        """End a request if it has not ended."""
        sequence = self.scheduler.queues.find(request_id)
        if sequence is not None:
            self.scheduler.queues.finish(sequence)
            self._emit([TokenEvent.without_token(request_id, FinishReason.ABORT)])

    def abort_all(self) -> None:
        """End every request."""
        for sequence in self.scheduler.queues.unfinished():
            self.abort(sequence.request.id)

    # -- steps ----------------------------------------------------------------------------------

    def _launch(self, batch: Batch, previous: Launched | None) -> Launched | None:
        for sequence in batch.admitted:
            sequence.request.started_s = sequence.request.started_s or time.monotonic()
        began_s = time.monotonic()
        try:
            launched = self.runner.launch(batch, previous)
            launched.began_s = began_s
            return launched
        except BaseException as error:  # the fault boundary of a step: others go on
            if previous is None or self._commit(previous):
                self._fail_step(batch, error)
            return None

    def _sample_constrained(self, launched: Launched) -> bool:
        """Sample the rows under a grammar, all tokens before known; False: the step failed."""
        try:
            masks, stuck = self.grammar_masks.fill(launched.batch.sampling.constrained)
            self.runner.sample_constrained(launched, masks)
        except BaseException as error:  # the fault boundary of a step, as in _launch
            self._fail_step(launched.batch, error)
            return False
        for sequence, problem in stuck:
            self.scheduler.queues.finish(sequence)
            self._emit([stuck_in_grammar(sequence, problem)])
        return True

    def _commit(self, launched: Launched) -> bool:
        """Read a step's tokens and pass them on; False: the step failed."""
        if launched.committed:
            return True
        launched.committed = True
        try:
            token_ids = launched.token_ids()
            logprobs = launched.logprobs()
            lost = launched.without_numbers()
            prompt_logits = [(s, at, np.array(rows)) for s, at, rows in launched.prompt_logits]
        except BaseException as error:  # evaluation failed: the fault boundary of a step
            self._fail_step(launched.batch, error)
            return False
        if self.store is not None:
            self._tell(self.store, launched)
        for sequence, start, logits in prompt_logits:
            new = logits[max(sequence.num_logits - start, 0) :]  # preempted, it computes some again
            if len(new) and not sequence.finished:
                sequence.num_logits = start + len(logits)
                self._emit([TokenEvent.without_token(sequence.request.id, prompt_logits=new)])
        self._fail_lost(lost)
        tokens = token_ids.tolist()
        result = self.scheduler.commit(launched.batch, tokens)
        self.runner.observe(launched.batch.sampling, token_ids, result.released)
        self._tell_tokens(launched.batch.sampling, tokens, result, logprobs)
        return True

    def _tell_tokens(
        self,
        sampling: Sampling,
        token_ids: list[int],
        result: CommitResult,
        logprobs: dict[int, TokenLogprobs],
    ) -> None:
        """An event for each token of a step, and what few of them have beside it."""
        fields = sampling.event_fields
        events = TokenEvent.of_step(fields.request_ids, token_ids, fields.cached_tokens)
        for row, reason in result.finished.items():
            events[row] = events[row]._replace(finish_reason=reason)
        for row, found in logprobs.items():
            events[row] = events[row]._replace(logprobs=found)
        late, ends = set(result.discarded), []
        try:
            for row in range(sampling.num_free, len(sampling)):
                if row not in late and follow(sampling.sequences[row].request, token_ids[row]):
                    events[row] = events[row]._replace(finish_reason=None)
                    ends.append(self._end_whole(sampling.sequences[row]))
        finally:  # a grammar's fault is not the others', some of whom have just ended
            if late:
                events = [event for row, event in enumerate(events) if row not in late]
            self._emit(events + ends)

    def _end_whole(self, sequence: Sequence) -> TokenEvent:
        """End an answer whose grammar is finished: its last token was text, no end token."""
        if not sequence.finished:  # else that token was also the last there was room for
            self.scheduler.queues.finish(sequence)
        return TokenEvent.without_token(sequence.request.id, FinishReason.STOP)

    def _tell(self, store: PageStore, launched: Launched) -> None:
        """A step went well: what was read out before it may be kept."""
        store.put(launched.spilled)
        store.step_ended(
            num_prefill=sum([s.num_tokens for s in launched.batch.long]),
            num_tokens=launched.batch.num_tokens,
            began_s=launched.began_s,
        )

    # -- faults ---------------------------------------------------------------------------------

    def _fail_step(self, batch: Batch, error: BaseException) -> None:
        """Fail the requests of a step; the others start over on fresh arrays and lose nothing."""
        let_go(error)
        self.scheduler.counters.step_failures += 1
        for sequence in batch.sequences:
            if not sequence.finished:
                self.scheduler.queues.finish(sequence, keep=False)
                self._emit([failed(sequence, error)])
        for sequence in reversed(list(self.scheduler.queues.running)):
            self.scheduler.queues.preempt(sequence, keep=False)
        for sequence in self.scheduler.queues.unfinished():
            sequence.num_pending = 0  # sampled on what failed; drawn again, the same
        self.scheduler.kv_manager.forget()
        self.cache.reset()

    def _fail_lost(self, sequences: list[Sequence]) -> None:
        """End those whose logits are no numbers: what was sampled from them is not told."""
        for sequence in sequences:
            if not (sequence.finished or sequence.request.prompt_logits):  # who looks shall see
                self.scheduler.queues.finish(sequence, keep=False)
                self._emit([without_numbers(sequence)])

    def fail_all(self, error: BaseException) -> None:
        """Fail every request and start afresh: the books themselves were wrong."""
        let_go(error)
        self._emit([failed(sequence, error) for sequence in self.scheduler.queues.unfinished()])
        counters = self.scheduler.counters
        counters.step_failures += 1
        self.assemble()
        self.scheduler.counters = counters

    def close(self, *, save: bool = True) -> None:
        """Let go of the model and every array; nothing works afterwards.

        Args:
            save: what is cached, where there is a disk for it; not where it cannot be trusted.
        """
        if self.store is not None:
            with contextlib.suppress(Exception):  # what is not saved is computed again
                if save:
                    self._save(self.store)
            self.store.close()
        del self.model, self.cache, self.runner, self._in_flight

    def _save(self, store: PageStore) -> None:
        """To the disk with all that the prefix tree holds, as far as bytes and time allow."""
        if self._in_flight is not None and not self._commit(self._in_flight):
            return
        self._in_flight = None
        kv_manager = self.scheduler.kv_manager
        self.cache.make_room(0)
        self.cache.seal(kv_manager.take_closing())
        store.save(kv_manager.take_all(), self.runner.read_out)

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what was done and what is held."""
        return stats_of(self.scheduler, self.cache, self.store)


def _open_store(options: DiskOptions, cache: KVCache) -> PageStore:
    """Pages that others computed are used where everything agrees that they depend on."""
    namespace = namespace_key(
        options.identity,
        f"mlxinfer {version('mlxinfer')} MLX {version('mlx')} {mx.default_device()}",
        f"{cache.dtype} {cache.page_size} {cache.specs} {cache.bits}",
    )
    return PageStore(
        DiskTier(str(options.folder), namespace, max_bytes=options.max_bytes),
        windows=[group.window for group in cache.groups],
        page_bytes=[payload_bytes(cache, group) for group in range(len(cache.groups))],
        page_size=cache.page_size,
        max_bytes=options.max_bytes,
    )
