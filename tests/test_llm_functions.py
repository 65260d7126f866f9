"""Functions of the caller, as mlx-lm has them: exact in batches, with seeds, beside all else."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlxinfer import LLM, InvalidRequestError, RequestFailedError, Result, SamplingParams

PROMPTS = ["What is a KV cache? What is a KV cache?", "The capital of", "Hello", "1 2 3 1 2 3 1 2"]
MANY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["off", "auto"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("demo", dtype="float32", speculate=request.param, max_batch=8) as model:
        yield model


def fewer_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits - mx.zeros_like(logits).at[0, tokens].add(0.7)


def last_token_again(tokens: mx.array, logits: mx.array) -> mx.array:
    """Reads the tokens on the host, as many functions do."""
    logits[:, int(tokens[-1])] -= 3
    return logits


@pytest.mark.alike
@pytest.mark.parametrize(
    ("functions", "values"),
    [
        (
            make_logits_processors(None, 1.4, 12),
            {"repetition_penalty": 1.4, "repetition_window": 12},
        ),
        (make_logits_processors({70: 6.0, 80: -9.0}), {"logit_bias": {70: 6.0, 80: -9.0}}),
    ],
)
def test_functions_of_mlx_lm_choose_what_our_own_parts_do(
    llm: LLM, functions: list[Any], values: dict[str, Any]
) -> None:
    for seed in (None, 5):
        params = MANY.changed({"temperature": 0.0 if seed is None else 0.9, "seed": seed})
        theirs = llm.generate(PROMPTS, params, logits_processors=functions)
        ours = llm.generate(PROMPTS, params, **values)
        assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]


@pytest.mark.alike
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_alone_and_beside_others(llm: LLM, temperature: float) -> None:
    params = MANY.changed({"temperature": temperature, "seed": 3})
    functions = params.changed({"logits_processors": [fewer_repeats, last_token_again]})
    alone = [llm.generate(prompt, functions).token_ids for prompt in PROMPTS]
    plain = [llm.generate(prompt, params).token_ids for prompt in PROMPTS]
    together = llm.generate([*PROMPTS, *PROMPTS], [functions] * 4 + [params] * 4)
    assert [r.token_ids for r in together] == [*alone, *plain]
    assert alone != plain


def test_a_sampler_replaces_the_draw(llm: LLM) -> None:
    greedy = [r.token_ids for r in llm.generate(PROMPTS, MANY)]
    assert [r.token_ids for r in llm.generate(PROMPTS, MANY, sampler=make_sampler(0.0))] == greedy

    def second(logprobs: mx.array) -> mx.array:
        assert logprobs.shape[0] == 1
        assert abs(float(mx.exp(logprobs).sum()) - 1) < 1e-4
        return mx.argsort(-logprobs, axis=-1)[:, 1]

    chosen = llm.generate(PROMPTS[0], MANY, sampler=second, logprobs=2)
    for token, scores in zip(chosen.token_ids, chosen.logprobs, strict=True):
        assert scores.top[1][0] == token
    beside = llm.generate([PROMPTS[0], *PROMPTS], [MANY.changed({"sampler": second})] + [MANY] * 4)
    assert [r.token_ids for r in beside] == [chosen.token_ids, *greedy]


def test_a_sampler_of_mlx_lm_draws_what_its_own_numbers_say(llm: LLM) -> None:
    answers = []
    for _ in range(2):
        mx.random.seed(4)
        answers.append(llm.generate("Hello", MANY, sampler=make_sampler(1.0, top_p=0.9)).token_ids)
    assert len(answers[0]) == 24  # their numbers are the thread's: equal answers are not promised


def test_each_function_is_called_once_for_each_token_in_order(llm: LLM) -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.array(tokens).tolist())
        return logits

    prompt = llm.tokenizer.encode(PROMPTS[3])
    result = llm.generate(prompt, MANY, logits_processors=[watch])
    known = [*prompt, *result.token_ids]
    assert seen[:24] == [known[: len(prompt) + count] for count in range(24)]
    assert not result.params.speculate
    assert result.timing.drafted == 0
    assert result.params.words.endswith("without speculation")
    assert result.token_ids == llm.generate(prompt, MANY).token_ids


def test_a_grammar_and_end_tokens_hold_whatever_functions_want(llm: LLM) -> None:
    def flat(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.zeros_like(logits)

    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    schema |= {"required": ["a"], "additionalProperties": False}  # other keys could be endless
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    for options in (
        {"logits_processors": [flat], "temperature": 0},
        {"sampler": lambda p: mx.argmax(p, axis=-1)},
    ):
        result = llm.chat("Hi", max_tokens=60, response_format=form, **options)
        assert json.loads(result.text)["a"] in (1, 2)
    ends = sorted(llm.end_ids)

    def end(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, ends] = 100.0
        return logits

    short = llm.generate("Hello", max_tokens=20, min_tokens=7, logits_processors=[end])
    assert len(short.token_ids) == 8


@pytest.mark.alike
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"logits_processors": [fewer_repeats, lambda t, x: 1 / 0]},
            r"logits_processors\[1\].*Zero",
        ),
        ({"logits_processors": [lambda t, x: None]}, "returned None"),
        ({"logits_processors": [lambda t, x: x[:, :5]]}, "shape"),
        ({"sampler": lambda p: 10**9}, "token from 0"),
        ({"sampler": lambda p: 0.5}, "token from 0"),
        ({"sampler": lambda p: p}, "sampler failed"),
    ],
)
def test_a_failing_function_ends_its_answer(llm: LLM, options: dict[str, Any], said: str) -> None:
    want, others = llm.generate("Hello", max_tokens=90, ignore_eos=True), list[Result]()
    begun = threading.Event()

    def other() -> None:
        for delta in llm.stream("Hello", max_tokens=90, ignore_eos=True):
            begun.set()
            if delta.result is not None:
                others.append(delta.result)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(RequestFailedError, match=said):
        llm.generate("What is", max_tokens=20, **options)
    thread.join(60)
    assert [r.token_ids for r in others] == [want.token_ids]
    assert llm.stats()["step_failures"] == 0


def test_streams_chats_and_asyncio_take_functions(llm: LLM) -> None:
    options: dict[str, Any] = {"logits_processors": [fewer_repeats], "max_tokens": 12}
    want = llm.generate("Hello", **options).token_ids
    streamed = [i for delta in llm.stream("Hello", **options) for i in delta.token_ids]
    assert tuple(streamed) == want == asyncio.run(llm.agenerate("Hello", **options)).token_ids
    chatted = llm.chat("Hello", SamplingParams(max_tokens=12), logits_processors=[fewer_repeats])
    with llm.program(logits_processors=[fewer_repeats]) as program:
        program.user("Hello")
        program.gen("answer", temperature=0, max_tokens=12)
        assert program["answer"] == chatted.text


def test_what_cannot_be_called_or_goes_not_together_is_refused(llm: LLM) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"logits_processors": fewer_repeats}, "list of functions"),
        ({"logits_processors": ["f"]}, "function"),
        ({"sampler": 3}, "function"),
        ({"sampler": make_sampler(0.0), "temperature": 0.5}, "give one of both"),
    ]
    for options, said in refused:
        with pytest.raises(InvalidRequestError, match=said):
            llm.generate("Hello", **options)


def test_the_tokens_of_a_chat_are_those_that_it_answers(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    params = SamplingParams(max_tokens=8)
    for messages in ("Hello", [*turns, {"role": "user", "content": "And now?"}]):
        ids = llm.apply_chat_template(messages)
        answer = llm.chat(messages, params)
        assert answer.prompt_tokens == len(ids)
        assert llm.generate(ids, params).token_ids == answer.token_ids
    bare, begun = (
        llm.apply_chat_template(turns[:1], add_generation_prompt=p) for p in (False, True)
    )
    assert begun[: len(bare)] == bare != begun
    with pytest.raises(TypeError, match="takes no 'tols'"):
        llm.apply_chat_template("Hello", tols=[])  # type: ignore[call-arg]
