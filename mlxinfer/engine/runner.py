"""Runs a batch: forward pass and sampling. The only place that evaluates; knows no queues."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.inputs import Ints, Spill
from ..cache.kv import KVCache
from ..core import TokenLogprobs
from ..models.language import LanguageModel
from ..sampling.logprobs import read_logprobs
from ..sampling.rejection import DrawnToken
from ..sampling.sampler import Sampled, Sampler
from .batch import Batch, CommitResult, SamplingRows, Segment, Sequence
from .forward import Computed, Followers, Forward, StepInputs

Bools = NDArray[np.bool_]
NO_TOKENS: Ints = np.zeros(0, dtype=np.int32)
ROPE_VARIANT, ADAPTER = attrgetter("rope_variant"), attrgetter("adapter")


@dataclass(slots=True)
class Launched:
    """A step that MLX is working on."""

    batch: Batch
    sampled: Sampled | None  # lazy; None: no row samples, or all wait for their masks
    prompt_logits: list[tuple[Sequence, int, mx.array]]  # from a position on: (n, vocab), lazy
    outputs: list[mx.array]  # evaluating these finishes the step
    constrained_logits: mx.array | None = None  # (G, vocab), until those rows are sampled
    own: list[mx.array] | None = None  # of `outputs` what no later stage gives; None: all
    hidden: mx.array | None = None  # (T, n * hidden) of the layers that a proposer reads
    finite: mx.array | None = None  # (R,) whether the logits are; None: not checked
    constrained: Sampled | None = None  # of these rows; `sampled` has their tokens last, too
    spilled: list[tuple[Spill, bytes]] = field(default_factory=list)  # read out before it
    began_s: float = 0.0  # when its launch began
    ended_s: float = inf  # by when it had ended, where the step after it waited for that
    goes_on: bool = False  # on other ranks behind this one, from which nothing comes back

    def wait(self) -> None:
        """Return when this rank's part is done and MLX holds none of its inputs."""
        mx.eval(self.outputs if self.own is None else self.own)
        mx.synchronize()
        if self.own is None or self.goes_on:
            self.ended_s = time.monotonic()

    def token_ids(self) -> Ints:
        """(R,) the sampled tokens, in the order of `batch.sampling`."""
        if self.own is not None:  # what other stages give was left until now
            mx.async_eval(self.outputs)
        return NO_TOKENS if self.sampled is None else np.array(self.sampled.tokens)

    def not_finite(self) -> list[Sequence]:
        """Sequences with NaN or infinite logits, where they were checked."""
        if self.finite is None:
            return []
        rows: list[int] = np.flatnonzero(~np.array(self.finite)).tolist()
        return [self.batch.sampling.sequences[row] for row in rows]

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row of `batch.sampling` -> log-probabilities, where its request asked for them."""
        found: dict[int, TokenLogprobs] = {}
        if self.sampled is not None and self.sampled.logprobs is not None:
            found = read_logprobs(self.sampled.logprobs)
        if self.constrained is not None and self.constrained.logprobs is not None:
            first = self.batch.sampling.num_free
            constrained = read_logprobs(self.constrained.logprobs)
            found.update({first + row: logprobs for row, logprobs in constrained.items()})
        return found


class Runner:
    """A model, its KV cache and a sampler.

    Where other ranks are stages behind this one, what they give is received as it comes, and rows
    are sampled only as their step is read: else this rank's part of the next step would wait.

    Args:
        taps: layers of which every step gives the outputs beside its tokens, see `Taps`.
        followers: the other ranks of a model that is spread over several; None: it is not.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        sampler: Sampler,
        *,
        taps: Seq[int] = (),
        followers: Followers | None = None,
    ) -> None:
        link = None if followers is None else followers.link
        self.forward = Forward(model, cache, taps=taps, link=link)
        self._followers = followers
        self._streams = followers is not None and link is None and not taps
        self._defers = followers is not None and followers.num_stages > 1
        self.cache = cache
        self.sampler = sampler
        self._used_slots: set[int] = set()
        self._has_variants = False  # whether a sequence with a RoPE variant or adapter ever ran

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        """Start a step.

        Args:
            batch: what to compute.
            previous: the step in flight: its unread tokens are inputs of this one; None: none is.

        Raises:
            RanksFailedError: another rank, or a step that others run already, went wrong.
        """
        admitted = [s for s in batch.admitted if s.slot >= 0]  # others were preempted at once
        if admitted:
            self._has_variants |= any(s.namespace is not None for s in admitted)
        step = self._inputs(batch, previous, admitted)
        if self._followers is None:
            return self._launch(batch, step, previous, admitted)
        self._followers.send(step)
        try:
            return self._launch(batch, step, previous, admitted)
        except BaseException as error:  # the other ranks learn of it
            raise self._followers.fail(error) from error

    def _inputs(
        self, batch: Batch, previous: Launched | None, admitted: list[Sequence]
    ) -> StepInputs:
        """What the step computes, as any rank can."""
        follows, pending = _pending(batch, previous)
        sampling, asking = batch.sampling, _with_prompt_logits(batch) if batch.ragged else []
        return StepInputs(
            segments=batch.segments,
            follows=follows,
            known_ids=None if follows else batch.known_ids(),
            pending=pending,
            work=batch.cache_work,
            num_slots=batch.num_slots,
            new_slots=[s.slot for s in admitted],
            is_barrier=batch.writes_pages,
            rows=sampling.flat_rows,
            num_rows=len(sampling),
            prompt_rows=[_prompt_rows(segment) for segment in asking],
            rope_variants=_of_rows(batch, ROPE_VARIANT) if self._has_variants else None,
            adapters=_of_rows(batch, ADAPTER) if self._has_variants else None,
        )

    def _launch(
        self, batch: Batch, step: StepInputs, previous: Launched | None, admitted: list[Sequence]
    ) -> Launched:
        runs_ahead, spilled = self.forward.prepare(step, previous)
        if admitted:
            self._admit(admitted)
        tokens = None if previous is None or previous.sampled is None else previous.sampled.tokens
        computed = self.forward.run(step, tokens)
        launched = self._sampled(batch, step, computed)
        if computed.taps is not None:
            launched.hidden = computed.taps.joined()
            launched.outputs.append(launched.hidden)
        launched.outputs += [*computed.hidden, *computed.outputs]
        launched.own = computed.outputs if self._defers else None
        launched.spilled = spilled
        launched.goes_on = self._streams and not step.num_rows and not step.prompt_rows
        mx.async_eval(launched.outputs if launched.own is None else launched.own)
        if runs_ahead:
            self.cache.count_copies()
        return launched

    def sample_constrained(self, launched: Launched, masks: NDArray[np.uint32]) -> None:
        """Start sampling the rows with a grammar, while the forward pass of their step runs.

        Args:
            launched: in flight, and the step before it was read: the host knows all tokens.
            masks: (G, ceil(V / 32)) what their grammars allow.
        """
        assert launched.constrained_logits is not None
        sampling = launched.batch.sampling
        first, proposals = sampling.num_free, sampling.proposals
        constrained = self.sampler.sample(
            launched.constrained_logits,
            sampling.slots[first:],
            sampling.output_index[first:],
            recent=None if proposals is None else mx.array(proposals.token_ids[first:]),
            mask=mx.array(masks),
            proposed=_drawn(sampling, first, len(sampling)),
        )
        free = launched.sampled
        tokens = constrained.tokens
        if free is not None:
            tokens = mx.concatenate([free.tokens, tokens])
        launched.sampled = Sampled(tokens, None if free is None else free.logprobs)
        launched.constrained, launched.constrained_logits = constrained, None
        new = [tokens, *constrained.arrays()]
        launched.outputs += new
        if launched.own is None:
            mx.async_eval(new)

    def commit(self, batch: Batch, token_ids: Ints, result: CommitResult) -> None:
        """Let the sampler know the tokens (R,) that were read and kept."""
        sampling, proposals = batch.sampling, batch.sampling.proposals
        num_kept = {} if proposals is None else batch.num_kept(result)
        if self._followers is not None:
            self._followers.commit(num_kept)
        slots = sampling.slot_ids
        gone = [*result.released, *result.discarded]
        if gone:
            slots = slots.copy()
            slots[gone] = -1
        if proposals is None:
            self.sampler.observe(slots, token_ids)
            return
        self.cache.commit(num_kept)
        for count in range(int(proposals.counts.max()) + 1):  # one token of each slot at a time
            rows = proposals.counts == count
            self.sampler.observe(slots[rows], token_ids[rows])

    def _admit(self, admitted: Seq[Sequence]) -> None:
        for sequence in admitted:
            if sequence.slot in self._used_slots:
                self.sampler.remove(sequence.slot)
            self._used_slots.add(sequence.slot)
            request, known = sequence.request, sequence.token_ids
            self.sampler.add(
                sequence.slot,
                request.params,
                known[: sequence.num_prompt],
                known[sequence.num_prompt :],
                request.stop_ids,
                request.breakers,
            )

    def _sampled(self, batch: Batch, step: StepInputs, computed: Computed) -> Launched:
        """The step with the tokens of the rows that give one."""
        asking = _with_prompt_logits(batch) if computed.prompt_logits else []
        prompt_logits = [
            (segment.sequence, segment.start, logits.astype(mx.float32))
            for segment, logits in zip(asking, computed.prompt_logits, strict=True)
        ]
        outputs = [logits for *_, logits in prompt_logits]
        sampling, ids, logits = batch.sampling, computed.ids, computed.logits
        if logits is None:
            return Launched(batch, None, prompt_logits, outputs)
        pending = np.full(batch.num_tokens, step.follows)
        if step.pending is not None:
            pending = step.pending >= 0
        if sampling.flat_rows is not None:
            ids, pending = ids[mx.array(sampling.flat_rows)], pending[sampling.flat_rows]
        sampled, constrained_logits = self._sample(sampling, logits, ids, pending)
        outputs += [] if sampled is None else sampled.arrays()
        outputs += [] if constrained_logits is None else [constrained_logits]
        launched = Launched(batch, sampled, prompt_logits, outputs, constrained_logits)
        if batch.checks_logits:
            launched.finite = mx.isfinite(mx.max(logits, axis=-1))
            outputs.append(launched.finite)
        return launched

    def _sample(
        self, sampling: SamplingRows, logits: mx.array, ids: mx.array, pending: Bools
    ) -> tuple[Sampled | None, mx.array | None]:
        """The tokens of rows without a grammar, and the logits (G, vocab) of the others.

        Args:
            sampling: the R rows.
            logits: (R, vocab)
            ids: (R,) their input tokens.
            pending: (R,) which of these only the device knows.
        """
        free, constrained_logits = sampling.num_free, None
        if sampling.num_constrained:
            logits, constrained_logits = logits[:free], logits[free:]
            ids, pending = ids[:free], pending[:free]
        if not free:
            return None, constrained_logits
        recent = None
        if sampling.proposals is not None:  # then all tokens before are known
            recent = mx.array(sampling.proposals.token_ids[:free])
        elif pending.all():
            recent = ids[:, None]
        elif pending.any():
            recent = mx.where(mx.array(pending), ids, -1)[:, None]
        slots, output_index = sampling.slots[:free], sampling.output_index[:free]
        proposed = _drawn(sampling, 0, free)
        sampled = self.sampler.sample(logits, slots, output_index, recent, proposed=proposed)
        return sampled, constrained_logits


