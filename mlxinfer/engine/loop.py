"""The loop, turn by turn: schedule, launch, read the step before. Knows no threads, no text."""

import contextlib
import time
import traceback
from collections.abc import Callable

import mlx.core as mx

from ..core import FinishReason, Request, TokenEvent
from ..errors import (
    EngineClosedError,
    InvalidRequestError,
    RequestFailedError,
    gpu_stopped,
    require_gpu,
)
from .batch import Batch, Sequence
from .events import failed_event, progress_events, prompt_logits_events, token_events
from .grammar_masks import fill_masks
from .pagestore import SAVE_S, PageStore
from .parts import EngineParts
from .prompt_pictures import PromptPictures
from .runner import Launched
from .suspects import not_finite_error

MAX_CACHED_BYTES = 1 << 28  # that MLX may keep of a prompt's steps while answers go on


class Loop(EngineParts):
    """Many requests over one model. All methods are called from one thread, which owns MLX.

    Each turn does four things: `_schedule`, `_launch`, `_read`, and to emit what was read.
    """

    _ended_s = 0.0  # by when the last step that was read had ended
    _began_s = 0.0  # when the newest step began to be planned: a draft model may propose for it

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and unfinished requests only wait for pages of peers."""
        return not self._in_flight and self.scheduler.queues.idle

    @property
    def idle_work(self) -> Callable[[], None] | None:
        """Checks and compiles one kernel that a step could have used; None: there is none."""
        return self.kernels.prepare_next if self.kernels.asked else None

    def turn(self) -> None:
        """Schedule a step, launch it, read the step before it and emit the events of that one.

        So Python works on one step while MLX works on the other. With pipeline stages several steps
        stay in flight, each with other rows. A step on which the next one depends is read at the
        end of its turn (`Scheduler.reads_first`): the next one has what came until then.
        """
        batch = self._schedule()
        if batch is None:
            self._read(max(len(self._in_flight) - 1, 0))
        elif (step := self._launch(batch)) is not None:
            was_read = self._read(self.scheduler.max_in_flight(batch))
            if was_read and step.constrained_logits is not None:  # all tokens before are known
                self._sample_constrained(step)
            if self._in_flight and self.scheduler.reads_first(batch):
                self._read(0)
        if self.adapters.are_leaving:
            self.adapters.free_unused(self.scheduler.queues.unfinished())

    # -- requests -------------------------------------------------------------------------------

    def add(self, request: Request, max_output: int) -> None:
        """Queue a request that passed `limits.check`, with the most tokens of its answer."""
        if self._proposer is not None:  # a source draws as the model does, with the same numbers
            request.params = request.params.seeded()
        limits, num_prompt = self.limits, len(request.prompt_ids)
        try:
            loaded = None if request.adapter is None else self.adapters.of(request.adapter)
            limits.check_memory(num_prompt)
        except InvalidRequestError as error:  # an adapter came or went since it was checked
            self._emit([TokenEvent.without_token(request.id, FinishReason.ERROR, error=error)])
            return
        max_output = min(max_output, limits.max_positions - num_prompt)
        pictures = None
        if request.pictures:
            pictures = PromptPictures.of(request, sees_spans=self._sees_spans)
        sequence = self.scheduler.queues.add(
            request,
            max_output=max_output,
            pictures=pictures,
            rope_variant=self.model.rope_variant(num_prompt + max_output),
            adapter=0 if loaded is None else loaded.number,
            adapter_id=None if loaded is None else loaded.adapter.identity,
        )
        if self._peers is not None:
            self._peers.begin(self.scheduler.kv_manager, sequence, self.post)

    def abort(self, request_id: str) -> None:
        sequence = self.scheduler.queues.find(request_id)
        if sequence is not None:
            self.scheduler.queues.finish(sequence)
            self._emit([TokenEvent.without_token(request_id, FinishReason.ABORT)])

    def abort_all(self) -> None:
        for sequence in self.scheduler.queues.unfinished():
            self.abort(sequence.request.id)

    # -- steps ----------------------------------------------------------------------------------

    def _schedule(self) -> Batch | None:
        """Plan the next step; None: nothing can be computed now."""
        if self.store is not None and not self.store.tiers:
            self.open_tiers()
        sees = bool(self.features.wanted)
        self.features.worked_s = 0.0
        if sees:
            self._see_pictures()
        self._began_s = time.monotonic()
        batch = self.scheduler.next_batch()
        if batch is not None:
            batch.was_delayed = sees
        return batch

    def _see_pictures(self) -> None:
        """Let the tower see pictures, between two steps."""
        if self._read(0) and self.features.wanted:  # reading may have ended the requests
            failed = self.features.work(self.scheduler.tower_s(self.features.tenants))
            if failed is not None:
                self._fail(*failed)

    def _launch(self, batch: Batch) -> Launched | None:
        """Launch a step behind the one before it; None: it failed."""
        for sequence in batch.admitted:
            sequence.request.started_s = sequence.request.started_s or time.monotonic()
        try:
            step = self.runner.launch(batch, self._in_flight[-1] if self._in_flight else None)
        except BaseException as error:  # the fault boundary of a step: others go on
            if self._read(0):
                self._fail_step(batch, error)
            return None
        step.began_s = self._began_s
        self._in_flight.append(step)
        return step

    def _sample_constrained(self, step: Launched) -> None:
        """Sample the rows with a grammar. All tokens before them are known."""
        try:
            masks, stuck = fill_masks(step.batch.sampling, self.model.config.vocab_size)
            self.runner.sample_constrained(step, masks)
        except BaseException as error:  # the fault boundary of a step, as in _launch
            self._fail_step(step.batch, error)
            return
        for sequence, stuck_error in stuck:
            self._fail(sequence, stuck_error)

    def _read(self, num_left: int) -> bool:
        """Read the oldest steps, and emit their events, until `num_left` are in flight.

        Returns:
            False: a step failed, and none is in flight.
        """
        while len(self._in_flight) > num_left:
            if not self._read_step(self._in_flight.popleft()):
                return False
        return True

    def _read_step(self, step: Launched) -> bool:
        """Read a step, and emit its events; False: it failed."""
        try:
            outputs = step.read()
        except BaseException as error:  # evaluation failed: the fault boundary of a step
            self._fail_step(step.batch, error)
            return False
        if outputs.not_finite and self._starts_over(step.batch, outputs.not_finite):
            return False
        self._account(step)
        if outputs.prompt_logits:
            self._emit(prompt_logits_events(outputs.prompt_logits))
        if step.batch.ragged and (progress := progress_events(step.batch)):
            self._emit(progress)
        if outputs.not_finite:
            self._fail_not_finite(outputs.not_finite)
        if step.tapped is not None and self._proposer is not None:
            self._proposer.take(step.batch, step.tapped)
        result = self.scheduler.commit(step.batch, outputs.token_ids)
        self.runner.commit(step.batch, outputs.token_ids, result)
        self._emit(token_events(step.batch.sampling, outputs.token_ids, result, outputs.logprobs))
        if self.suspects.kinds and not outputs.not_finite:
            self.suspects.passed(step.batch)
        if step.batch.begins_answers:
            self._free_after_prompts()
        return True

    def _account(self, step: Launched) -> None:
        ended_s = min(step.ended_s, time.monotonic())
        seconds = ended_s - max(step.began_s, self._ended_s)  # steps run one after the other
        self._ended_s = ended_s
        self.scheduler.prefill.observe(step.batch, seconds, on_later_stages=step.on_later_stages)
        if self.store is not None:
            self.store.put(step.spilled)
            self.store.step_ended(
                num_prefill=sum([segment.num_tokens for segment in step.batch.long]),
                num_tokens=step.batch.num_tokens,
                began_s=step.began_s,
            )

    def _free_after_prompts(self) -> None:
        queues = self.scheduler.queues
        if queues.waiting or any(s.num_computed < s.num_prompt for s in queues.running):
            return
        if mx.get_cache_memory() > MAX_CACHED_BYTES:
            mx.clear_cache()

    # -- faults ---------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: BaseException, *, keep: bool = True) -> None:
        """End one request by an error; `keep`: later requests may use what was computed."""
        self.scheduler.queues.finish(sequence, keep=keep)
        self._emit([failed_event(sequence, error)])

    def _fail_step(self, batch: Batch, error: BaseException) -> None:
        """Fail the requests of a step. The others start over on fresh arrays and lose nothing.

        If macOS stopped the step on the GPU, its requests start over too, once, and steps are half
        as large from then on. Later steps in flight used its results, so none of them is read.

        Raises:
            RanksFailedError: it failed on other ranks too.
            DeviceLostError: no later step would run.
        """
        traceback.clear_frames(error.__traceback__)  # a log may keep the error: not its arrays
        self._followers.reset(error)
        require_gpu(error)
        stopped = gpu_stopped(error)
        self._counters.step_failures += 1
        if stopped:
            self.scheduler.prefill.halve(batch)
        for sequence in batch.sequences:
            if stopped and not sequence.retried:
                sequence.retried = True
            elif not sequence.finished:
                self._fail(sequence, error, keep=False)
        self._start_over()

    def _start_over(self) -> None:
        queues = self.scheduler.queues
        self._in_flight.clear()
        for sequence in reversed(list(queues.running)):
            queues.preempt(sequence, keep=False)
        for sequence in queues.unfinished():
            sequence.num_pending = 0  # sampled on what failed; drawn again, the same
        self.scheduler.kv_manager.forget()
        self.cache.reset()

    def _starts_over(self, batch: Batch, sequences: list[Sequence]) -> bool:
        """Whether all start over because kernels or proposals may have made a step not finite.

        A rejected proposal that gives NaN would spread: masked values are multiplied by 0. So a
        sequence with NaN goes on without proposals. Nothing that was computed is kept, and nothing
        of the disk is used, until it is known which kernel was at fault.
        """
        verified = {segment.sequence for segment in batch.short if segment.proposals}
        unverified = [s for s in sequences if s in verified]
        if not unverified and not self.suspects.met(batch, sequences):
            return False
        for sequence in unverified:
            sequence.alone = True
        self._followers.reset(RequestFailedError("a step was not finite"))
        self._start_over()
        if self.suspects.kinds and self.store is not None:
            self.store.close()
        return True

    def _fail_not_finite(self, sequences: list[Sequence]) -> None:
        """End sequences with logits that are not finite, before their tokens are emitted.

        Requests that ask for the logits of their prompt get them even so.
        """
        is_half = self.model.activation_dtype == mx.float16
        for sequence in sequences:
            if not (sequence.finished or sequence.request.prompt_logits):
                error = not_finite_error(sequence, is_half=is_half)
                self._fail(sequence, error, keep=False)

    def fail_all(self, error: BaseException) -> None:
        """Fail every request and start afresh: the bookkeeping itself was wrong."""
        traceback.clear_frames(error.__traceback__)
        self._emit(
            [failed_event(sequence, error) for sequence in self.scheduler.queues.unfinished()]
        )
        self._counters.step_failures += 1
        if isinstance(error, EngineClosedError):  # ranks or the GPU are gone: no loop would work
            raise error
        self.assemble()

    def close(self, *, save: bool = True) -> None:
        """Release the model and every array; nothing works afterwards.

        Args:
            save: what is cached, where there is a disk for it; not where it cannot be trusted.
        """
        if self.store is not None:
            with contextlib.suppress(Exception):  # what is not saved is computed again
                if save:
                    self.open_tiers(SAVE_S)
                    self.carry_out_work(self.store)
                    self.store.save(self.scheduler.kv_manager.prefix, self.cache.read_out)
            self.store.close()
        if self._peers is not None:
            self._peers.close()
        self.adapters.close()
        self._followers.release()
        del self.model, self.cache, self.runner, self._in_flight, self._proposer, self.scheduler
        del self.adapters, self.kernels, self._layers  # the last two refer to pages
        del self.features

    def carry_out_work(self, store: PageStore) -> None:
        """Do the work now that waits for the next step. Then all named pages are filled."""
        self._read(0)
        work = self.scheduler.kv_manager.take_work()
        self._followers.carry_out(work)
        self.cache.make_room(work.num_slots)
        store.put(self.cache.carry_out(work))
