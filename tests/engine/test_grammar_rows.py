"""Constrained rows share steps with all others, and each request gets the tokens of the plain run.

MLXINFER_PROGRAMS=1000 HYPOTHESIS_SEED=7 pytest tests/engine/test_grammar_rows.py -s
"""

import os
from dataclasses import dataclass, replace

import hypothesis
import numpy as np
import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import PAGE, Harness, Outcome, alone, prompt, tiny_model
from engine.oracle import Oracle
from engine.test_same_tokens import CASES, HYBRIDS, model_of, params_strategy, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.errors import GrammarFailedError

NUM_PROGRAMS = int(os.environ.get("MLXINFER_PROGRAMS", "4"))
SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
CASE = "qwen3-v4"


@dataclass(frozen=True)
class Rules:
    """How to make a fresh grammar."""

    seed: int
    accepting_every: int
    length: int | None

    def start(self) -> FakeGrammar:
        return FakeGrammar(self.seed, accepting_every=self.accepting_every, length=self.length)


@dataclass(frozen=True)
class Asked:
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    rules: Rules | None
    cancel_after: int | None


@st.composite
def programs(draw: st.DrawFn) -> list[Asked]:
    turn, out = 0, []
    rules = st.builds(
        Rules, st.integers(0, 3), st.sampled_from([0, 1, 3]), st.none() | st.integers(1, 30)
    )
    for _ in range(draw(st.integers(1, 6))):
        turn += draw(st.sampled_from([0, 0, 0, 1, 2, 7]))
        params = draw(params_strategy())
        asked = Asked(
            turn,
            draw(prompts()),
            replace(params, min_tokens=min(draw(st.sampled_from([0, 0, 4])), params.max_tokens)),
            frozenset(draw(st.sets(st.integers(0, 95), max_size=3))),
            draw(st.none() | rules),
            draw(st.sampled_from([None, None, None, None, 0, 1, 5, 12])),
        )
        out.append(asked)
    return out


def play(
    harness: Harness, program: list[Asked], preempt_every: int | None
) -> dict[int, FakeGrammar]:
    """Arrivals, cancels and forced preemption at their turns, then until the end."""
    grammars = {i: asked.rules.start() for i, asked in enumerate(program) if asked.rules}
    last, turn = max(a.turn + (a.cancel_after or 0) for a in program), 0
    while turn <= last or not harness.loop.idle:
        for i, asked in enumerate(program):
            if asked.turn == turn:
                harness.add(
                    str(i),
                    list(asked.prompt_ids),
                    asked.params,
                    stop_ids=asked.stop_ids,
                    grammar=grammars.get(i),
                )
            if asked.cancel_after is not None and asked.turn + asked.cancel_after == turn:
                harness.loop.abort(str(i))
        running = harness.loop.scheduler.queues.running
        if preempt_every and running and turn < 90 and turn % preempt_every == 0:
            harness.loop.scheduler.queues.preempt(running[turn % len(running)])
        harness.turn()
        turn += 1
        assert turn < 3000, "the queue did not drain"
    harness.drain()
    return grammars


