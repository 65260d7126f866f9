"""Prompt tokens that are computed, counted: they come out the same on every machine."""

import time

import pytest

from tests.bench import prefix
from tests.bench.bench_parts import TINY_VOCAB, check, two_layers, two_layers_windowed
from tests.bench.engines import Ask, OurEngine, greedy, serve
from tests.bench.peer import _without
from tests.bench.prefix import (
    Prompts,
    Scale,
    agents,
    cold_start,
    conversations,
    document,
    edited,
)

PAGE = 16
SCALE = Scale(
    conversations=12, opening=40, message=20, answer=4, system=96, agents=3, steps=3, catalogue=160,
    document=100, questions=3,
)  # fmt: skip


def engine() -> OurEngine:
    return OurEngine(two_layers())


def prompts() -> Prompts:
    return Prompts(TINY_VOCAB)


def test_a_turn_computes_its_message_and_the_last_token_of_the_answer() -> None:
    turns = conversations(engine(), SCALE, prompts(), time.perf_counter)
    count = SCALE.conversations
    assert [turn.computed for turn in turns] == [count * 40, count * 21, count * 21]
    assert [turn.prompt_tokens for turn in turns] == [count * 40, count * 64, count * 88]


@pytest.mark.parametrize("count", [2, 6])
def test_requests_that_arrive_at_once_share_what_they_begin_with(count: int) -> None:
    found = cold_start(engine(), count, SCALE, prompts(), time.perf_counter)
    assert found.prompt_tokens == count * (96 + SCALE.question)
    assert found.computed == 96 + count * SCALE.question


def test_a_fleet_computes_its_catalogue_once() -> None:
    found = agents(engine(), SCALE, prompts(), time.perf_counter)
    own = SCALE.agents * (SCALE.task + (SCALE.steps - 1) * (SCALE.result + 1))
    assert found.computed == 160 + own


def test_a_fleet_holds_its_catalogue_once() -> None:
    ours = engine()
    found = agents(ours, SCALE, prompts(), time.perf_counter)
    (group,) = ours.loop.cache.groups
    per_agent = SCALE.task + SCALE.steps * (SCALE.answer + SCALE.result)
    most = 160 // PAGE + SCALE.agents * (per_agent // PAGE + 2)
    assert found.peak_kv_bytes - ours.tail_bytes <= most * group.page_bytes


@pytest.mark.parametrize("windowed", [False, True])
def test_an_edited_message_and_a_known_document_are_all_that_is_computed(windowed: bool) -> None:
    model = two_layers_windowed() if windowed else two_layers()
    assert edited(OurEngine(model), SCALE, prompts(), time.perf_counter).computed == 20
    found = document(OurEngine(model), SCALE, prompts(), time.perf_counter)
    assert found.computed == 2 * SCALE.message  # of two questions after the first
    assert found.reused_share == pytest.approx(100 / 120)


def test_prompts_and_counts_are_of_what_was_asked() -> None:
    ours = engine()
    asks = [Ask(name, [("user", prompts().message(10)), ("user", [3])], greedy(5)) for name in "ab"]
    served = serve(ours, asks, clock=iter(range(1000)).__next__)
    assert served.prompt_tokens == ours.prompt_tokens == 22
    assert served.num_tokens == 10
    assert served.answers["a"].token_ids == served.answers["b"].token_ids
    assert 0 < served.mean_first_s < served.seconds


def test_segments_without_what_a_cache_had() -> None:
    segments = [("system", [1, 2, 3]), ("user", [4, 5])]
    assert _without(segments, 0) == segments
    assert _without(segments, 2) == [("system", [3]), ("user", [4, 5])]
    assert _without(segments, 3) == [("user", [4, 5])]
    assert _without(segments, 4) == [("user", [5])]


def test_prefix_alone() -> None:
    report = prefix.run(small=True, peer=False)
    check(report)
    for scene in report.data["scenes"]:
        assert set(scene) == {"scene", "mlxinfer"}


@pytest.mark.slow
def test_prefix_beside_mlx_lm() -> None:
    report = prefix.run(small=True)
    check(report)
    found = {s["scene"]: (s["mlxinfer"], s["mlx-lm"]) for s in report.data["scenes"]}
    for ours, theirs in found.values():
        assert ours["prompt_tokens"] == theirs["prompt_tokens"]
    ours, theirs = found["more questions, same document, window 64"]
    assert theirs["computed"] == theirs["prompt_tokens"]
    assert ours["computed"] < 0.15 * ours["prompt_tokens"]
    ours, theirs = found["last message edited"]
    assert ours["computed"] == theirs["computed"]
