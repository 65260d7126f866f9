"""Answers of the demo model under drawn schemas: they parse, satisfy, and delay no other answer.

MLXINFER_SCHEMAS=1000 pytest tests/grammar/test_grammar_answers.py -m ""
"""

import json
import os
import random
import string
from collections.abc import Iterator, Sequence

import jsonschema
import pytest
from grammar.schemas import Schema, draw_schema

from mlxinfer import LLM, Result, SamplingParams

NUM_SCHEMAS = int(os.environ.get("MLXINFER_SCHEMAS", "300"))
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
NEIGHBOURS = ("What is a KV cache?", "Hello", "List three colors", "A page")
ALONE: list[tuple[int, ...]] = []


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-draft", max_batch=28) as made:
        yield made


def drawn(first: int, count: int) -> list[Schema]:
    return [draw_schema(random.Random(seed)) for seed in range(first, first + count)]


def form(schema: Schema) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def ask(llm: LLM, schemas: Sequence[Schema], temperature: float) -> list[Result]:
    """Answers under schemas, beside neighbours under none that get the tokens they get alone."""
    params = [
        SamplingParams(max_tokens=1900, temperature=temperature, seed=seed)
        for seed in range(len(schemas))
    ]
    prompts = [f"Give me JSON: {name}" for name in string.ascii_lowercase[: len(schemas)]]
    free = SamplingParams(max_tokens=40)  # greedy: a last bit may turn a draw, seldom a maximum
    results = llm.generate(
        [*prompts, *NEIGHBOURS],
        [*params, *[free] * len(NEIGHBOURS)],
        response_format=[*map(form, schemas), *[None] * len(NEIGHBOURS)],
    )
    neighbours = [result.token_ids for result in results[len(schemas) :]]
    if not ALONE:
        ALONE.extend(llm.generate(p, free).token_ids for p in NEIGHBOURS)
    assert neighbours == ALONE
    return results[: len(schemas)]


def check(schema: Schema, result: Result) -> None:
    assert result.finish_reason == "stop", (schema, result.text)
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(
        json.loads(result.text)
    )


@pytest.mark.parametrize(("temperature", "count"), [(0.0, 3), (1.0, 4)])
def test_answers_satisfy_their_schemas(llm: LLM, temperature: float, count: int) -> None:
    schemas = drawn(0, count)
    for schema, result in zip(schemas, ask(llm, schemas, temperature), strict=True):
        check(schema, result)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_answers_satisfy_their_schemas(llm: LLM, temperature: float) -> None:
    for first in range(0, NUM_SCHEMAS, 8):
        schemas = drawn(first, 8)
        for schema, result in zip(schemas, ask(llm, schemas, temperature), strict=True):
            check(schema, result)
    print(f"\n{NUM_SCHEMAS} schemas at temperature {temperature}")


@pytest.mark.ci
def test_a_tight_pool_changes_no_answer(llm: LLM) -> None:
    """Preempted and computed again, with beginnings shared: the same tokens."""
    schemas = [*drawn(40, 2), *[{"type": "string", "minLength": n} for n in (99, 150)]]
    params = [SamplingParams(max_tokens=40)] * 4
    prompts = ["Give me JSON for a person, and do it well: " + name for name in "abcd"]
    formats = [form(schema) for schema in schemas]
    alone = [
        llm.generate(p, q, response_format=f).token_ids
        for p, q, f in zip(prompts, params, formats, strict=True)
    ]
    with LLM("demo-draft", max_batch=3, num_pages=6) as tight:
        results = tight.generate(prompts, params, response_format=formats)
        assert tight.stats()["preemptions"] > 0
    assert [r.token_ids for r in results] == alone


@pytest.mark.ci
def test_penalties_and_biases_stay_within_the_grammar(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=300,
        temperature=1.2,
        seed=3,
        top_p=0.9,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias=dict.fromkeys(range(3, 200), 20.0),
        min_tokens=100,
        ignore_eos=True,
        logprobs=2,
    )
    for schema in drawn(60, 2):
        result = llm.generate("Give me JSON: ", params, response_format=form(schema))
        check(schema, result)
        assert len(result.logprobs) == len(result.token_ids)
