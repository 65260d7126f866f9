"""A failure belongs to the request that caused it; the others get the same tokens as ever."""

import gc
import os
import weakref
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, alone, prompt, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny import tiny_checkpoint

from mlxinfer.cache.inputs import Ints
from mlxinfer.cache.paged import PagedLayer
from mlxinfer.config import KVOptions
from mlxinfer.core import FinishReason, Request, SamplingParams
from mlxinfer.engine.runner import Launched, Runner
from mlxinfer.errors import (
    ContextLengthError,
    InsufficientMemoryError,
    InvalidRequestError,
    RequestFailedError,
)
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

CASE = "qwen3-v4"


class Boom(RuntimeError):
    pass


def break_launch(harness: Harness, at: int, *, read: bool = False) -> set[str]:
    """The launch number `at` raises after half of its work, as a failing forward pass would.

    Args:
        read: its tokens cannot be read instead, as where an evaluation fails.

    Returns:
        To be filled: the requests in it, unless it raises on a step that cannot be read.
    """
    launch, count, lost = harness.loop.runner.launch, 0, set()

    def failing(batch, previous):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        launched = launch(batch, previous)
        if count != at:
            return launched
        if read or not isinstance(previous, Unreadable):
            lost.update(s.request.id for s in batch.sequences)
        if not read:
            raise Boom("the forward pass failed")
        return Unreadable(**{one.name: getattr(launched, one.name) for one in fields(launched)})

    harness.loop.runner.launch = failing  # type: ignore[method-assign]
    return lost


class Unreadable(Launched):
    """A step that cannot be read, though the next one can take its tokens."""

    def token_ids(self) -> Ints:
        raise Boom("evaluation failed")


