"""Bad input: sampling values out of range or of another type, and extreme ones that are allowed."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, COMPLETIONS, MESSAGES, RESPONSES, expect_refusal, unharmed, with_fields
from live_server import LiveServer, chat


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    yield from unharmed(live)


FIELDS: dict[str, list[Any]] = {  # of chat and plain completions
    "temperature": [-0.1, 101, 1e308, True, "1", [1]],
    "top_p": [0, -1, 1.0001, False, "0.5"],
    "top_k": [-2, 10**9, 2**64, 1.5, True],
    "min_p": [-0.1, 1.1, True],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, {}],
    "repetition_penalty": [0, -1, 101, False],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "7"],
    "n": [0, -1, 17, 2**40, 1.5],
    "min_tokens": [-1, 10**9, True],
    "logit_bias": [
        *({"2048": 1}, {"-1": 1}, {"x": 1}, {"05": 1}, {"1.5": 1}, {"5": True}),
        *([[5]], [["", 1]], [["a", True]], [[2048, 1]], [["a", 500]]),
    ],
    "top_n_sigma": [101, "1", True],
    "typical_p": [0, -0.1, 1.1, "1"],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 1.1],
    "dry_multiplier": [-1, 101],
    "dry_base": [0.9, 101],
    "dry_allowed_length": [0, 1.5],
    "dry_penalty_last_n": [-2, 2**40],
    "dry_sequence_breakers": [[""], ["a"] * 33, "a", [5]],
    "stop": ["", [""], ["a"] * 65, "x" * 1001, 5, [5], [None], {}],
    "stop_token_ids": [[2048], [-1], [True], ["5"], [1.0], [5] * 129, 5],
    "ignore_eos": [1, "true", []],
    "stream": [1, "false", []],
    "stream_options": [{"include_usage": True}, [], "all"],
    "prompt_logprobs": [1, 0, True],
    "best_of": [2, 0, True],
    "use_beam_search": [True],
    "bad_words": [["x"]],
    "logits_processors": [["os.system"]],
    "prompt_embeds": ["AAAA"],
    "truncate_prompt_tokens": [-1, 5],
}
CASES = [(field, value) for field, values in FIELDS.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES, ids=[f"{f}={v!r:.20}" for f, v in CASES])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_out_of_range(live: LiveServer, path: str, field: str, value: Any) -> None:
    error = expect_refusal(live, path, with_fields(path, **{field: value}))
    assert error["param"].partition("[")[0] == field


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_begins_with_a_refusal_too(live: LiveServer, stream: bool) -> None:
    """No 200 before what can be known beforehand."""
    for fields in ({"top_p": 2}, {"logit_bias": {"9999": 1}}):
        expect_refusal(live, CHAT, chat(stream=stream, **fields))


MANY: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {str(i): 1 for i in range(10_001)}},
    "stops": {"stop": ["x"] * 100_000},
    "ends": {"stop_token_ids": [5] * 100_000},
}


@pytest.mark.parametrize("name", MANY)
def test_too_many_of_them(live: LiveServer, name: str) -> None:
    expect_refusal(live, CHAT, chat(**MANY[name]))


OTHERS: list[tuple[str, str, Any]] = [
    (CHAT, "max_tokens", 0),
    (CHAT, "max_tokens", -2),
    (CHAT, "max_completion_tokens", 0),
    (CHAT, "top_logprobs", -1),
    (CHAT, "top_logprobs", 21),
    (CHAT, "logprobs", 5),
    (COMPLETIONS, "max_tokens", -2),
    (COMPLETIONS, "logprobs", -1),
    (COMPLETIONS, "logprobs", 21),
    (COMPLETIONS, "logprobs", True),
    (COMPLETIONS, "echo", 1),
    (RESPONSES, "max_output_tokens", 0),
    (RESPONSES, "temperature", 2.1),
    (RESPONSES, "temperature", True),
    (RESPONSES, "top_p", 0),
    (RESPONSES, "top_logprobs", 21),
    (RESPONSES, "stream", "yes"),
    (MESSAGES, "max_tokens", 0),
    (MESSAGES, "max_tokens", None),
    (MESSAGES, "temperature", 1.1),
    (MESSAGES, "temperature", -0.1),
    (MESSAGES, "top_p", 0),
    (MESSAGES, "top_k", -2),
    (MESSAGES, "stop_sequences", [""]),
    (MESSAGES, "stop_sequences", ["x"] * 65),
    (MESSAGES, "stop_sequences", "x"),
]


@pytest.mark.parametrize(("path", "field", "value"), OTHERS)
def test_values_of_other_names(live: LiveServer, path: str, field: str, value: Any) -> None:
    expect_refusal(live, path, with_fields(path, **{field: value}), param=field)


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 1e-40},
    {"temperature": 1e-7},
    {"temperature": 100},
    {"temperature": 1, "top_p": 5e-324},
    {"temperature": 1, "top_p": 1e-40},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "top_k": 2048},
    {"repetition_penalty": 5e-324},
    {"temperature": 1, "repetition_penalty": 1e-40},
    {"temperature": 1, "repetition_penalty": 100},
    {"temperature": 100, "repetition_penalty": 1e-3, "top_p": 1e-3, "min_p": 1, "top_k": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {str(i): -100 for i in range(2048)}},
    {"logit_bias": {str(i): 100 for i in range(2048)}, "temperature": 5e-324},
    {"seed": 2**63 - 1, "temperature": 1, "n": 2},
    {"seed": -(2**63), "temperature": 1},
    {"min_tokens": 6},
    {"stop": "\0"},
    {"stop_token_ids": list(range(128))},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=lambda f: f"{f}"[:40])
def test_extremes_that_are_allowed_stay_numbers(live: LiveServer, fields: dict[str, Any]) -> None:
    """There are tokens, and their log-probabilities are finite and none above 0."""
    request = chat(max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=2, **fields)
    answer = live.post(CHAT, request)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        entries = choice["logprobs"]["content"]
        assert entries
        for entry in [*entries, *(top for e in entries for top in e["top_logprobs"])]:
            assert -math.inf < entry["logprob"] <= 1e-6


def test_extremes_do_not_reach_their_neighbours(live: LiveServer) -> None:
    """In one batch with the strangest parameters a request gets the tokens that it gets alone."""
    alone = live.post(CHAT, chat("What is 47 + 38", max_tokens=12)).json()
    prompts = {"prompt": "What is 47 + 38", "max_tokens": 60, "ignore_eos": True}
    with live.stream(
        COMPLETIONS, {**prompts, "n": 8, "temperature": 5e-324, "logit_bias": {}}
    ) as r:
        next(r.iter_lines())
        for fields in EXTREMES[:3]:
            with live.stream(CHAT, chat(max_tokens=60, ignore_eos=True, **fields)):
                together = live.post(CHAT, chat("What is 47 + 38", max_tokens=12)).json()
                assert together["choices"] == alone["choices"]
