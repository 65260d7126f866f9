"""Sequences, and the batch of one step: the tokens that the runner computes. No MLX."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.inputs import CacheWork, Ints, Segments, StepMetadata, ints
from ..cache.pages import PageTable
from ..cache.prefix import Lease, PageNames
from ..core import FinishReason, Request
from .prompt_pictures import PictureRows, PromptPictures, moved_rope_positions, step_spans

MAX_SHORT = 8  # query tokens that the decode path takes; longer segments are prefill


Namespace = tuple[str | None, int] | tuple[str | None, int, str]


def namespace_of(adapter_id: str | None, rope_variant: int, salt: str | None) -> Namespace | None:
    """The namespace of an adapter, frequencies and a salt; None: none, the usual ones, and none."""
    if salt is not None:
        return adapter_id, rope_variant, salt
    return None if (adapter_id, rope_variant) == (None, 0) else (adapter_id, rope_variant)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine: its tokens, and the part of the KV cache that it holds.

    Positions count from 0 over prompt and answer.

    `num_computed` runs ahead of `token_ids`: a launched step counts as computed. The tokens that it
    samples are counted in `num_pending` until they are read. In a step that verifies proposals only
    the first token counts as computed at launch; a proposal counts when it is accepted.
    """

    request: Request
    max_known: int  # tokens of prompt and answer, whatever ends it: max_tokens, context or pool
    token_ids: list[int]  # prompt and answer, if known
    num_prompt: int
    pictures: PromptPictures | None = None  # in the prompt; None: it is text alone
    rope_variant: int = 0  # see `Model.rope_variant`; chosen once, since all of its keys have it
    adapter: int = 0  # number of its adapter; 0: none
    namespace: Namespace | None = None  # only sequences of one share keys and values
    num_computed: int = 0  # positions with their KV there, or in a launched step
    num_sealed: int = 0  # of these, in pages of the pool; the rest lies in the tail
    num_pending: int = 0  # rows of launched steps that sample for it and were not yet read
    slot: int = -1  # row in the tails and in the sampler; -1: not running
    tables: list[PageTable] = field(default_factory=list)  # one per layer group
    lease: Lease | None = None  # on what it shares with others; None: not running
    names: PageNames | None = None  # of its pages; None: they were not asked for
    # a step was launched since it got its slot, with the copies that it needed
    started: bool = False
    num_logits: int = 0  # positions with logits given out, where they were asked for
    num_cached: int = 0  # prompt tokens that were found computed
    finished: bool = False
    num_preempted: int = 0
    retried: bool = False  # macOS stopped a step of it on the GPU, and it started over
    alone: bool = False  # a step of it gave NaN: proposals are not verified any more
    # waiting sequence -> positions of this one that must be computed before it is admitted
    sharers: dict["Sequence", int] = field(default_factory=dict)
    fetch: Future[None] | None = None  # of its pages from peers; it is not admitted meanwhile

    @property
    def key_ids(self) -> list[int]:
        """The ids by which prompts are compared: a picture has ids of its own."""
        if self.pictures is None:
            return self.token_ids
        return self.pictures.key_ids + self.token_ids[self.num_prompt :]

    @property
    def required_lease(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def num_answered(self) -> int:
        """Tokens of the answer that the host knows."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_output(self) -> int:
        """Tokens of the answer, with those in flight."""
        return len(self.token_ids) - self.num_prompt + self.num_pending

    @property
    def num_left(self) -> int:
        """Positions that have a token and no computed KV yet: 1 in decode."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether the next step computes its newest token: not if its last token is in flight."""
        num_tokens = len(self.token_ids) + self.num_pending
        return self.num_computed + 1 == num_tokens and self.num_prompt < num_tokens < self.max_known


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence: a part of its prompt, or tokens to verify."""

    sequence: Sequence
    start: int  # position of the first
    num_tokens: int
    sealed: int  # positions in pages before this step; the tail starts here
    slot: int  # of the tail
    tables: list[PageTable]  # one per layer group
    num_samples: int  # rows at the end that give a token each
    output_index: int  # which token of the answer the first of them gives, from 0
    is_chunk: bool = False  # written to pages (a prefill chunk), not to the tail alone
    row: int = 0  # of the first token in the flat list
    proposals: Seq[int] = ()  # the last tokens, which are guesses
    weights: Seq[Any] = ()  # that these were drawn with, if they were, see `Proposal`

    @staticmethod
    def following(sequence: Sequence, num_tokens: int, *, is_chunk: bool) -> "Segment":
        return Segment(
            sequence=sequence,
            start=sequence.num_computed,
            num_tokens=num_tokens,
            sealed=sequence.num_sealed,
            slot=sequence.slot,
            tables=sequence.tables,
            num_samples=int(num_tokens == sequence.num_left),
            output_index=sequence.num_output,
            is_chunk=is_chunk,
        )

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def picture_rows(self) -> PictureRows | None:
        """The segment as the pictures of its prompt see it; None: there are none."""
        pictures, rows = self.sequence.pictures, slice(self.row, self.row + self.num_tokens)
        if pictures is None:
            return None
        in_prompt = self.start < self.sequence.num_prompt
        return PictureRows(pictures, rows, self.start, self.stop, in_prompt)


def step_metadata(
    short: Seq[Segment],
    long: Seq[Segment],
    single: Segments | None = None,
    *,
    verified: Seq[int] = (),
) -> StepMetadata:
    """The segments of a step, as the KV cache reads them.

    Args:
        short: those of few tokens, single ones first.
        long: prefill chunks, which come last in the flat list.
        single: segments of one token that come first of all; None: there are none.
        verified: tails of segments that end with proposals.
    """
    # Single tokens together, and the few wider segments together: padding stays small.
    single_tokens = [segment for segment in short if segment.num_tokens == 1]
    wide = [segment for segment in short if segment.num_tokens > 1]
    together = [segments_of(segments) for segments in (single_tokens, wide) if segments]
    if single is not None and single_tokens:
        together[0] = single.joined(together[0])
    elif single is not None:
        together.insert(0, single)
    chunks = [segments_of([segment]) for segment in long]
    parts = [segments.tokens()[2] for segments in (*together, *chunks)]
    positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return StepMetadata(together, chunks, positions, verified)


def segments_of(segments: Seq[Segment]) -> Segments:
    return Segments(
        [segment.tables for segment in segments],
        ints([segment.row for segment in segments]),
        ints([segment.start for segment in segments]),
        ints([segment.num_tokens for segment in segments]),
        ints([segment.sealed for segment in segments]),
        ints([segment.slot for segment in segments]),
        max([segment.num_tokens for segment in segments]),
    )


@dataclass(slots=True)
class DecodeBatch:
    """B sequences that decode one token each, as arrays. Never changed: a step keeps its own.

    While the same sequences decode, each step is the step before with all positions one further.
    """

    sequences: list[Sequence]  # (B,) in order of admission
    slots: tuple[int, ...]  # (B,) of their tails and in the sampler
    segments: Segments  # the same order; flat rows 0 to B - 1
    output_index: NDArray[np.int64]  # (B,) which token of each answer is sampled, from 0
    has_grammar: bool  # whether any of them has one
    rope_delta: Ints | None  # (B,) rope position of a new token, less its place; None: 0 for all
    max_tail: int  # tokens in the longest tail, with the new one

    @staticmethod
    def of(sequences: list[Sequence]) -> "DecodeBatch":
        slots = [s.slot for s in sequences]
        segments = Segments(
            [s.tables for s in sequences],
            np.arange(len(sequences), dtype=np.int32),
            ints([s.num_computed for s in sequences]),
            np.ones(len(sequences), dtype=np.int32),
            ints([s.num_sealed for s in sequences]),
            ints(slots),
            width=1,
        )
        output_index = np.array([s.num_output for s in sequences], dtype=np.int64)
        has_grammar = any(s.request.grammar is not None for s in sequences)
        deltas = [0 if s.pictures is None else s.pictures.rope_delta for s in sequences]
        return DecodeBatch(
            sequences,
            tuple(slots),
            segments,
            output_index,
            has_grammar=has_grammar,
            rope_delta=ints(deltas) if any(deltas) else None,
            max_tail=longest_tail(segments),
        )

    def advance(self) -> "DecodeBatch":
        return DecodeBatch(
            self.sequences,
            self.slots,
            self.segments.at(self.segments.starts + self.segments.counts),
            self.output_index + 1,
            self.has_grammar,
            self.rope_delta,
            self.max_tail + 1,
        )

    def sealed_to(self, stops: Ints) -> "DecodeBatch":
        """The same batch after its tails were sealed up to these positions (B,)."""
        segments = self.segments.sealed_to(stops)
        return replace(self, segments=segments, max_tail=longest_tail(segments))


def longest_tail(single: Segments) -> int:
    return int((single.starts - single.sealed).max(initial=-1)) + 1


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals that a step verifies. Row by row, the proposals that come before its token.

    The rows of one sequence stand together: the first follows no proposal, the next one, and so on.
    """

    counts: Ints  # (R,) proposals before each row's token
    token_ids: Ints  # (R, n) these proposals; -1: none
    # (R,) the proposal for the row's own token and the weights it was drawn with; None: none
    drawn: list[tuple[int, Any] | None]
    blocked: set[int] = field(default_factory=set)  # rows that are not to be sampled after all


@dataclass(slots=True, eq=False)
class SamplingRows:
    """The R rows of a step that give a token: unconstrained ones first, then those with a grammar.

    A sequence has one row, or one more than it has proposals.
    """

    sequences: list[Sequence]  # (R,)
    slots: tuple[int, ...]  # (R,)
    output_index: NDArray[np.int64]  # (R,) which token of each answer it is, from 0
    flat_rows: Ints | None  # (R,) the logits of these give it; None: all rows of the step, in order
    num_free: int  # rows without a grammar, which come first
    proposals: Proposals | None = None  # None: the step verifies nothing

    def __len__(self) -> int:
        return len(self.sequences)


NO_ROWS = SamplingRows([], (), np.zeros(0, dtype=np.int64), None, 0)


def sampling_rows(decodes: DecodeBatch, ragged: list[Segment]) -> SamplingRows:
    """The rows of every decoding sequence, of prompts that end in the step, and of proposals."""
    sequences, slots = decodes.sequences, decodes.slots
    output_index, flat_rows, proposals = decodes.output_index, None, None
    if not ragged and not decodes.has_grammar:  # most steps
        return SamplingRows(sequences, slots, output_index, flat_rows, len(sequences))
    if ragged:
        samples = [(s, i) for s in ragged for i in range(s.num_samples)]
        sequences = sequences + [s.sequence for s, _ in samples]
        slots += tuple([s.slot for s, _ in samples])
        output_index = np.append(output_index, [s.output_index + i for s, i in samples])
        rows = [s.row + s.num_tokens - s.num_samples + i for s, i in samples]
        flat_rows = np.append(decodes.segments.rows, ints(rows))
        if most := max([len(s.proposals) for s in ragged]):
            proposals = _proposals(len(decodes.sequences), samples, most)
    constrained = [s.request.grammar is not None for s in sequences]
    sampling = SamplingRows(sequences, slots, output_index, flat_rows, len(sequences), proposals)
    return _constrained_last(sampling, constrained) if any(constrained) else sampling


def _proposals(num_decodes: int, samples: list[tuple[Segment, int]], most: int) -> Proposals:
    """The proposals behind the rows of a step that verifies some.

    Args:
        samples: of the other rows, the segment and how many proposals come before the row.
    """
    counts = [0] * num_decodes + [i for _, i in samples]
    drawn: list[tuple[int, Any] | None] = [None] * num_decodes
    for segment, i in samples:
        is_drawn = i < len(segment.weights)
        drawn.append((segment.proposals[i], segment.weights[i]) if is_drawn else None)
    token_ids = np.full((len(counts), most), -1, dtype=np.int32)
    for row, (segment, i) in enumerate(samples, num_decodes):
        token_ids[row, :i] = segment.proposals[:i]
    return Proposals(ints(counts), token_ids, drawn)


def _constrained_last(rows: SamplingRows, constrained: list[bool]) -> SamplingRows:
    """The rows with constrained ones last; rows of one sequence stay together."""
    order = np.argsort(constrained, kind="stable")
    places, proposals = order.tolist(), rows.proposals
    if proposals is not None:
        drawn = [proposals.drawn[place] for place in places]
        proposals = Proposals(proposals.counts[order], proposals.token_ids[order], drawn)
    return SamplingRows(
        [rows.sequences[place] for place in places],
        tuple([rows.slots[place] for place in places]),
        rows.output_index[order],
        order.astype(np.int32) if rows.flat_rows is None else rows.flat_rows[order],
        len(constrained) - sum(constrained),
        proposals,
    )


@dataclass(slots=True)
class Batch:
    """One step. The flat order of its tokens: decodes, short segments, prefill chunks."""

    decodes: DecodeBatch
    short: list[Segment]  # of up to MAX_SHORT tokens, single ones first
    long: list[Segment]
    cache_work: CacheWork = field(default_factory=CacheWork)  # before the step
    admitted: list[Sequence] = field(default_factory=list)  # took their slot for this step
    sampling: SamplingRows = NO_ROWS
    num_tokens: int = 0  # rows of the forward pass
    # Slots up to the highest one that any sequence holds, also outside of the step, or that work on
    # the cache is about. A step with a barrier must have it: tails beyond may go.
    held_slots: int = 0
    num_decoding: int = 0  # with those of steps that take turns with it; 0: there are none such
    was_delayed: bool = False  # a tower worked between the step before and this one
    # These three are known once its sequences were advanced.
    ragged: list[Segment] = field(default_factory=list)  # short and long ones, in flat order
    begins_answers: bool = False  # whether it gives the first token of an answer
    has_pictures: bool = False  # whether a prompt in `ragged` has any

    def advance_sequences(self, page_size: int) -> None:
        """Advance all sequences past this step, number its rows, and state which give a token."""
        for sequence in self.admitted:  # some get no token in it, but a copy of a shared page
            sequence.started = sequence.slot >= 0
        for sequence in self.decodes.sequences:
            sequence.num_computed += 1
            sequence.num_pending += 1
        row, self.ragged = len(self.decodes.sequences), self.short + self.long
        for segment in self.ragged:
            segment.row = row
            row += segment.num_tokens
            segment.sequence.num_computed += segment.num_tokens - len(segment.proposals)
            segment.sequence.num_pending += segment.num_samples
            self.begins_answers |= bool(segment.num_samples and not segment.output_index)
            self.has_pictures |= segment.sequence.pictures is not None
        for segment in self.long:
            segment.sequence.num_sealed = segment.stop - segment.stop % page_size
        self.sampling = sampling_rows(self.decodes, self.ragged)
        self.num_tokens = row

    @property
    def sequences(self) -> list[Sequence]:
        return self.decodes.sequences + [segment.sequence for segment in self.ragged]

    @property
    def metadata(self) -> StepMetadata:
        single, rope_delta = self.decodes.segments, self.decodes.rope_delta
        if not self.ragged and rope_delta is None:  # most steps
            return StepMetadata([single], [], single.starts)
        verified = [s.slot for s in self.short if s.proposals]
        decodes = single if self.decodes.sequences else None
        metadata = step_metadata(self.short, self.long, decodes, verified=verified)
        if not self.has_pictures and rope_delta is None:
            return metadata
        parts = [part for segment in self.ragged if (part := segment.picture_rows) is not None]
        return replace(
            metadata,
            spans=step_spans(parts, metadata.positions),
            moved_rope_positions=moved_rope_positions(parts, metadata.positions, rope_delta),
        )

    def known_ids(self) -> Ints:
        """(T,) token ids. An id that the host does not know yet is a placeholder."""
        known = [sequence.token_ids[-1] for sequence in self.decodes.sequences]
        for segment in self.ragged:
            known += segment.sequence.token_ids[segment.start : segment.stop]
            known += segment.proposals
        return ints(known)

    @property
    def num_slots(self) -> int:
        """Tail slots to allocate. In a step with a barrier, all slots that sequences hold."""
        highest = max(self.decodes.slots, default=-1)
        for segment in self.ragged:
            highest = max(highest, segment.slot)
        return max(highest + 1, self.held_slots)

    @property
    def row_sequences(self) -> list[Sequence]:
        """(T,) the sequence of each row."""
        rows = list(self.decodes.sequences)
        for segment in self.ragged:
            rows += [segment.sequence] * segment.num_tokens
        return rows

    @property
    def writes_pages(self) -> bool:
        return bool(self.long) or self.cache_work.writes_pages


@dataclass(slots=True)
class CommitResult:
    """Which tokens of a step ended answers, failed or were discarded, by row of its `sampling`.

    And what became of its proposals, of each sequence that had some.
    """

    finished: dict[int, FinishReason] = field(default_factory=dict)  # with this token
    failed: dict[int, BaseException] = field(default_factory=dict)  # the grammar's fault over it
    discarded: list[int] = field(default_factory=list)  # ended before, or a proposal did not hold
    released: list[int] = field(default_factory=list)  # had given up the slot: ended or preempted
    num_accepted: dict[Sequence, int] = field(default_factory=dict)  # proposals
    # Slot -> tokens that stay: the newest one and the accepted proposals. If the sequence gave up
    # its slot meanwhile, they are what `num_computed` counted then.
    num_kept: dict[int, int] = field(default_factory=dict)
