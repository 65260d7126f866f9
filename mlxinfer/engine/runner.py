"""Runs a batch: the forward pass and sampling. The only place that evaluates; knows no queues.

`Forward` is the forward pass and the KV cache that it runs on. If a model is spread over ranks, all
ranks run the same steps. One of them schedules and samples: `Runner`. It sends the inputs of a step
to the others before it runs the step.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from math import inf, isfinite
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.disk import Entry
from ..cache.inputs import Ints
from ..cache.kv import KVCache
from ..cache.paged import finish
from ..core import TokenLogprobs
from ..layers.ranks import Link
from ..layers.step import Step, StepFeatures, Taps
from ..models.language import LanguageModel
from ..sampling.sampler import LogprobArrays, Sampled, Sampler
from .batch import Batch, CommitResult, SamplingRows, Segment, Sequence
from .followers import NO_FOLLOWERS, Followers, StepInputs


@dataclass(slots=True)
class Computed:
    """The outputs of a forward pass, not evaluated yet."""

    ids: mx.array  # (T,)
    logits: mx.array | None  # (R, vocab)
    prompt_logits: list[mx.array]  # (n, vocab) of each of `prompt_rows`
    taps: Taps | None  # outputs of the layers that are wanted; on other ranks, of those they have
    unsampled: list[mx.array]  # (1 or T, hidden), where no row gives a token; else none
    stored: list[mx.array]  # (T, ...) of which keys and values of unread rows are made, if any
    outputs: list[mx.array]  # arrays of the cache to evaluate with them


class FeatureArrays(NamedTuple):
    """Features of pictures that a step reads."""

    rows: Ints  # (N,) of the step
    # (N, hidden) each: in place of the embeddings, then what is added after layer 0, and so on
    arrays: list[mx.array]


Gather = Callable[[Batch], FeatureArrays | None]


class InFlight(Protocol):
    """A step that MLX is working on."""

    def wait(self) -> None:
        """Return when the step is done and MLX holds none of its inputs."""


class Forward:
    """A model, or the part of it that a rank has, and its KV cache.

    Args:
        taps: layers whose outputs every step gives, see `Taps`.
        link: over which every rank gets the tokens of a step; None: this one has them.
    """

    def __init__(
        self, model: LanguageModel, cache: KVCache, *, taps: Seq[int] = (), link: Link | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self._caches = dict(zip(model.mixers, cache.layers, strict=True))
        self._taps = tuple(taps)
        self._link = link

    def prepare(self, step: StepInputs, in_flight: InFlight | None) -> list[Entry]:
        """Do the work on the cache that is due before a step; returns the pages it read out."""
        cache = self.cache
        grows = cache.must_grow(step.num_slots)
        if in_flight is not None and (step.is_barrier or grows):
            in_flight.wait()
        elif in_flight is not None:  # it reads tails while this step writes them: a copy
            cache.bytes_copied += cache.tail_bytes
        if step.is_barrier:  # what was written and not read since would keep all of its prompt
            finish([layer.arrays() for layer in cache.paged])  # also where no step is in flight
        if grows or step.is_barrier:
            cache.make_room(step.num_slots, shrink=step.is_barrier)
        # Otherwise there is no work: tails and pages are as they were.
        if step.is_barrier or step.new_slots or cache.state_group is not None:
            return cache.carry_out(step.work, new_slots=step.new_slots)
        return []

    def take_back(self, num_kept: Mapping[int, int]) -> None:
        """Take back rejected tokens of the oldest step that has proposals and was not committed.

        Of each tail slot in `num_kept`, that many of the first tokens stay. Pages and tails need no
        work, because nothing reads them behind the end of a sequence.
        """
        if self.cache.state_group is not None:
            self.cache.state_group.take_back(num_kept)

    def run(
        self, step: StepInputs, tokens: mx.array | None, features: Seq[mx.array] = ()
    ) -> Computed:
        """The forward pass.

        Args:
            step: `prepare` was called for it.
            tokens: (N,) that the step before samples; of other ranks, zeros. None: none of them is
                an input.
            features: (N, hidden) each, for `feature_rows`: in place of their embeddings, and then
                to be added after layer 0, 1, ...; none on other ranks.
        """
        ids, adapters = self._ids(step, tokens), step.adapters
        self.cache.begin_step(step.metadata)
        model_step = self._model_step(step, features)
        hidden = self.model(ids, model_step)
        prompt: list[mx.array] = []
        for a, b in step.prompt_rows:
            row_adapters = None if adapters is None else adapters[a:b]
            prompt.append(self.model.logits(hidden[a:b], row_adapters))
        logits: mx.array | None = None
        if step.num_rows:
            order, left = step.rows, model_step.rows
            if order is not None and left is not None:  # places among those that are left
                is_same = (order == left).all()
                order = None if is_same else np.searchsorted(left, order).astype(np.int32)
            read = hidden if order is None else hidden[mx.array(order)]
            if adapters is not None and step.rows is not None:
                adapters = adapters[step.rows]
            logits = self.model.logits(read, adapters)  # (R, vocab)
        unused = [] if step.num_rows else [hidden]
        all_read = step.num_rows and step.rows is None
        stored = [] if all_read else model_step.stored or [hidden]
        for work in model_step.late or ():
            work()
        states = self.cache.state_group
        outputs = [] if states is None else states.step_outputs()
        return Computed(ids, logits, prompt, model_step.taps, unused, stored, outputs)

    def _model_step(self, step: StepInputs, features: Seq[mx.array]) -> Step:
        taps = Taps(self._taps) if self._taps else None
        num_tokens = len(step.metadata.positions)
        read_rows = step.rows if step.num_rows else np.array([num_tokens - 1], np.int32)
        if self._taps or step.prompt_rows or read_rows is None or len(read_rows) == num_tokens:
            read_rows = None  # all
        model_step = Step(
            mx.array(step.metadata.rope_positions),
            self._caches,
            rope_variants=step.rope_variants,
            adapters=step.adapters,
            taps=taps,
            read_rows=None if read_rows is None else np.sort(read_rows),
        )
        if step.feature_rows is not None:
            model_step.features = self._features(step, step.feature_rows, features)
        # Experts that stay in their files evaluate what comes before them as the step is built.
        model_step.late = [] if self.model.expert_store is None else None
        return model_step

    def _features(self, step: StepInputs, rows: Ints, arrays: Seq[mx.array]) -> StepFeatures | None:
        """The features of pictures in a step. Ranks that share layers get them from rank 0."""
        if self._link is not None:
            if not arrays:
                shape = len(rows), self.model.config.hidden_size
                arrays = [mx.zeros(shape, self.model.activation_dtype)] * (1 + step.num_deep)
            arrays = [self._link.sum(array, "features") for array in arrays]
        return StepFeatures(mx.array(rows), arrays[0], tuple(arrays[1:])) if arrays else None

    def _ids(self, step: StepInputs, tokens: mx.array | None) -> mx.array:
        """(T,) token ids. Pending ones are taken from the step in flight."""
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


ROPE_VARIANT, ADAPTER = attrgetter("rope_variant"), attrgetter("adapter")


@dataclass(slots=True)
class Launched:
    """A step that MLX is working on."""

    batch: Batch
    sampled: Sampled | None  # lazy; None: no row samples, or all wait for their masks
    prompt_logits: list[tuple[Sequence, int, mx.array]]  # from a position on: (n, vocab), lazy
    outputs: list[mx.array]  # evaluating these finishes the step
    constrained_logits: mx.array | None = None  # (G, vocab), until those rows are sampled
    local_outputs: list[mx.array] | None = None  # those that no later stage gives; None: all
    tapped: mx.array | None = None  # (T, n * hidden) of the layers that a proposer reads
    checks: list[mx.array] = field(default_factory=list)  # (R, 1) finite where sampled rows are
    stored_check: mx.array | None = None  # (T, 1) the same of all rows; None: those are all
    logprobs: list[tuple[int, LogprobArrays]] = field(default_factory=list)  # from a row on
    spilled: list[Entry] = field(default_factory=list)  # read out before it
    began_s: float = 0.0  # when it began to be planned
    ended_s: float = inf  # by when it had ended, where the step after it waited for that
    on_later_stages: bool = False  # on other ranks behind this one, from which nothing comes back

    def wait(self) -> None:
        """Return when this rank's part is done and MLX holds none of its inputs."""
        finish(self.outputs if self.local_outputs is None else self.local_outputs)
        if self.local_outputs is None or self.on_later_stages:
            self.ended_s = time.monotonic()

    def read(self) -> "StepOutputs":
        sequences, token_ids = self.batch.sampling.sequences, self.token_ids()
        not_finite = [s for check in self.checks for s in _not_finite(check, sequences)]
        if self.stored_check is not None:
            not_finite += _not_finite(self.stored_check, self.batch.row_sequences)
        outputs = StepOutputs(token_ids, not_finite)
        for first, arrays in self.logprobs:
            outputs.logprobs.update({first + row: one for row, one in arrays.read().items()})
        if self.prompt_logits:
            outputs.prompt_logits = [(s, at, np.array(rows)) for s, at, rows in self.prompt_logits]
        return outputs

    def token_ids(self) -> list[int]:
        """(R,) the sampled tokens, in the order of `batch.sampling`."""
        if self.local_outputs is not None:  # what other stages give was left until now
            mx.async_eval(self.outputs)
        return [] if self.sampled is None else cast(list[int], self.sampled.tokens.tolist())


