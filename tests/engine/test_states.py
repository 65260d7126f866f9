"""Recurrent layers beside attention: states resume exactly, wherever a request comes from."""

from pathlib import Path

import pytest
from cache.prefix_invariants import states_of
from engine.harness import Harness, disk_at, prompt, tiny_model
from engine.recurrent import hybrid_model

from mlxinfer.core import SamplingParams
from mlxinfer.engine import snapshots
from mlxinfer.models.decoder import Model

TEN = SamplingParams(max_tokens=10)
LAYERS = [(0, 2), (1,), (0, 1, 2)]


@pytest.fixture(
    params=[LAYERS[0], pytest.param(LAYERS[1], marks=pytest.mark.slow), LAYERS[2]], ids=str
)
def model(request: pytest.FixtureRequest) -> Model:
    return hybrid_model("qwen3-v4", request.param)


def answer(harness: Harness, ids: list[int]) -> list[int]:
    """The tokens that a prompt gets, which are those that it gets alone."""
    name = str(len(harness.outcomes))
    harness.add(name, ids, TEN)
    return harness.check(name)[name].token_ids


def cached(harness: Harness) -> int:
    """Prompt tokens that the last request found computed."""
    return list(harness.outcomes.values())[-1].cached_tokens


def test_a_prompt_resumes_at_the_last_page_boundary_before_its_end(model: Model) -> None:
    harness, ids = Harness(model), prompt(75)
    for _ in range(2):
        answer(harness, ids)
    assert cached(harness) == 64


def test_a_conversation_resumes_at_the_exact_end_of_the_answer(model: Model) -> None:
    harness, ids = Harness(model), prompt(75)
    longer = [*ids, *answer(harness, ids), *prompt(9, seed=4)]
    answer(harness, longer)
    assert cached(harness) == 75 + 9  # the last token of an answer is never computed
    edited = [*longer[:84], *prompt(12, seed=8)]  # the first turn's snapshot outlives the second's
    answer(harness, edited)
    assert cached(harness) == 84


def test_no_snapshot_is_taken_of_a_state_that_is_ahead(model: Model) -> None:
    """As where an answer ends while two pipeline stages compute its next tokens."""
    harness = Harness(model)
    harness.add("it", prompt(75), TEN)
    harness.turn(4)
    (sequence,) = harness.loop.scheduler.queues.running
    states = harness.loop.scheduler.kv_manager._states
    assert states is not None
    assert sequence.num_computed > 64
    assert states.snapshot(sequence, 48) is None, "a page ends there, but the state is further"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("qwen3_5_text-v4", marks=pytest.mark.slow),
        pytest.param("nemotron_h-v4", marks=pytest.mark.slow),
        "lfm2-v4",
    ],
)
def test_conversations_in_turn_reuse_what_they_share(case: str) -> None:
    """8 of three turns, their last messages edited then: counted in prompt tokens."""
    harness = Harness(tiny_model(case, quantized=True), num_pages=2000, max_batch=4)
    talks = [prompt(200) + prompt(60, seed=100 + i) for i in range(8)]
    asked = reused = 0
    for turn in range(4):
        for i, ids in enumerate(talks):
            harness.add(f"{turn}.{i}", ids, TEN)
        outcomes = harness.drain()
        asked += sum(map(len, talks))
        reused += sum(outcomes[f"{turn}.{i}"].cached_tokens for i in range(8))
        for i, ids in enumerate(talks):
            kept = ids[:-24] if turn == 2 else [*ids, *outcomes[f"{turn}.{i}"].token_ids]
            talks[i] = [*kept, *prompt(24, seed=1000 * turn + i)]
    assert reused >= 0.85 * asked


def test_a_snapshot_is_taken_where_prompts_turn_out_to_part(model: Model) -> None:
    harness, system = Harness(model), prompt(100)
    prompts = [[*system[:70], *prompt(40, seed=seed)] for seed in (1, 2, 3)]
    reused = []
    for ids in prompts:
        answer(harness, ids)
        reused.append(cached(harness))
    assert reused == [0, 0, 64]


