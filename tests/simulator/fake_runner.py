"""Runs batches as the real runner does, on hashes. Knows no queues.

A step runs when it is launched; its tokens are read one turn later, or never.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from simulator.fake_kv import FakeKV
from simulator.oracle import Rules, embed, key, mix, sample

from mlxinfer.engine.batch import Batch, Sampling, Segment, Spill
from mlxinfer.engine.sequence import Sequence as EngineSequence


class StepFailed(RuntimeError):
    """A fault that was asked for."""


@dataclass
class Launched:
    """A step and what it gave."""

    batch: Batch
    tokens: list[int] = field(default_factory=list)
    spilled: list[tuple[Spill, bytes]] = field(default_factory=list)
    unconstrained: list[tuple[Segment, int]] = field(default_factory=list)  # rows yet to be sampled
    rows: dict[EngineSequence, int] = field(default_factory=dict)  # of who gets a token
    fault: str | None = None
    unreadable: bool = False  # a fault: whoever wants its results gets an error
    done: bool = False  # it was waited for
    committed: bool = False

    def wait(self) -> None:
        if self.unreadable:
            raise StepFailed("evaluation failed")
        self.done = True


@dataclass
class SamplerSlot:
    """What the sampler knows of a running sequence."""

    seed: int
    history: int  # sum of all tokens that it was told of


class FakeRunner:
    """Computes hashes for batches.

    Args:
        verify: called with (request id, position, what the last layer gives there) of every token.
        fault: asked at each launch where it is to fail: "start", "middle", "end",
            "sample_constrained", "read" or None.
    """

    def __init__(
        self,
        kv: FakeKV,
        *,
        vocab: int,
        verify: Callable[[str, int, int], None],
        fault: Callable[[], str | None],
    ) -> None:
        self.kv, self.vocab = kv, vocab
        self._verify, self._fault = verify, fault
        self._sampler: dict[int, SamplerSlot] = {}

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        fault = self._fault()
        self._fail(fault, "start")
        if previous is not None and (batch.writes_pages or batch.num_slots > self.kv.num_slots):
            previous.wait()
        self.kv.may_write_pages = previous is None or previous.done
        if self.kv.may_write_pages:
            self.kv.poison_given_back(batch.spill)
        self.kv.make_room(batch.num_slots)
        self.kv.seal(batch.seal)
        spilled = self.kv.read_out(batch.spill)
        self.kv.poison_pages(batch.spill)
        self.kv.fill(batch.load)
        self._admit(batch)
        self.kv.restore(batch.restore)
        self._fail(fault, "middle")
        launched = Launched(batch, spilled=spilled, fault=fault, unreadable=fault == "read")
        ids = _input_ids(batch, previous)
        hidden = self._forward(batch, ids)
        sampling, segments = batch.sampling, {s.sequence: s for s in batch.segments}
        check_sampling(sampling, segments, batch.num_tokens)
        drawn = [segments[sequence] for sequence in sampling.sequences]
        launched.tokens = [self._sample(s, ids, hidden) for s in drawn[: sampling.num_free]]
        constrained = drawn[sampling.num_free :]
        launched.unconstrained = [(s, hidden[s.row + s.num_tokens - 1]) for s in constrained]
        launched.rows = {sequence: row for row, sequence in enumerate(sampling.sequences)}
        self._fail(fault, "end")
        return launched

    def sample_constrained(self, launched: Launched) -> None:
        """Sample the rows under a grammar; everything before them was read."""
        self._fail(launched.fault, "sample_constrained")
        for segment, x in launched.unconstrained:
            rules, known = rules_of(segment.sequence), self._sampler[segment.slot]
            if segment.sequence.finished:
                launched.tokens.append(0)
                continue
            assert len(rules.said) == segment.output_index
            history = known.history + rules.state
            token = sample(x, known.seed, segment.output_index, history, self.vocab)
            launched.tokens.append(token)
        launched.unconstrained = []

    def observe(self, sampling: Sampling, tokens: Sequence[int], away: list[int]) -> None:
        """Tokens were read; rows that are away have no slot any more."""
        for row, (slot, token) in enumerate(zip(sampling.slots, tokens, strict=True)):
            assert int(sampling.slot_ids[row]) == slot
            if row not in away:
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
        segments = batch.segments
        rows = [(s, position) for s in segments for position in range(s.start, s.stop)]
        assert len(rows) == batch.num_tokens == len(ids)
        hidden = [embed(token, position) for token, (_, position) in zip(ids, rows, strict=True)]
        places = [
            [self.kv.places(segment, g, position) for segment, position in rows]
            for g in range(len(self.kv.windows))
        ]
        for layer, g in enumerate(self.kv.groups):
            keys = [key(layer, position, x) for (_, position), x in zip(rows, hidden, strict=True)]
            for s in segments:
                self.kv.write(layer, s, keys[s.row : s.row + s.num_tokens])
            hidden = [
                mix(x, self.kv.see(layer, segment.slot, where))
                for x, (segment, _), where in zip(hidden, rows, places[g], strict=True)
            ]
        for (segment, position), x in zip(rows, hidden, strict=True):
            self._verify(segment.sequence.request.id, position, x)
        return hidden

    def _sample(self, segment: Segment, ids: list[int], hidden: list[int]) -> int:
        known, row = self._sampler[segment.slot], segment.row + segment.num_tokens - 1
        in_flight = segment.stop > segment.sequence.num_known  # its newest token: not told of yet
        history = known.history + (ids[row] if in_flight else 0)
        return sample(hidden[row], known.seed, segment.output_index, history, self.vocab)


def _input_ids(batch: Batch, previous: Launched | None) -> list[int]:
    """Token ids of a step; one that is still in flight is taken from there."""
    ids: list[int] = []
    for segment in batch.segments:
        known = segment.sequence.token_ids[segment.start : segment.stop]
        if len(known) < segment.num_tokens:
            assert segment.num_tokens == 1
            assert previous is not None
            assert not previous.unconstrained
            known = [previous.tokens[previous.rows[segment.sequence]]]
        ids += known
    return ids


def check_sampling(
    sampling: Sampling, segments: dict[EngineSequence, Segment], num_tokens: int
) -> None:
    """Its arrays say what the segments say."""
    drawn = [segments[sequence] for sequence in sampling.sequences]
    assert set(sampling.sequences) == {s.sequence for s in segments.values() if s.samples}
    assert list(sampling.slots) == [s.slot for s in drawn]
    assert sampling.output_index.tolist() == [s.output_index for s in drawn]
    rows = range(num_tokens) if sampling.rows is None else sampling.rows.tolist()
    assert list(rows) == [s.row + s.num_tokens - 1 for s in drawn]
    constrained = [s.sequence for s in drawn if s.sequence.request.grammar is not None]
    assert sampling.constrained == constrained == sampling.sequences[sampling.num_free :]


def rules_of(sequence: EngineSequence) -> Rules:
    """The grammar of a sequence that has one."""
    assert sequence.request.grammar is not None
    return cast(Rules, sequence.request.grammar)
