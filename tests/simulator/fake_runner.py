"""Runs batches as the real runner does, on hashes. Knows no queues.

A step runs when it is launched; its tokens are read one turn later, or never.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine.spelled import segments_of
from simulator.fake_kv import FakeKV
from simulator.oracle import Rules, embed, key, mix, sample

from mlxinfer.cache.disk import Entry
from mlxinfer.engine.batch import Batch, CommitResult, SamplingRows, Segment
from mlxinfer.engine.batch import Sequence as EngineSequence


class StepFailed(RuntimeError):
    """A fault that was asked for."""


@dataclass
class Launched:
    """A step and what it gave."""

    batch: Batch
    tokens: list[int] = field(default_factory=list)
    spilled: list[Entry] = field(default_factory=list)
    unsampled: list[tuple[Segment, int, int]] = field(default_factory=list)  # rows with a grammar
    rows: dict[EngineSequence, int] = field(default_factory=dict)  # of sequences that get a token
    fault: str | None = None
    unreadable: bool = False  # a fault: waiting for it or reading it raises
    done: bool = False  # it was waited for

    def wait(self) -> None:
        if self.unreadable:
            raise StepFailed("evaluation failed")
        self.done = True


@dataclass
class SamplerSlot:
    """What the sampler knows of a running sequence."""

    seed: int
    history: int  # sum of all tokens that it knows


class FakeRunner:
    """Computes hashes for batches.

    Args:
        verify: called for every segment with its request's id, first position, token ids and what
            the last layer gives at each.
        fault: asked at each launch where it is to fail: "start", "middle", "end",
            "sample_constrained", "read" or None.
        gather: takes the features of a step, which are hashed as the ids of their pictures.
    """

    def __init__(
        self,
        kv: FakeKV,
        *,
        vocab: int,
        verify: Callable[[str, int, list[int], list[int]], None],
        fault: Callable[[], str | None],
        gather: Callable[[Batch], object],
    ) -> None:
        self.kv, self.vocab = kv, vocab
        self._gather = gather
        self._verify, self._fault = verify, fault
        self._sampler: dict[int, SamplerSlot] = {}

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        fault = self._fault()
        self._fail(fault, "start")
        if previous is not None and (batch.writes_pages or batch.num_slots > self.kv.num_slots):
            previous.wait()
        self.kv.may_write_pages = previous is None or previous.done
        if self.kv.may_write_pages:
            self.kv.poison_given_back(batch.cache_work)
        self.kv.make_room(batch.num_slots, shrink=batch.writes_pages)
        spilled = self.kv.carry_out(batch.cache_work, lambda: self._admit(batch))
        self._fail(fault, "middle")
        launched = Launched(batch, spilled=spilled, fault=fault, unreadable=fault == "read")
        ids = _input_ids(batch, previous)
        self._gather(batch)
        hidden = self._forward(batch, ids)
        sampling, segments = batch.sampling, {s.sequence: s for s in segments_of(batch)}
        check_sampling(sampling, segments, batch.num_tokens)
        counts = [0] * len(sampling)
        if sampling.proposals is not None:
            counts = sampling.proposals.counts.tolist()
        drawn = [(segments[s], count) for s, count in zip(sampling.sequences, counts, strict=True)]
        launched.tokens = [self._sample(*row, ids, hidden) for row in drawn[: sampling.num_free]]
        constrained = drawn[sampling.num_free :]
        launched.unsampled = [
            (s, c, hidden[s.row + s.num_tokens - s.num_samples + c]) for s, c in constrained
        ]
        launched.rows = {sequence: row for row, sequence in enumerate(sampling.sequences)}
        self._fail(fault, "end")
        return launched

    def sample_constrained(self, launched: Launched) -> None:
        """Sample the rows under a grammar; everything before them was read."""
        self._fail(launched.fault, "sample_constrained")
        for segment, count, x in launched.unsampled:
            rules, known = rules_of(segment.sequence).fork(), self._sampler[segment.slot]
            if segment.sequence.finished:
                launched.tokens.append(0)
                continue
            assert len(rules.said) == segment.output_index
            rules.said += segment.proposals[:count]
            history = known.history + sum(segment.proposals[:count]) + rules.state
            index = segment.output_index + count
            launched.tokens.append(sample(x, known.seed, index, history, self.vocab))
        launched.unsampled = []

    def commit(self, batch: Batch, tokens: Sequence[int], result: CommitResult) -> None:
        """Tokens were read; some rows have no slot any more, and some tokens were not kept."""
        if self.kv.states is not None:
            self.kv.states.commit(result.num_kept)
        sampling, gone = batch.sampling, {*result.released, *result.discarded}
        for row, (slot, token) in enumerate(zip(sampling.slots, tokens, strict=True)):
            if row not in gone:
                self._sampler[slot].history += token

    def _fail(self, fault: str | None, stage: str) -> None:
        if fault == stage:
            raise StepFailed(f"the step failed at its {stage}")

    def _admit(self, batch: Batch) -> None:
        for sequence in batch.admitted:
            if sequence.slot >= 0:
                if sequence.slot < self.kv.num_slots:
                    self.kv.poison_tail(sequence.slot)
                seed = sequence.request.params.seed or 0
                self._sampler[sequence.slot] = SamplerSlot(seed, sum(sequence.token_ids))

    def _forward(self, batch: Batch, ids: list[int]) -> list[int]:
        segments = segments_of(batch)
        rows = [(s, position) for s in segments for position in range(s.start, s.stop)]
        assert len(rows) == batch.num_tokens == len(ids)
        hidden = [embed(token, position) for token, (_, position) in zip(ids, rows, strict=True)]
        places = [
            [self.kv.places(segment, g, position) for segment, position in rows]
            for g in range(len(self.kv.windows))
        ]
        if self.kv.states is not None:
            self.kv.states.begin_step(batch.metadata.verified)
        hidden = self._recur(0, segments, hidden)
        for layer, g in enumerate(self.kv.groups):
            keys = [key(layer, position, x) for (_, position), x in zip(rows, hidden, strict=True)]
            for s in segments:
                self.kv.write(layer, s, keys[s.row : s.row + s.num_tokens])
            hidden = [
                mix(x, self.kv.see(layer, segment.slot, where))
                for x, (segment, _), where in zip(hidden, rows, places[g], strict=True)
            ]
        hidden = self._recur(1, segments, hidden)
        for s in segments:
            in_step = slice(s.row, s.row + s.num_tokens)
            self._verify(s.sequence.request.id, s.start, ids[in_step], hidden[in_step])
        return hidden

    def _recur(self, layer: int, segments: list[Segment], hidden: list[int]) -> list[int]:
        """A recurrent layer, where there are any."""
        states = self.kv.states
        if states is None:
            return hidden
        outputs: list[int] = []
        for s in segments:
            inputs = hidden[s.row : s.row + s.num_tokens]
            after = states.run(layer, s.slot, inputs)
            outputs += [mix(x, state) for x, state in zip(inputs, after, strict=True)]
        if layer == 1:
            states.end_step()
        return outputs

    def _sample(self, segment: Segment, count: int, ids: list[int], hidden: list[int]) -> int:
        """The token after `count` proposals."""
        known = self._sampler[segment.slot]
        row = segment.row + segment.num_tokens - segment.num_samples + count
        history = known.history + sum(segment.proposals[:count])
        if not segment.proposals and segment.stop > len(segment.sequence.token_ids):
            history += ids[row]  # the newest token, which was not read yet
        index = segment.output_index + count
        return sample(hidden[row], known.seed, index, history, self.vocab)


def _input_ids(batch: Batch, previous: Launched | None) -> list[int]:
    """Token ids of a step; one that is still in flight is taken from there."""
    ids: list[int] = []
    for segment in segments_of(batch):
        known = segment.sequence.key_ids[segment.start : segment.stop]
        if segment.proposals:
            assert len(known) == 1
            known = [*known, *segment.proposals]
        if len(known) < segment.num_tokens:
            assert segment.num_tokens == 1
            assert not previous.unsampled
            known = [previous.tokens[previous.rows[segment.sequence]]]
        ids += known
    return ids


def check_sampling(
    sampling: SamplingRows, segments: dict[EngineSequence, Segment], num_tokens: int
) -> None:
    """Its arrays say what the segments say."""
    drawn = [segments[sequence] for sequence in sampling.sequences]
    samples = Counter({s.sequence: s.num_samples for s in segments.values() if s.num_samples})
    assert Counter(sampling.sequences) == samples
    assert list(sampling.slots) == [s.slot for s in drawn]
    counts = [0] * len(sampling)
    if sampling.proposals is not None:
        counts = sampling.proposals.counts.tolist()
        for s, count, before in zip(drawn, counts, sampling.proposals.token_ids, strict=True):
            assert before[before >= 0].tolist() == list(s.proposals[:count])
    index = [s.output_index + count for s, count in zip(drawn, counts, strict=True)]
    assert sampling.output_index.tolist() == index
    rows = range(num_tokens) if sampling.flat_rows is None else sampling.flat_rows.tolist()
    first = [s.row + s.num_tokens - s.num_samples for s in drawn]
    assert list(rows) == [row + count for row, count in zip(first, counts, strict=True)]
    constrained = [s.sequence for s in drawn if s.sequence.request.grammar is not None]
    assert constrained == sampling.sequences[sampling.num_free :]


def rules_of(sequence: EngineSequence) -> Rules:
    """The grammar of a sequence that has one."""
    assert sequence.request.grammar is not None
    return cast(Rules, sequence.request.grammar)