def _pending(batch: Batch, previous: Launched | None) -> tuple[bool, Ints | None]:
    """Whether a step's ids are all tokens of the step in flight, in order; else, which are (T,).

    A decode row's token may have been sampled by the step in flight: then it is taken from there.
    """
    decodes, num_rows = batch.decodes.sequences, batch.num_tokens
    if previous is None or previous.sampled is None:
        return False, None
    if decodes is previous.batch.sampling.sequences and num_rows == len(decodes):
        return True, None
    rows = np.full(num_rows, -1, dtype=np.int32)  # in the step in flight; -1: the host knows it
    place = {sequence: row for row, sequence in enumerate(previous.batch.sampling.sequences)}
    rows[: len(decodes)] = [place.get(sequence, -1) for sequence in decodes]
    return False, rows if (rows >= 0).any() else None


def _drawn(sampling: SamplingRows, first: int, stop: int) -> list[DrawnToken | None]:
    """The drawn proposals that rows [first, stop) verify; empty: none."""
    if sampling.proposals is None:
        return []
    found = sampling.proposals.drawn[first:stop]
    return [None if drawn is None else DrawnToken(*drawn) for drawn in found]


def _with_prompt_logits(batch: Batch) -> list[Segment]:
    """Segments of requests that want the logits of their prompt."""
    return [
        segment
        for segment in batch.ragged
        if segment.sequence.request.prompt_logits and segment.start < segment.sequence.num_prompt
    ]


def _prompt_rows(segment: Segment) -> tuple[int, int]:
    """The flat rows [from, to) of the prompt's part of a segment."""
    count = min(segment.num_tokens, segment.sequence.num_prompt - segment.start)
    return segment.row, segment.row + count


def _of_rows(batch: Batch, value: Callable[[Sequence], int]) -> Ints | None:
    """(T,) a value of each token's sequence; None: 0 for all."""
    rows = [value(sequence) for sequence in batch.decodes.sequences]
    for segment in batch.ragged:
        rows += [value(segment.sequence)] * segment.num_tokens
    return np.array(rows, dtype=np.int32) if any(rows) else None
