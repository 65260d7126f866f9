"""Result, Delta and Timing: what people and programs read off them."""

import json

import pytest

from mlxinfer.core import FinishReason, TokenLogprobs
from mlxinfer.outputs import Result, Timing


def answer(**changes: object) -> Result:
    fields: dict[str, object] = {
        "text": "Paris.",
        "token_ids": (5, 6, 7),
        "finish_reason": FinishReason.LENGTH,
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "timing": Timing(tokens_per_s=41.26, time_to_first_token_s=0.25),
    }
    return Result(**(fields | changes))  # type: ignore[arg-type]


def test_timing_from_four_marks() -> None:
    timing = Timing.measure(
        submitted_s=10.0,
        started_s=10.5,
        first_token_s=11.5,
        finished_s=13.5,
        computed_tokens=200,
        answer_tokens=41,
    )
    assert timing == Timing(
        queued_s=0.5,
        prefill_s=1.0,
        time_to_first_token_s=1.5,
        decode_s=2.0,
        total_s=3.5,
        prompt_tokens_per_s=200.0,
        tokens_per_s=20.0,
    )


@pytest.mark.parametrize(("answer_tokens", "finished_s"), [(1, 2.0), (0, 2.0), (5, 1.0)])
def test_no_rate_where_nothing_was_measured(answer_tokens: int, finished_s: float) -> None:
    timing = Timing.measure(
        submitted_s=0.0,
        started_s=0.0,
        first_token_s=1.0,
        finished_s=finished_s,
        computed_tokens=0,
        answer_tokens=answer_tokens,
    )
    assert timing.tokens_per_s is None
    assert timing.prompt_tokens_per_s is None


def test_repr_is_one_short_line() -> None:
    text = repr(answer(text="long\n" * 1000))
    assert "\n" not in text
    assert len(text) < 200
    assert "length, 3 tokens, 41.3 tok/s" in text


def test_a_prompt_that_is_not_known_is_not_counted() -> None:
    stopped = answer(prompt_tokens=0, cached_tokens=0, finish_reason=FinishReason.ABORT)
    assert stopped.summary.startswith("3 answer tokens")


def test_html_escapes_what_the_model_wrote() -> None:
    html = answer(text="<script>alert(1)</script>", reasoning="a<b>&")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a&lt;b&gt;&amp;" in html
    assert "http" not in html


def test_card_and_markdown_show_counts_rate_and_reason() -> None:
    for shown in (answer()._repr_html_(), answer()._repr_markdown_()):
        assert "9 prompt (4 cached) + 3 answer tokens" in shown
        assert "41.3 tok/s" in shown
        assert "length" in shown


def test_reasoning_is_quoted_in_markdown() -> None:
    assert answer(reasoning="one\ntwo")._repr_markdown_().startswith("> one\n> two\n\nParis.")


def test_to_dict_is_json_with_stable_keys() -> None:
    logprobs = (TokenLogprobs(logprob=-0.5, top=((5, -0.5), (8, -1.5))),)
    data = json.loads(json.dumps(answer(logprobs=logprobs).to_dict()))
    assert set(data) == {
        "text",
        "reasoning",
        "tool_calls",
        "finish_reason",
        "token_ids",
        "prompt_tokens",
        "cached_tokens",
        "answer_tokens",
        "logprobs",
        "timing",
    }
    assert data["finish_reason"] == "length"
    assert data["logprobs"] == [{"logprob": -0.5, "top": [[5, -0.5], [8, -1.5]]}]
    assert data["timing"]["tokens_per_s"] == 41.26