@given(
    case=st.sampled_from([*CASES, *HYBRIDS]),
    program=programs(),
    spare_pages=st.sampled_from([0, 0, 1, 4, 100]),
    chunk=st.sampled_from([16, 64, 128]),
    max_batch=st.integers(1, 6),
    launch_ahead=st.booleans(),
    reuse=st.booleans(),
    preempt_every=st.sampled_from([None, None, 3, 7]),
    guess_seed=st.none() | st.integers(0, 2**20),
)
@settings(max_examples=NUM_PROGRAMS)
@hypothesis.seed(SEED)
def test_a_batched_program_gives_each_request_the_tokens_of_its_plain_run(
    case: str,
    program: list[Asked],
    spare_pages: int,
    chunk: int,
    max_batch: int,
    launch_ahead: bool,
    reuse: bool,
    preempt_every: int | None,
    guess_seed: int | None,
) -> None:
    model = model_of(case)
    longest = max(len(a.prompt_ids) + (a.params.max_tokens or 0) for a in program)
    plains = {str(i): plain_run(case, asked) for i, asked in enumerate(program)}
    answers = {name: plain.token_ids for name, plain in plains.items()}
    harness = Harness(
        model,
        num_pages=-(-longest // PAGE) + spare_pages,
        prefill_chunk=chunk,
        max_batch=max_batch,
        launch_ahead=launch_ahead,
        prefix_cache=reuse,
        proposer=None if guess_seed is None else Oracle(answers, guess_seed),
    )
    grammars = play(harness, program, preempt_every)
    for i, asked in enumerate(program):
        outcome, plain = harness.outcomes[str(i)], plains[str(i)]
        if i in grammars:
            assert grammars[i].taken == text_of(outcome, asked.stop_ids)
        if outcome.reason is FinishReason.ABORT:
            assert outcome.token_ids == plain.token_ids[: len(outcome.token_ids)]
            continue
        assert outcome.token_ids == plain.token_ids
        assert outcome.reason is plain.reason
        assert type(outcome.error) is type(plain.error)
        if asked.params.logprobs is not None:
            assert len(outcome.logprobs) == len(outcome.token_ids)


def plain_run(case: str, asked: Asked) -> Outcome:
    harness = Harness(model_of(case), launch_ahead=False, max_batch=1, num_pages=100)
    grammar = asked.rules.start() if asked.rules else None
    harness.add("x", list(asked.prompt_ids), asked.params, stop_ids=asked.stop_ids, grammar=grammar)
    return harness.drain()["x"]


def text_of(outcome: Outcome, stop_ids: frozenset[int]) -> list[int]:
    """The tokens without the end token, if one ended it."""
    ids = outcome.token_ids
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


# -- one thing at a time --------------------------------------------------------------------------


def run_one(
    grammar: FakeGrammar, *, stop_ids: frozenset[int] = frozenset(), **params: object
) -> Outcome:
    harness = Harness(tiny_model(CASE))
    asked = SamplingParams(**{"max_tokens": 30, **params})  # type: ignore[arg-type]
    harness.add("a", prompt(20), asked, stop_ids=stop_ids, grammar=grammar)
    return harness.drain()["a"]


def test_a_finished_grammar_ends_the_answer_without_an_end_token() -> None:
    outcome = run_one(FakeGrammar(length=7))  # as with ignore_eos: nothing else would end it
    assert (len(outcome.token_ids), outcome.reason) == (7, FinishReason.STOP)


def test_a_grammar_that_finishes_with_the_last_token_is_whole() -> None:
    assert run_one(FakeGrammar(length=7), max_tokens=7).reason is FinishReason.STOP
    assert run_one(FakeGrammar(length=8), max_tokens=7).reason is FinishReason.LENGTH


def test_a_finished_grammar_wins_over_min_tokens() -> None:
    outcome = run_one(FakeGrammar(length=7), stop_ids=frozenset([1]), min_tokens=20)
    assert (len(outcome.token_ids), outcome.reason) == (7, FinishReason.STOP)


@pytest.mark.parametrize("bias", [0.0, 1e6])
def test_end_tokens_are_allowed_where_the_grammar_is_satisfied(bias: float) -> None:
    class Ends(FakeGrammar):
        def allowed(self, vocab: int = 96) -> list[int]:
            return [token for token in super().allowed(vocab) if token != 1]

    grammar = Ends(accepting_every=5)
    outcome = run_one(grammar, stop_ids=frozenset([1]), logit_bias={1: bias}, min_tokens=1)
    if bias:
        assert (len(outcome.token_ids), outcome.token_ids[-1]) == (6, 1)
        assert (outcome.reason, len(grammar.taken)) == (FinishReason.STOP, 5)
    else:
        assert 1 not in outcome.token_ids[:5]


def test_a_bias_does_not_lift_what_the_grammar_forbids() -> None:
    outcome = run_one(FakeGrammar(), logit_bias=dict.fromkeys(range(0, 96, 2), 1e6))
    assert outcome.error is None  # the grammar asserts that it allowed each token
    assert len(outcome.token_ids) == 30


@pytest.mark.parametrize(
    ("grammar", "stop_ids", "words"),
    [
        (FakeGrammar(stuck_at=4), frozenset(), "no token"),
        (FakeGrammar(trouble_at=4), frozenset(), "it is too hard"),
        (FakeGrammar(), frozenset(range(96)), "min_tokens is 20"),
    ],
)
def test_a_dead_end_fails_its_request_only(
    grammar: FakeGrammar, stop_ids: frozenset[int], words: str
) -> None:
    harness = Harness(tiny_model(CASE, quantized=True), max_batch=4)
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, min_tokens=20)
    harness.add("before", prompt(30), params, grammar=FakeGrammar(1))
    harness.add("stuck", prompt(20), params, stop_ids=stop_ids, grammar=grammar)
    harness.add("after", prompt(25), params)
    outcomes = harness.drain()
    error = outcomes["stuck"].error
    assert isinstance(error, GrammarFailedError)
    assert words in str(error)
    assert (error.status, error.param) == (400, "fake")
    assert len(outcomes["stuck"].token_ids) == len(grammar.taken)
    model = tiny_model(CASE, quantized=True)
    assert outcomes["after"].token_ids == alone(model, prompt(25), params).token_ids
    same = alone(model, prompt(30), params, grammar=FakeGrammar(1))
    assert outcomes["before"].token_ids == same.token_ids