@dataclass(slots=True)
class StepOutputs:
    """The results of a step, on the host."""

    token_ids: list[int]  # (R,) the sampled tokens, in the order of `Batch.sampling`
    not_finite: list[Sequence]  # sequences of which a row gives NaN or infinities
    # by row, where they were asked for
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # sequence, position of the first row, and rows (n, vocab)
    prompt_logits: list[tuple[Sequence, int, NDArray[np.float32]]] = field(default_factory=list)


class Runner:
    """A model, its KV cache and a sampler.

    If pipeline stages follow this rank, it receives the results of later stages as they come, and
    samples rows when their step is read. To sample earlier would hold up this rank's part of the
    next step.

    Args:
        taps: layers whose outputs every step gives beside its tokens, see `Taps`.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        sampler: Sampler,
        *,
        taps: Seq[int] = (),
        followers: Followers = NO_FOLLOWERS,
        gather: Gather = lambda batch: None,
    ) -> None:
        self._gather = gather
        self.forward = Forward(model, cache, taps=taps, link=followers.link)
        self._followers = None if followers is NO_FOLLOWERS else followers
        self._prompts_go_on = followers.is_pipeline and not taps
        self._reads_late = followers.num_stages > 1
        self.cache = cache
        self.sampler = sampler
        # Whether one with a namespace ran: others have no RoPE variant or adapter.
        self._has_variants = False

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        """Start a step.

        Args:
            previous: the step in flight: its unread tokens are inputs of this one; None: none is.

        Raises:
            RanksFailedError: another rank, or a step that others run already, went wrong.
        """
        admitted: list[Sequence] = []
        if batch.admitted:
            admitted = [s for s in batch.admitted if s.slot >= 0]  # others were preempted at once
            self._has_variants |= any(s.namespace is not None for s in admitted)
        step = self._inputs(batch, previous, admitted)
        features = self._gather(batch) if batch.has_pictures else None
        if features is not None:
            step.feature_rows, step.num_deep = features.rows, len(features.arrays) - 1
        if self._followers is not None:
            self._followers.send(step)
        try:
            return self._launch(batch, step, previous, admitted, features)
        except BaseException as error:  # the other ranks learn of it
            failure = error if self._followers is None else self._followers.fail(error)
            if failure is error:
                raise
            raise failure from error

    def _inputs(
        self, batch: Batch, previous: Launched | None, admitted: list[Sequence]
    ) -> StepInputs:
        """The inputs of a step, which any rank can compute."""
        follows, pending = _pending(batch, previous)
        prompt_rows: list[tuple[int, int]] = []
        if batch.ragged:
            prompt_rows = [
                (s.row, s.row + min(s.num_tokens, s.sequence.num_prompt - s.start))
                for s in _with_prompt_logits(batch)
            ]
        return StepInputs(
            metadata=batch.metadata,
            follows=follows,
            known_ids=None if follows else batch.known_ids(),
            pending=pending,
            work=batch.cache_work,
            num_slots=batch.num_slots,
            new_slots=[s.slot for s in admitted],
            is_barrier=batch.writes_pages,
            rows=batch.sampling.flat_rows,
            num_rows=len(batch.sampling.sequences),
            prompt_rows=prompt_rows,
            rope_variants=_of_rows(batch, ROPE_VARIANT) if self._has_variants else None,
            adapters=_of_rows(batch, ADAPTER) if self._has_variants else None,
        )

    def _launch(
        self,
        batch: Batch,
        step: StepInputs,
        previous: Launched | None,
        admitted: list[Sequence],
        features: FeatureArrays | None,
    ) -> Launched:
        spilled = self.forward.prepare(step, previous)
        if admitted:
            self._admit(admitted)
        tokens = None if previous is None or previous.sampled is None else previous.sampled.tokens
        computed = self.forward.run(step, tokens, () if features is None else features.arrays)
        launched = self._sampled(batch, step, computed)
        if computed.taps is not None:
            launched.tapped = computed.taps.joined()
            launched.outputs.append(launched.tapped)
        launched.outputs += [*computed.unsampled, *computed.outputs]
        launched.local_outputs = computed.outputs if self._reads_late else None
        launched.spilled = spilled
        launched.on_later_stages = (
            self._prompts_go_on and not step.num_rows and not step.prompt_rows
        )
        mx.async_eval(
            launched.outputs if launched.local_outputs is None else launched.local_outputs
        )
        return launched

    def sample_constrained(self, launched: Launched, masks: NDArray[np.uint32]) -> None:
        """Start sampling the rows with a grammar, while the forward pass of their step runs.

        Args:
            launched: in flight, and the step before it was read: the host knows all tokens.
            masks: (G, ceil(V / 32)) what their grammars allow.
        """
        logits, free = launched.constrained_logits, launched.sampled
        assert logits is not None
        sampling = launched.batch.sampling
        first, proposals = sampling.num_free, sampling.proposals
        recent = None if proposals is None else mx.array(proposals.token_ids[first:])
        sampled, new = self._sample(launched, logits, slice(first, None), recent, mx.array(masks))
        tokens, check = sampled.tokens, _chosen(logits, sampled.tokens)
        launched.checks.append(mx.pad(check, [(first, 0), (0, 0)]))
        if free is not None:
            tokens = mx.concatenate([free.tokens, tokens])
        launched.sampled, launched.constrained_logits = Sampled(tokens, None), None
        new += [tokens, launched.checks[-1]]
        launched.outputs += new
        if launched.local_outputs is None:
            mx.async_eval(new)

    def _sample(
        self,
        launched: Launched,
        logits: mx.array,
        rows: slice,
        recent: mx.array | None,
        mask: mx.array | None = None,
    ) -> tuple[Sampled, list[mx.array]]:
        """Sample some rows of a step from their logits; and the arrays to evaluate for them."""
        sampling, proposals = launched.batch.sampling, launched.batch.sampling.proposals
        slots, counts = sampling.slots[rows], sampling.output_index[rows]
        proposed = [] if proposals is None else proposals.drawn[rows]
        sampled = self.sampler.sample(logits, slots, counts, recent, mask, proposed)
        if sampled.logprobs is None:
            return sampled, [sampled.tokens]
        launched.logprobs.append((rows.start, sampled.logprobs))
        return sampled, [sampled.tokens, *sampled.logprobs.arrays()]

    def commit(self, batch: Batch, token_ids: Seq[int], result: CommitResult) -> None:
        """Let the sampler know the tokens (R,) that were read and kept."""
        slots = batch.sampling.slots
        if result.num_kept:
            self.forward.take_back(result.num_kept)
        if self._followers is not None:
            self._followers.commit(result.num_kept)
        if gone := {*result.released, *result.discarded}:
            slots = tuple([-1 if row in gone else slot for row, slot in enumerate(slots)])
        self.sampler.observe(slots, token_ids)

    def _admit(self, admitted: Seq[Sequence]) -> None:
        for sequence in admitted:
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
        prompt_logits, outputs = [], []
        if computed.prompt_logits:
            asking = zip(_with_prompt_logits(batch), computed.prompt_logits, strict=True)
            prompt_logits = [(s.sequence, s.start, rows.astype(mx.float32)) for s, rows in asking]
            outputs = [rows for *_, rows in prompt_logits]
        largest = list(map(_largest, computed.stored))
        stored = mx.stack(largest).max(axis=0) if len(largest) > 1 else next(iter(largest), None)
        outputs += largest
        launched = Launched(batch, None, prompt_logits, outputs, stored_check=stored)
        logits, sampling, free = computed.logits, batch.sampling, batch.sampling.num_free
        if logits is None:
            return launched
        if free:
            recent = _recent(step, sampling, computed.ids)
            recent = None if recent is None else recent[:free]
            free_logits = logits if free == len(sampling.sequences) else logits[:free]
            launched.sampled, new = self._sample(launched, free_logits, slice(0, free), recent)
            outputs += new
            # NaN or infinity of a hidden vector makes all of its row's logits NaN (the last norm)
            launched.checks.append(_chosen(free_logits, launched.sampled.tokens))
        if batch.begins_answers:
            launched.checks.append(_largest(logits))
        outputs += launched.checks
        if free < len(sampling.sequences):
            launched.constrained_logits = logits[free:]
            outputs.append(launched.constrained_logits)
        return launched


def _largest(rows: mx.array) -> mx.array:
    """(N, 1) the largest number of each row (N, ...); NaN for a row that has one."""
    return mx.max(rows.reshape(len(rows), -1), axis=-1, keepdims=True)


def _chosen(logits: mx.array, tokens: mx.array) -> mx.array:
    """(N, 1) the logits of the tokens (N,) that were sampled of (N, vocab)."""
    return mx.take_along_axis(logits, mx.expand_dims(tokens, -1), axis=-1)


def _not_finite(check: mx.array, sequences: Seq[Sequence]) -> list[Sequence]:
    """The sequences of the first N rows whose number (N, 1) is NaN or infinite."""
    numbers = list(chain.from_iterable(cast(list[list[float]], check.tolist())))
    if isfinite(sum(numbers)):  # most steps
        return []
    return [sequences[row] for row, number in enumerate(numbers) if not isfinite(number)]


def _recent(step: StepInputs, sampling: SamplingRows, ids: mx.array) -> mx.array | None:
    """(R, n) for each row, proposals and tokens that the host does not know, then -1; or None."""
    if sampling.proposals is not None:  # then all tokens before are known
        return mx.array(sampling.proposals.token_ids)
    if not step.follows and step.pending is None:
        return None
    if step.pending is not None:
        ids = mx.where(mx.array(step.pending >= 0), ids, -1)
    return (ids if sampling.flat_rows is None else ids[mx.array(sampling.flat_rows)])[:, None]


def _pending(batch: Batch, previous: Launched | None) -> tuple[bool, Ints | None]:
    """Whether all ids of a step are tokens of the step in flight, in order; if not, which are (T,).

    The token of a decode row may have been sampled by the step in flight: then it is taken from
    there.
    """
    decodes, num_rows = batch.decodes.sequences, batch.num_tokens
    if previous is None or previous.sampled is None:
        return False, None
    # `DecodeBatch.advance` keeps the list, and a step of decodes alone samples for it.
    if decodes is previous.batch.sampling.sequences and num_rows == len(decodes):
        return True, None
    rows = np.full(num_rows, -1, dtype=np.int32)  # in the step in flight; -1: the host knows it
    place = {sequence: row for row, sequence in enumerate(previous.batch.sampling.sequences)}
    rows[: len(decodes)] = [place.get(sequence, -1) for sequence in decodes]
    return False, rows if (rows >= 0).any() else None


def _with_prompt_logits(batch: Batch) -> list[Segment]:
    return [
        segment
        for segment in batch.ragged
        if segment.sequence.request.prompt_logits and segment.start < segment.sequence.num_prompt
    ]


def _of_rows(batch: Batch, value: Callable[[Sequence], int]) -> Ints | None:
    """(T,) the value of each token's sequence; None: all are 0."""
    rows = [value(sequence) for sequence in batch.row_sequences]
    return np.array(rows, dtype=np.int32) if any(rows) else None