def test_a_snapshot_is_taken_at_the_boundaries_of_a_request(model: Model) -> None:
    harness, system = Harness(model), prompt(100)
    harness.run("first", [*system[:50], *prompt(40, seed=1)], TEN, boundaries=(50,))
    answer(harness, [*system[:50], *prompt(40, seed=2)])
    assert cached(harness) == 48


def test_snapshots_are_taken_of_a_prompt_that_is_computed_in_parts_of_a_page(model: Model) -> None:
    harness, ids = Harness(model), prompt(60)
    harness.loop.scheduler.prefill.shares = (  # type: ignore[method-assign]
        lambda prefilling, *_: [(sequence, min(3, sequence.num_left)) for sequence in prefilling]
    )
    for _ in range(2):
        answer(harness, ids)
    assert cached(harness) == 48


def test_prompts_that_wait_for_a_common_beginning_resume_behind_it(model: Model) -> None:
    harness, system = Harness(model), prompt(100)
    prompts = [[*system[:60], *prompt(30, seed=seed)] for seed in (1, 2, 3)]
    for i, ids in enumerate(prompts):
        harness.add(str(i), ids, TEN)
    outcomes = harness.check()
    assert [outcomes[str(i)].cached_tokens for i in range(3)] == [0, 48, 48]


def test_long_prompts_leave_a_snapshot(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "ROLLING_TOKENS", 32)
    harness = Harness(model, prefill_chunk=64)
    harness.add("gone", prompt(200), TEN)
    while harness.loop.scheduler.queues.find("gone").num_computed < 110:  # type: ignore[union-attr]
        harness.turn()
    prefix = harness.loop.scheduler.kv_manager.prefix
    assert len(states_of(prefix)) <= 2, "each takes the place of the one before"
    harness.drain()
    answer(harness, prompt(200)[:150])


def test_a_preempted_sequence_goes_on_from_its_own_snapshot(model: Model) -> None:
    harness, ids = Harness(model), prompt(45)
    harness.add("a", ids, SamplingParams(max_tokens=20))
    harness.add("b", prompt(30, seed=2), SamplingParams(max_tokens=20))
    harness.turn(6)
    queues, computed = harness.loop.scheduler.queues, harness.loop.scheduler.counters
    for sequence in reversed(queues.running[:]):
        queues.preempt(sequence)
    before = computed.tokens_computed
    harness.turn(2)
    assert computed.tokens_computed - before < 8, "little is computed again"
    harness.check("a")


def test_evicted_snapshots_come_back_from_the_disk(model: Model, tmp_path: Path) -> None:
    harness = Harness(model, disk=disk_at(tmp_path))
    group = harness.loop.cache.state_group
    group.max_snapshots = 2
    prompts = [prompt(60, seed=seed) for seed in range(4)]
    for ids in prompts:
        answer(harness, ids)
    assert group.num_held <= 2
    harness.loop.store.disk.flush()  # type: ignore[union-attr]
    answer(harness, prompts[0])
    assert cached(harness) == 48


def test_a_failed_step_loses_no_other_request(model: Model) -> None:
    harness, ids = Harness(model), prompt(45)
    harness.add("a", ids, TEN)
    harness.turn(3)
    harness.loop._fail_step(harness.loop._in_flight[0].batch, RuntimeError("broken"))
    assert harness.outcomes["a"].error is not None
    answer(harness, ids)


def test_memory_of_states_is_bounded(model: Model) -> None:
    harness = Harness(model)
    for seed in range(6):
        answer(harness, prompt(40, seed=seed))
    group = harness.loop.cache.state_group
    stats = harness.loop.stats()
    assert 0 < stats["snapshots"] == group.num_held <= stats["max_snapshots"]
    assert stats["state_bytes"] == group.num_bytes
    held = group.bytes_allocated
    assert held <= (group.num_held + harness.loop.cache.max_batch) * group.num_bytes
    prefix = harness.loop.scheduler.kv_manager.prefix
    prefix.evict(len(prefix.groups), group.num_held)
    assert group.num_held == 0
