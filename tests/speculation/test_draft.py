"""The draft model follows the model's sequences exactly, in little room and after faults."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from engine.harness import Harness, config, prompt, tiny_model
from models.runs import every

from mlxinfer.cache.paged import PagedLayer
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.proposals import Proposal
from mlxinfer.models.language import LanguageModel
from mlxinfer.speculation.controller import FixedDepth, Outlook
from mlxinfer.speculation.draft import DraftProposer
from mlxinfer.speculation.speculation import Speculation

MODEL = "qwen3-v4"
GREEDY = SamplingParams(max_tokens=40)
DRAWN = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=11)
PENALISED = replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.3)
MUCH, LITTLE = {"num_pages": 400}, {"num_pages": 12, "max_batch": 2}


def model() -> LanguageModel:
    return tiny_model(MODEL, quantized=True)


def with_draft(
    draft: LanguageModel, depth: int = 4, *, rejection: bool = False, **sizes: object
) -> Speculation:
    """A draft that always proposes; the sizes are of its own cache."""
    vocab_size = model().config.vocab_size
    return Speculation(
        [
            DraftProposer(
                draft,
                config(**{"num_pages": 400, **sizes}),
                vocab_size=vocab_size,
                cost=0.1,
                rejects=rejection,
            )
        ],
        FixedDepth(depth),
        max_depth=depth,
    )


def counts(speculation: Speculation) -> tuple[int, int]:
    stats = speculation.stats()
    return stats["drafted"], stats["accepted"]


@pytest.mark.ci
def test_tails_stay_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a long prompt has a barrier, and sequences that hold higher slots are not in it."""
    sizes = config(num_pages=400, max_batch=16, prefill_chunk=32)
    source = DraftProposer(model(), sizes, vocab_size=model().config.vocab_size, cost=0.1)
    resize, lost = PagedLayer.resize_tails, list[bool]()

    def checked(layer: PagedLayer, num_slots: int) -> None:
        if layer in source._parts.cache.paged:
            drafts = [counterpart.drafted for counterpart in source._counterparts.values()]
            held = [drafted.slot for drafted in drafts if drafted.num_computed > drafted.num_sealed]
            lost.append(num_slots <= max(held, default=0))
        resize(layer, num_slots)

    monkeypatch.setattr(PagedLayer, "resize_tails", checked)
    harness = Harness(model(), proposer=Speculation([source], FixedDepth(1), max_depth=1))
    for i in range(12):
        count = 150 if i in (0, 11) else 12
        harness.add(str(i), prompt(20 + i, i), SamplingParams(max_tokens=count, ignore_eos=True))
    while len(harness.loop.scheduler.queues.unfinished()) > 2:
        harness.turn()
    for i in range(3):
        harness.add(f"long{i}", prompt(400, 50 + i), SamplingParams(max_tokens=4, ignore_eos=True))
        harness.turn(12)
    harness.drain()
    assert lost
    assert not any(lost)


@pytest.mark.parametrize(
    ("params", "count"),
    every(
        3,
        [
            pytest.param(GREEDY, 1, id="greedy-1"),
            pytest.param(DRAWN, 5, id="drawn-5"),
            pytest.param(PENALISED, 3, id="penalised-3"),
            *(
                pytest.param(params, count, marks=pytest.mark.slow)
                for params, count in [(GREEDY, 5), (DRAWN, 1), (PENALISED, 1), (PENALISED, 5)]
            ),
        ],
    ),
)
def test_proposals_of_the_same_model_all_hold(params: SamplingParams, count: int) -> None:
    """Also where tokens are drawn: both draw with the same random numbers."""
    speculation = with_draft(model())
    harness = Harness(model(), proposer=speculation)
    for i in range(count):
        harness.add(str(i), prompt(20 + 7 * i, i), params)
    harness.check()
    drafted, accepted = counts(speculation)
    if params is PENALISED:  # the draft's penalties lack the proposals of the same step
        assert accepted > drafted / 2
    else:
        assert accepted == drafted
    assert harness.loop.scheduler.counters.steps <= 1 + 3 + 40 / 5 + count


def test_prompts_are_prefix_cached_in_the_draft_too() -> None:
    speculation = with_draft(model())
    harness = Harness(model(), proposer=speculation)
    for name in "ab":
        harness.run(name, prompt(100), GREEDY)
    (source,) = speculation._sources
    prefix = source._parts.scheduler.kv_manager.prefix  # type: ignore[attr-defined]
    assert prefix.tokens_reused >= 96


