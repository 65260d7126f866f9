"""Steps that verify proposals give the tokens of the plain run, whatever is proposed."""

import json
import os
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache

import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, Outcome, alone, prompt, tiny_model
from engine.oracle import Oracle
from engine.test_faults import break_launch
from grammar.grammar_tools import compiler_of, tokenizer_of
from grammar.schemas import draw_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer import hub
from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.errors import GrammarFailedError
from mlxinfer.grammar.spec import response_format
from mlxinfer.models import load

CASE = "qwen3-v4"
DRAWN = SamplingParams(
    max_tokens=40, temperature=0.9, seed=11, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.4, xtc_probability=0.5, xtc_threshold=0.02, dry_multiplier=0.8,
    dry_allowed_length=1, typical_p=0.95, logprobs=2,
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=120)


@dataclass
class Script(Proposer):
    """Proposes the next tokens of given answers, and rests in some steps."""

    answers: dict[str, list[int]]
    every: int = 1  # steps from one proposal to the next
    steps: int = 0

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        self.steps += 1
        return 7 if self.steps % self.every == 0 else 0

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        return [
            Proposal(self.answers[s.request.id][s.num_answered : s.num_answered + depth])
            for s in sequences
        ]


def plain_run(params: SamplingParams, **how: object) -> Outcome:
    return alone(tiny_model(CASE, quantized=True), prompt(20), params, **how)  # type: ignore[arg-type]


def verified(answer: list[int], params: SamplingParams, **how: object) -> tuple[Outcome, Harness]:
    proposer = Script({"a": answer})
    harness = Harness(tiny_model(CASE, quantized=True), proposer=proposer)
    harness.add("a", prompt(20), params, **how)  # type: ignore[arg-type]
    return harness.drain()["a"], harness


def test_right_proposals_give_eight_tokens_a_step() -> None:
    plain = plain_run(DRAWN)
    outcome, harness = verified(plain.token_ids, DRAWN)
    assert outcome.token_ids == plain.token_ids
    assert [p.logprob for p in outcome.logprobs] == pytest.approx(
        [p.logprob for p in plain.logprobs], abs=1e-3
    )
    counters = harness.loop.scheduler.counters
    assert counters.steps == 1 + 5  # the prompt, and 39 tokens
    assert counters.tokens_accepted == counters.tokens_proposed == 34
    assert counters.tokens_sampled == 40


def test_steps_without_proposals_launch_ahead() -> None:
    plain = plain_run(DRAWN)
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model, proposer=Script({"a": plain.token_ids}, every=10**6))
    harness.add("a", prompt(20), DRAWN)
    harness.turn(4)
    assert harness.loop.scheduler.queues.running[0].num_pending == 1
    assert harness.drain()["a"].token_ids == plain.token_ids


def test_proposals_take_no_pages_from_other_requests() -> None:
    params = SamplingParams(max_tokens=28)
    model = tiny_model(CASE, quantized=True)
    plains = {name: alone(model, prompt(20, ord(name)), params) for name in "ab"}
    answers = {name: plain.token_ids for name, plain in plains.items()}
    harness = Harness(model, num_pages=6, max_batch=2, proposer=Script(answers))
    for name in "ab":
        harness.add(name, prompt(20, ord(name)), params)
    outcomes = harness.drain()
    assert harness.loop.scheduler.counters.preemptions == 0
    assert {name: o.token_ids for name, o in outcomes.items()} == answers


def test_what_a_grammar_forbids_is_not_even_verified() -> None:
    plain = plain_run(DRAWN, grammar=FakeGrammar(4))
    grammar = FakeGrammar(4)
    answer = list(plain.token_ids)
    for token_id in answer[:5]:
        grammar.accept(token_id)
    answer[5] = next(token for token in range(96) if token not in grammar.allowed())
    outcome, harness = verified(answer, DRAWN, grammar=FakeGrammar(4))
    assert outcome.token_ids == plain.token_ids
    counters = harness.loop.scheduler.counters
    assert counters.tokens_proposed == counters.tokens_accepted == 4 + (40 - 6 - 5)


@pytest.mark.alike
@pytest.mark.parametrize("at", [3, 9, 10])
def test_a_dead_end_after_accepted_proposals_is_reported_where_the_plain_run_does(at: int) -> None:
    """The grammar allows nothing after some tokens, and a step looks beyond them before that."""
    harness = Harness(tiny_model(CASE, quantized=True))
    plain = harness.run("plain", prompt(20), DRAWN, grammar=FakeGrammar(4, stuck_at=at))
    free = plain_run(DRAWN, grammar=FakeGrammar(4)).token_ids
    outcome, _ = verified(free, DRAWN, grammar=FakeGrammar(4, stuck_at=at))
    assert outcome.token_ids == plain.token_ids == free[:at]
    assert isinstance(outcome.error, GrammarFailedError)
    assert str(outcome.error) == str(plain.error)


@cache
def plain_answers() -> dict[str, list[int]]:
    """Tokens of four requests, each alone and without proposals."""
    model, params = tiny_model(CASE, quantized=True), replace(DRAWN, max_tokens=20)
    return {str(i): alone(model, prompt(20 + 9 * i), params).token_ids for i in range(4)}


@given(
    at=st.integers(1, 12), reading=st.booleans(), late=st.integers(0, 6), seed=st.integers(0, 99)
)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "6")))
def test_failed_verification_fails_its_own(at: int, reading: bool, late: int, seed: int) -> None:
    model = tiny_model(CASE, quantized=True)
    params = replace(DRAWN, max_tokens=20)
    plains = plain_answers()
    harness = Harness(model, max_batch=2, proposer=Oracle(plains, seed))
    lost = break_launch(harness, at, read=reading)
    for i in range(4):
        harness.add(str(i), prompt(20 + 9 * i), params)
        harness.turn(late if i == 2 else 0)
    for name, outcome in harness.drain().items():
        failed = outcome.reason is FinishReason.ERROR
        assert outcome.token_ids == plains[name][: len(outcome.token_ids)]
        assert failed or outcome.token_ids == plains[name]
        assert not failed or name in lost


@pytest.fixture(scope="module")
def model():  # type: ignore[no-untyped-def]
    return load(hub.resolve("demo-draft"))


def run(model, schema_seed: int, proposer: Proposer | None) -> tuple[Outcome, Harness]:  # type: ignore[no-untyped-def]
    schema = draw_schema(random.Random(schema_seed))
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    spec = response_format(form)
    assert spec is not None
    tokenizer = tokenizer_of("demo")
    harness = Harness(model, proposer=proposer)
    harness.add(
        "a",
        tokenizer.encode("Give me JSON: "),
        PARAMS,
        stop_ids=frozenset(tokenizer.eos_token_ids),
        grammar=compiler_of("demo").start(spec),
    )
    return harness.drain()["a"], harness


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3))]
)
def test_verified_proposals_give_the_constrained_answer_of_the_plain_run(model, seed: int) -> None:  # type: ignore[no-untyped-def]
    plain, _ = run(model, seed, None)
    vocab = tokenizer_of("demo").vocab_size
    outcome, harness = run(model, seed, Oracle({"a": plain.token_ids}, seed, vocab=vocab))
    assert outcome.token_ids == plain.token_ids
    assert outcome.reason is plain.reason
    assert type(outcome.error) is type(plain.error)
    if plain.error is None and len(plain.token_ids) < 120:
        json.loads(tokenizer_of("demo").decode(outcome.token_ids, skip_special_tokens=True))
    if seed == 2:
        assert harness.loop.scheduler.counters.tokens_accepted > 0
