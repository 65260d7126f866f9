"""Sources and controller together: stats, faults, forced tokens, options."""

import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, prompt, tiny_model
from speculation.following import following

from mlxinfer.core import SamplingParams
from mlxinfer.engine.batch import Batch, CommitResult, DecodeBatch, Sequence, sampling_rows
from mlxinfer.engine.proposals import Proposal
from mlxinfer.errors import InvalidRequestError
from mlxinfer.speculation.controller import (
    WARM_UP,
    Acceptance,
    Controller,
    FixedDepth,
    Key,
    MeasuredStep,
)
from mlxinfer.speculation.ngram import ForcedProposer, NgramProposer
from mlxinfer.speculation.options import SpeculationOptions
from mlxinfer.speculation.speculation import ProposalSource, Speculation

GREEDY = SamplingParams(max_tokens=120)


def ngrams(depth: int = 4) -> Speculation:
    return Speculation([NgramProposer()], FixedDepth(depth), max_depth=depth, method="ngram")


class Breaking(NgramProposer):
    """Raises an error where it is asked."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self.taps = (0,) if where == "take" else ()

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        if self._where == "outlook":
            raise ValueError("broken")
        return super().outlook(sequences, depth)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        raise ValueError("broken")

    def take(self, batch: Batch, hidden: object) -> None:
        if self._where == "take":
            raise ValueError("broken")


def test_repetitive_answers_take_fewer_steps_and_are_the_same() -> None:
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=ngrams())
    harness.add("a", prompt(20), GREEDY)
    harness.check()
    assert harness.loop.scheduler.counters.steps < 80


def test_stats_count_by_source_and_by_position() -> None:
    speculation = ngrams()
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=speculation)
    harness.add("a", prompt(20), GREEDY)
    harness.turn()
    request = harness.loop.scheduler.queues.running[0].request
    harness.drain()
    stats, counters = harness.loop.stats()["speculation"], harness.loop.scheduler.counters
    assert stats["method"] == "ngram"
    assert stats["drafted"] == request.num_drafted == counters.tokens_proposed > 0
    assert request.num_accepted == counters.tokens_accepted
    assert stats["accepted"] == counters.tokens_accepted == sum(stats["accepted_at"]) > 0
    assert stats["sources"]["ngram"]["drafts"] == stats["drafts"]
    assert sorted(stats["accepted_at"], reverse=True) == stats["accepted_at"]


@pytest.mark.alike
@pytest.mark.parametrize("where", ["outlook", "propose", "take"])
def test_a_source_that_fails_is_switched_off_for_the_request(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = Speculation([Breaking(where)], FixedDepth(4), max_depth=4, method="ngram")
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=speculation)
    with caplog.at_level(logging.ERROR, "mlxinfer.speculation"):
        harness.add("a", prompt(20), GREEDY)
        harness.check()
    assert len(caplog.records) == 1
    stats = speculation.stats()
    assert stats["switched_off"] == 1
    (source,) = stats["sources"].values()
    assert str(caplog.records[0].exc_info[1]) in source["last_error"]  # type: ignore[index]


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    speculation = ngrams()
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=speculation, max_batch=3)
    for i in range(8):
        harness.add(str(i), prompt(20, i), SamplingParams(max_tokens=30))
        if i % 3 == 0:
            harness.turn(3)
            harness.loop.abort(str(i))
    harness.drain()
    harness.run("last", prompt(9), SamplingParams(max_tokens=4))
    (source,) = speculation._sources
    assert not speculation._known
    assert not speculation._acceptance._by_sequence
    assert not source._followed  # type: ignore[attr-defined]


def test_steps_launch_ahead_where_nothing_repeats() -> None:
    """N-grams are looked up beside the step in flight, and only a likely one makes it wait."""
    speculation = Speculation([NgramProposer()], Controller(max_depth=7), max_depth=7)
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=speculation)
    harness.add("a", prompt(20), SamplingParams(max_tokens=40, temperature=3.0, seed=1))
    harness.turn(10)
    assert harness.loop.scheduler.queues.running[0].num_pending == 1
    harness.drain()
    assert speculation.stats()["drafted"] <= 4


class Counting(NgramProposer):
    """Counts the sequences that it is asked about."""

    asked = 0

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        self.asked += len(sequences)
        return super().outlook(sequences, depth)


def test_a_step_without_proposals_looks_at_two_sequences_and_at_none_while_closed() -> None:
    source, policy = Counting(), Controller(max_depth=4)
    speculation = Speculation([source], policy, max_depth=4)
    rows = [following(range(100 + i, 130 + i), [99]) for i in range(64)]
    assert speculation.choose_depth(rows, len(rows)) == 0
    assert source.asked == 0  # plain steps are measured before anything else
    for _ in range(WARM_UP):
        policy.observe(MeasuredStep(64, 0, 64, 0.01))
    for step in range(1, 40):
        assert speculation.choose_depth(rows, len(rows)) == 0
        assert source.asked == 2 * step


class Recording(Controller):
    """Keeps what was measured."""

    def __init__(self) -> None:
        super().__init__(max_depth=4)
        self.steps: list[MeasuredStep] = []

    def observe(self, step: MeasuredStep) -> bool:
        self.steps.append(step)
        return False


def test_micro_batches_count_as_a_step_of_all_that_decode() -> None:
    """A turn of all, so that steps with proposals are compared with steps without."""
    policy, times = Recording(), iter([1.0, 1.5, 2.25, 2.5])
    speculation = Speculation([], policy, max_depth=4, clock=lambda: next(times))
    rows = [following([3, 4, 5], [6]) for _ in range(5)]
    for some in (rows[:3], rows[3:], rows[:3], rows[3:]):
        decodes = DecodeBatch.of(some)
        batch = Batch(decodes, [], [], num_tokens=len(some), num_decoding=5)
        batch.sampling = sampling_rows(decodes, [])
        speculation.observe(batch, CommitResult())
    seen = [(step.num_sequences, step.num_tokens, step.seconds) for step in policy.steps]
    assert seen == [(5, 3, None), (5, 2, None), (5, 5, 1.25), (5, 5, 1.0)]


def test_one_sequence_of_many_that_repeats_itself_is_found() -> None:
    speculation = ngrams()
    rows = [following(range(100 + i, 130 + i), [99]) for i in range(63)]
    rows.append(following([5, 6, 7, 8] * 9, [5, 6, 7, 8]))
    assert any(speculation.choose_depth(rows, len(rows)) for _ in range(33))
    assert speculation.propose(rows, 4)[63].token_ids == [5, 6, 7, 8]


class Forcing(FakeGrammar):
    """Forces what it allows first, and allows nothing else."""

    def allowed(self, vocab: int = 96) -> list[int]:
        return super().allowed(vocab)[:1]

    def forced(self) -> list[int]:
        state, collected = self.fork(), []
        while not state.finished and len(collected) < 5:
            collected += state.allowed()
            state.accept(collected[-1])
        return collected


def test_forced_tokens_of_a_grammar_are_proposed_and_all_hold() -> None:
    sources: list[ProposalSource] = [ForcedProposer()]
    speculation = Speculation(sources, FixedDepth(7), max_depth=7)
    harness = Harness(tiny_model("qwen3-v4", quantized=True), proposer=speculation)
    harness.add("a", prompt(20), GREEDY, grammar=Forcing(3, length=60))
    harness.check()
    stats = speculation.stats()
    assert stats["accepted"] == stats["drafted"] > 40
    assert harness.loop.scheduler.counters.steps < 20


def test_acceptance_is_learned_by_key_and_by_sequence() -> None:
    acceptance = Acceptance({("s", 0): 0.5})
    good, bad = object(), object()
    for _ in range(30):
        acceptance.observe(good, ("s", 0), True)  # type: ignore[arg-type]
        acceptance.observe(bad, ("s", 0), False)  # type: ignore[arg-type]
    assert acceptance.chance(good, ("s", 0)) > 0.75  # type: ignore[arg-type]
    assert acceptance.chance(bad, ("s", 0)) < 0.25  # type: ignore[arg-type]
    assert 0.35 < acceptance.chance(object(), ("s", 0)) < 0.65  # type: ignore[arg-type]
    acceptance.renew("s")
    assert acceptance.chance(bad, ("s", 0)) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "mtp", "draft": Path("x")}, "leave one of them out"),
        ({"method": "eagle"}, "needs a draft"),
        ({"method": "dflash"}, "needs a draft"),
        ({"method": "on"}, "expected 'auto', 'off', 'ngram', 'draft'"),
        ({"method": "draft"}, "needs a draft"),
        ({"method": "off", "draft": Path("x")}, "leave one of them out"),
        ({"method": "ngram", "draft": Path("x")}, "leave one of them out"),
        ({"max_draft": 9}, "8 tokens of a request at most"),
        ({"max_draft": -1}, "max_draft"),
        ({"acceptance": "greedy"}, "expected 'exact', 'rejection'"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        SpeculationOptions(**given)
