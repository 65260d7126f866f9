"""Grammars of llguidance look ahead along proposals, and the answer is that of the plain run."""

import json
import random

import pytest
from engine.harness import Harness, Outcome
from engine.oracle import Oracle
from grammar.grammar_tools import compiler_of, tokenizer_of
from grammar.schemas import draw_schema

from mlxinfer import hub
from mlxinfer.core import SamplingParams
from mlxinfer.engine.proposals import Proposer
from mlxinfer.grammar.spec import response_format
from mlxinfer.models import load

PARAMS = SamplingParams(max_tokens=120)


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