def test_a_grammar_that_raises_fails_its_step_only() -> None:
    class Broken(FakeGrammar):
        @staticmethod
        def fill_masks(grammars: object, rows: object, masks: np.ndarray) -> None:
            raise ValueError("broken")

    harness = Harness(tiny_model(CASE, quantized=True), max_batch=2)
    params = SamplingParams(max_tokens=9)
    harness.add("bad", prompt(20), params, grammar=Broken())
    harness.turn(3)
    harness.add("good", prompt(25), params, grammar=FakeGrammar(2))
    outcomes = harness.drain()
    assert outcomes["bad"].reason is FinishReason.ERROR
    plain = alone(tiny_model(CASE, quantized=True), prompt(25), params, grammar=FakeGrammar(2))
    assert outcomes["good"].token_ids == plain.token_ids


def test_constrained_rows_do_not_delay_the_others() -> None:
    """The forward pass is launched before the grammar has its token; the answers come as fast."""
    harness = Harness(tiny_model(CASE), max_batch=4)
    harness.add("free", prompt(20), SamplingParams(max_tokens=12))
    harness.add("constrained", prompt(20, 1), SamplingParams(max_tokens=12), grammar=FakeGrammar())
    said: list[str] = []
    watch(said, harness.loop.runner, "launch")
    watch(said, harness.loop.runner, "sample_constrained")
    watch(said, harness.loop.scheduler, "commit")
    outcomes = harness.drain()
    assert max(outcomes["constrained"].turns) <= max(outcomes["free"].turns) + 1
    assert "launch commit sample_constrained " * 10 in " ".join(said), (
        "one call for constrained rows, a step ahead"
    )


def watch(said: list[str], owner: object, name: str) -> None:
    method = getattr(owner, name)

    def watched(*args: object) -> object:
        said.append(name)
        return method(*args)

    setattr(owner, name, watched)


def test_log_probabilities_are_those_of_the_model() -> None:
    harness = Harness(tiny_model(CASE), max_batch=4)
    params = SamplingParams(max_tokens=5, logprobs=2)
    harness.add("constrained", prompt(20), params, grammar=FakeGrammar())
    harness.add("free", prompt(20), params)
    outcomes = harness.drain()
    constrained, free = (outcomes[name].logprobs for name in ("constrained", "free"))
    assert dict(constrained[0].top) == pytest.approx(dict(free[0].top), abs=1e-4)
    assert constrained[0].logprob <= free[0].logprob
    assert len(constrained) == len(free) == 5


def test_the_seed_that_is_printed_draws_the_programs() -> None:
    print(f"\n{NUM_PROGRAMS} random programs with grammars, HYPOTHESIS_SEED={SEED}")
    assert (
        vars(test_a_batched_program_gives_each_request_the_tokens_of_its_plain_run)[
            "_hypothesis_internal_use_seed"
        ]
        == SEED
    )
