"""Constrained rows share steps with all others; at random they do in `test_matrix`."""

from typing import Any

import numpy as np
import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, Outcome, prompt, tiny_model

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.errors import GrammarFailedError

CASE = "qwen3-v4"


def run_one(
    grammar: FakeGrammar, *, stop_ids: frozenset[int] = frozenset(), **params: object
) -> Outcome:
    harness = Harness(tiny_model(CASE))
    asked = SamplingParams(**{"max_tokens": 30, **params})  # type: ignore[arg-type]
    return harness.run("a", prompt(20), asked, stop_ids=stop_ids, grammar=grammar)


@pytest.mark.parametrize(
    ("length", "how", "reason"),
    [
        (7, {}, FinishReason.STOP),  # without an end token, as with ignore_eos
        (7, {"max_tokens": 7}, FinishReason.STOP),  # whole with its last token
        (8, {"max_tokens": 7}, FinishReason.LENGTH),
        (7, {"stop_ids": frozenset([1]), "min_tokens": 20}, FinishReason.STOP),
    ],
)
def test_a_finished_grammar_ends(length: int, how: dict[str, Any], reason: FinishReason) -> None:
    outcome = run_one(FakeGrammar(length=length), **how)
    assert (len(outcome.token_ids), outcome.reason) == (7, reason)


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


@pytest.mark.alike
@pytest.mark.parametrize(
    ("grammar", "stop_ids", "words"),
    [
        (FakeGrammar(stuck_at=4), frozenset(), "no token"),
        (FakeGrammar(trouble_at=4), frozenset(), "it is too hard"),
        (FakeGrammar(), frozenset(range(96)), "min_tokens is 20"),
    ],
)
def test_a_dead_end_fails_one(grammar: FakeGrammar, stop_ids: frozenset[int], words: str) -> None:
    harness = Harness(tiny_model(CASE, quantized=True), max_batch=4)
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, min_tokens=20)
    harness.add("before", prompt(30), params, grammar=FakeGrammar(1))
    harness.add("stuck", prompt(20), params, stop_ids=stop_ids, grammar=grammar)
    harness.add("after", prompt(25), params)
    outcomes = harness.check("before", "after")
    error = outcomes["stuck"].error
    assert isinstance(error, GrammarFailedError)
    assert words in str(error)
    assert (error.status, error.param) == (400, "fake")
    assert len(outcomes["stuck"].token_ids) == len(grammar.taken)


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
    assert harness.check("good")["bad"].reason is FinishReason.ERROR


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