def test_an_error_that_is_kept_keeps_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log or a notebook may hold the error for good; its traceback must not hold the cache."""
    harness = Harness(tiny_model(CASE, quantized=True))

    def failing(runner: Runner, *_: object) -> None:
        raise Boom(f"the forward pass of {runner} failed")

    monkeypatch.setattr(Runner, "_sampled", failing)
    kept = harness.run("a", prompt(5), SamplingParams(max_tokens=9)).error
    assert isinstance(kept.__cause__, Boom)
    assert kept.__cause__.__traceback__ is not None, "the traceback still has the line"
    cache = weakref.ref(harness.loop.cache)
    harness.loop.close()
    gc.collect()
    assert cache() is None


DRAWN = SamplingParams(
    max_tokens=12, temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.5
)


@cache
def plain_answer(length: int) -> list[int]:
    """Tokens of a request alone, with `DRAWN`."""
    return alone(tiny_model(CASE, quantized=True), prompt(length), DRAWN).token_ids


@given(
    at=st.integers(1, 25),
    reading=st.booleans(),
    launch_ahead=st.booleans(),
    late=st.integers(0, 12),
)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "6")))
def test_failed_steps_fail_their_own(at: int, reading: bool, launch_ahead: bool, late: int) -> None:
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model, launch_ahead=launch_ahead, max_batch=2)
    break_launch(harness, at, read=reading)
    for i in range(4):
        harness.add(str(i), prompt(20 + 9 * i), DRAWN)
        harness.turn(late if i == 2 else 0)
    outcomes = harness.drain()
    failed = [o for o in outcomes.values() if o.reason is FinishReason.ERROR]
    assert len(failed) in ({1, 2, 3} if reading and launch_ahead else {0, 1, 2})
    for outcome in failed:
        assert isinstance(outcome.error, RequestFailedError)
        assert isinstance(outcome.error.__cause__, Boom)
        assert "Boom" in str(outcome.error)
    for i, outcome in enumerate(outcomes.values()):
        plain = plain_answer(20 + 9 * i)
        if outcome in failed:
            assert outcome.token_ids == plain[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == plain
    assert harness.run("after", prompt(30), DRAWN).token_ids == plain_answer(30)


def test_a_scheduler_fault_fails_all_requests_and_the_loop_starts_afresh() -> None:
    harness = Harness(tiny_model(CASE))
    harness.add("a", prompt(20), SamplingParams(max_tokens=12))
    harness.turn(3)
    before = harness.loop.scheduler.counters.tokens_computed
    harness.loop.fail_all(AssertionError("wrong counts"))
    assert harness.loop.scheduler.counters.tokens_computed == before > 0, "counters only grow"
    assert harness.outcomes["a"].reason is FinishReason.ERROR
    assert len(harness.run("b", prompt(20), SamplingParams(max_tokens=3)).token_ids) == 3


def refuse(harness: Harness, ids: list[int], **params: object) -> pytest.ExceptionInfo:
    with pytest.raises(InvalidRequestError) as caught:
        harness.loop.limits.check(Request("x", ids, SamplingParams(**params)))  # type: ignore[arg-type]
    return caught


def test_requests_that_can_never_run_are_refused_at_once() -> None:
    harness = Harness(tiny_model(CASE), num_pages=4, max_context=100)
    assert "empty" in str(refuse(harness, []).value)
    assert "from 0 to 95" in str(refuse(harness, [5, 96]).value)
    assert "-1" in str(refuse(harness, [-1]).value)
    assert "True" in str(refuse(harness, [True]).value)
    assert "top_k is 97" in str(refuse(harness, [1], top_k=97).value)
    assert len(str(refuse(harness, [1], top_k=10**400).value)) < 200
    assert "logit_bias" in str(refuse(harness, [1], logit_bias={96: 1.0}).value)
    assert "stop_token_ids" in str(refuse(harness, [1], stop_token_ids=(200,)).value)
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds 96"):
        harness.loop.limits.check(Request("x", [1], SamplingParams(), frozenset({96})))
    long = refuse(harness, prompt(100))
    assert long.type is ContextLengthError
    assert "100 tokens" in str(long.value)
    large = refuse(harness, prompt(64))
    assert large.type is InsufficientMemoryError
    assert "raise max_memory" in str(large.value)


def test_an_answer_ends_where_context_or_pool_ends() -> None:
    model = tiny_model(CASE)
    for changes, total in (({"max_context": 40}, 40), ({"num_pages": 3}, 48)):
        harness = Harness(model, **changes)
        outcome = harness.run("a", prompt(20), SamplingParams(max_tokens=None))
        assert len(outcome.token_ids) == total - 20
        assert outcome.reason is FinishReason.LENGTH


def test_a_pool_smaller_than_a_window_bounds_the_answer() -> None:
    model = tiny_model("mistral-v4", quantized=True)  # nothing but windows of 8
    harness = Harness(model, num_pages=2, max_batch=1, page_size=4, prefill_chunk=4)
    outcome = harness.run("a", prompt(5), SamplingParams(max_tokens=60))
    assert outcome.error is None
    assert (len(outcome.token_ids), outcome.reason) == (3, FinishReason.LENGTH)


def test_tokens_that_a_preempted_request_left_itself_are_not_counted_as_cached() -> None:
    harness = Harness(tiny_model(CASE), num_pages=8, max_batch=2)
    for name, seed in (("a", 1), ("b", 2)):
        harness.add(name, prompt(40, seed), SamplingParams(max_tokens=30))
    outcomes = harness.drain()
    assert harness.loop.scheduler.counters.preemptions > 0
    assert [o.cached_tokens for o in outcomes.values()] == [0, 0]


def spoil(harness: Harness, token_id: int) -> None:
    """From now on a sequence that reads this token gets NaN, as where a weight is damaged."""
    forward = harness.loop.model

    class Spoilt:
        def __getattr__(self, name: str) -> object:
            return getattr(forward, name)

        def __call__(self, ids, step):  # type: ignore[no-untyped-def]
            hidden = forward(ids, step)
            return mx.where(
                step.read(ids)[:, None] == token_id, mx.array(float("nan"), hidden.dtype), hidden
            )

    harness.loop.runner.forward.model = Spoilt()  # type: ignore[assignment]


@given(
    bad=st.sets(st.integers(0, 3), min_size=1),
    launch_ahead=st.booleans(),
    constrained=st.booleans(),
    length=st.sampled_from([3, 20, 90]),
)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "6")))
def test_logits_that_are_no_numbers_end_their_own_request_only(
    bad: set[int], launch_ahead: bool, constrained: bool, length: int
) -> None:
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model, launch_ahead=launch_ahead, max_batch=3)
    spoil(harness, token_id=1)
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=5, logprobs=2, logit_bias={1: -1e9})
    prompts = {str(i): prompt(length + i) + ([1] if i in bad else [2]) for i in range(4)}
    for name, ids in prompts.items():
        harness.add(
            name, ids, params, grammar=FakeGrammar() if constrained and name == "2" else None
        )
    outcomes = harness.drain()
    for i, name in enumerate(prompts):
        if i not in bad:
            harness.check(name)
            continue
        assert isinstance(outcomes[name].error, RequestFailedError)
        assert "NaN" in str(outcomes[name].error)
        assert outcomes[name].token_ids == []


def with_a_damaged_token(token_id: int) -> Model:
    """Reading it gives no numbers from then on."""
    model = load(tiny_checkpoint(Path(mkdtemp()), "llama-v4"))
    weight = model.embed_tokens.weight
    weight[token_id] = mx.full((weight.shape[1],), float("nan"))
    return model


def without(token_id: int, ids: list[int]) -> list[int]:
    return [other if other != token_id else token_id + 1 for other in ids]


@pytest.mark.alike
@pytest.mark.parametrize("launch_ahead", [False, True])
def test_where_numbers_end_within_an_answer_its_next_token_shows_it(launch_ahead: bool) -> None:
    model = with_a_damaged_token(7)
    harness = Harness(model, launch_ahead=launch_ahead)
    params = SamplingParams(max_tokens=80, logit_bias={7: -1e9}, ignore_eos=True)
    prompts = {name: without(7, prompt(20, seed=ord(name))) for name in "ab"}
    for name, ids in prompts.items():
        harness.add(name, ids, params)
    sample = harness.loop.runner.sampler.sample

    def spoiling(logits, slots, counts, *rest, **others):  # type: ignore[no-untyped-def]
        sampled = sample(logits, slots, counts, *rest, **others)
        bad = (counts == 30) & (np.array(slots) == 0)
        return replace(sampled, tokens=mx.where(mx.array(bad), 7, sampled.tokens))

    harness.loop.runner.sampler.sample = spoiling  # type: ignore[method-assign]
    outcomes = harness.check("b")
    assert isinstance(outcomes["a"].error, RequestFailedError)
    assert "NaN" in str(outcomes["a"].error)
    assert len(outcomes["a"].token_ids) == 31


def test_nan_in_a_reused_tail_reaches_no_later_owner() -> None:
    """NaN times 0 is NaN: masked entries must be finite, whatever the last owner left."""
    model = with_a_damaged_token(7)
    fine = without(7, prompt(5))
    params = SamplingParams(max_tokens=12, logit_bias={7: -1e9})
    expected = alone(model, fine, params).token_ids
    for bits in (None, 8):
        harness = Harness(model, kv=KVOptions(bits=(bits, bits)))
        expected = harness.run("clean", fine, params).token_ids
        assert isinstance(harness.run("bad", [7] * 20, params).error, RequestFailedError)
        for name in ("next", "after"):
            assert harness.run(name, fine, params).token_ids == expected


@pytest.mark.alike
@pytest.mark.parametrize(
    ("at", "late", "also_launch"),
    [  # every second one, the others in the slow run
        pytest.param(at, late, also, marks=pytest.mark.slow if (at + late + also) % 2 else ())
        for at, late, also in product(range(1, 7), range(4), (False, True))
    ],
)
def test_sequences_outside_a_failed_step_start_over(at: int, late: int, also_launch: bool) -> None:
    """Also those in the step after it, which ran on what it left, or failed itself."""
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model)
    unread = break_launch(harness, at, read=True)
    unlaunched = break_launch(harness, at + 1) if also_launch else set()
    tell = harness.loop._fail_step

    def noting(batch, error):  # type: ignore[no-untyped-def]
        failed = {s.request.id for s in batch.sequences}
        running = [s.request.id for s in harness.loop.scheduler.queues.running]
        waiting = [s.request.id for s in harness.loop.scheduler.queues.waiting]
        tell(batch, error)
        left = [name for name in running + waiting if name not in failed]
        assert [s.request.id for s in harness.loop.scheduler.queues.waiting] == left, (
            "in order of arrival"
        )

    harness.loop._fail_step = noting  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=3)
    harness.add("early", prompt(9), params)
    harness.turn(late)
    for name in ("b", "c", "d"):
        harness.add(name, prompt(12, seed=ord(name)), params)
    outcomes = harness.drain(200)
    for name, outcome in outcomes.items():
        ids = prompt(9) if name == "early" else prompt(12, seed=ord(name))
        plain = alone(model, ids, params).token_ids
        failed = outcome.reason is FinishReason.ERROR
        assert outcome.token_ids == plain[: len(outcome.token_ids)]
        assert failed or outcome.token_ids == plain
        assert not failed or name in unread | unlaunched


@pytest.mark.ci
def test_slots_that_have_no_tail_yet_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX checks no index: what lies beyond an array is other memory."""
    clear, cleared = PagedLayer.clear_tails, []

    def checked(pool: PagedLayer, slots: list[int]) -> None:
        cleared.append(slots)
        assert max(slots) < pool.num_slots
        clear(pool, slots)

    monkeypatch.setattr(PagedLayer, "clear_tails", checked)
    model = tiny_model(CASE, quantized=True)
    params = SamplingParams(max_tokens=8)
    harness = Harness(model, max_batch=64, prefill_chunk=256)
    for burst in range(2):  # the first is gone before most of it was given a share of a step
        for i in range(16):
            harness.add(f"{burst} {i}", prompt(150, seed=i + 100 * burst), params)
        harness.turn()
        for i in range(16 if burst == 0 else 0):
            harness.loop.abort(f"{burst} {i}")
    harness.check(*[f"1 {i}" for i in range(16)])
    harness.loop.scheduler.kv_manager.forget()  # as after a fault: few tails again, all slots used
    harness.loop.cache.reset()
    for i in range(16):
        harness.add(f"2 {i}", prompt(150, seed=i + 100), params)
    harness.check(*[f"2 {i}" for i in range(16)])
    assert cleared


def test_tokens_that_do_not_fit_the_step_are_a_fault_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was noted of the step does not stand in the way of starting afresh."""
    harness = Harness(tiny_model(CASE, quantized=True), max_batch=4)
    params = SamplingParams(max_tokens=60)
    for name in "ab":
        harness.add(name, prompt(20, ord(name)), params)
    harness.turn(8)
    sound = Launched.token_ids
    with monkeypatch.context() as patch:
        patch.setattr(Launched, "token_ids", lambda launched: sound(launched)[:-1])
        with pytest.raises(AssertionError) as caught:
            harness.turn()
    harness.loop.fail_all(caught.value)
    assert {o.reason for o in harness.drain().values()} == {FinishReason.ERROR}
    harness.add("after", prompt(20, 1), params)
    harness.check("after")