def test_a_draft_that_fails_is_off_for_the_request(caplog: pytest.LogCaptureFixture) -> None:
    speculation = with_draft(model())
    harness = Harness(model(), proposer=speculation)
    (source,) = speculation._sources
    runner = source._parts.runner  # type: ignore[attr-defined]
    launch, left = runner.launch, [7]

    def breaking(*given: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the draft is broken")
        return launch(*given)

    runner.launch = breaking
    with caplog.at_level(logging.ERROR, "mlxinfer.speculation"):
        outcome = harness.run("a", prompt(30), GREEDY)
    assert outcome.error is None
    assert len(caplog.records) == 1
    assert "no more proposals by draft for the requests a" in caplog.text
    before = counts(speculation)[0]
    harness.add("b", prompt(30, 1), GREEDY)  # a new cache, and all is well again
    harness.check()
    assert counts(speculation)[0] > before


def test_a_request_without_speculation_gets_no_proposals() -> None:
    speculation = with_draft(model())
    harness = Harness(model(), proposer=speculation)
    harness.run("a", prompt(30), replace(GREEDY, speculate=False))
    assert counts(speculation) == (0, 0)


class Spoiling(DraftProposer):
    """Its third proposal is wrong every other time."""

    turn = 0
    num_right = 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        proposed = super().propose(sequences, depths)
        self.turn += 1
        for ids, _ in proposed:
            if not isinstance(ids, list):  # there are none
                continue
            spoilt = self.turn % 2 and len(ids) > 2
            self.num_right += 2 if spoilt else len(ids)
            ids[2:3] = [ids[2] ^ 1] if spoilt else ids[2:3]
        return proposed


@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "sizes"),
    every(
        2,
        [
            ("qwen3_5_text-v4", LITTLE),
            ("lfm2-v4", MUCH),
            pytest.param("qwen3_5_text-v4", MUCH, marks=pytest.mark.slow),
            pytest.param("lfm2-v4", LITTLE, marks=pytest.mark.slow),
        ],
    ),
)
def test_recurrent_drafts_go_back_behind_rejections(case: str, sizes: dict[str, int]) -> None:
    """All that follows a rejection holds again, in little room too."""
    both = tiny_model(case, quantized=True)
    source = Spoiling(both, config(**sizes), vocab_size=both.config.vocab_size, cost=0.1)
    speculation = Speculation([source], FixedDepth(4), max_depth=4)
    harness = Harness(both, proposer=speculation)
    rows = [(prompt(20, 0), GREEDY), (prompt(57, 1), DRAWN), (prompt(94, 2), GREEDY)]
    for i, (ids, params) in enumerate(rows):
        harness.add(str(i), ids, params)
        harness.turn(i)
    harness.check()
    drafted, accepted = counts(speculation)
    assert 0.9 * source.num_right <= accepted < drafted  # an answer may end before


def test_beyond_the_drafts_context_nothing_is_proposed() -> None:
    speculation = with_draft(model(), max_context=40)
    harness = Harness(model(), proposer=speculation)
    harness.add("a", prompt(30), GREEDY)
    harness.check()
    assert 0 < counts(speculation)[0] <= 12


def test_rejection_sampling_takes_all_that_the_same_model_draws() -> None:
    """Their distributions are one, up to what sums in another order change."""
    speculation = with_draft(model(), rejection=True)
    harness = Harness(model(), proposer=speculation)
    for i in range(4):
        harness.add(str(i), prompt(20, i), replace(DRAWN, seed=i))
    harness.drain()
    drafted, accepted = counts(speculation)
    assert accepted >= drafted - 2


@pytest.mark.ci
def test_a_chunk_of_few_tokens_up_to_a_pages_end_is_sealed_before_the_next() -> None:
    """A draft that finds part of a page in its prefix cache begins with such a chunk."""
    speculation = with_draft(model(), 2, prefill_chunk=16)
    harness = Harness(model(), proposer=speculation)
    for seed, length in enumerate((5, 10, 11, 12, 13)):
        ids = prompt(90, seed)
        for part in (ids[:length], ids):
            harness.run(f"{seed} {len(part)}", part, GREEDY)
    stats = speculation.stats()
    assert stats["drafted"]
    assert not stats["switched_off"], stats


class Resting(FixedDepth):
    """One proposal a step, and now and then none for a dozen steps and more."""

    steps = 0

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        Resting.steps += 1
        return super().choose(outlooks, num_sequences) if self.steps % 75 < 45 else [0, 0]


@pytest.mark.alike
@pytest.mark.ci
def test_a_draft_with_a_window_follows_after_a_rest() -> None:
    draft = tiny_model("gemma3_text-v4", quantized=True)
    source = DraftProposer(
        draft, config(num_pages=400, kv=KVOptions(window=24)), vocab_size=96, cost=0.1
    )
    speculation = Speculation([source], Resting(1), max_depth=1)
    harness = Harness(draft, proposer=speculation, kv=KVOptions(window=24))
    for i in range(2):
        harness.add(str(i), prompt(7, i), replace(GREEDY, max_tokens=145))
    harness.check()
    stats = speculation.stats()
    assert not stats["switched_off"], stats
    assert stats["drafted"] > 60
