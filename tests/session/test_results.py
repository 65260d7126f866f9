"""Result, Delta and Timing: what people and programs read off them."""

import json

from mlxinfer.core import FinishReason, TokenLogprobs
from mlxinfer.outputs import Result, Timing
from tests.tables import words


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


def test_repr_is_one_short_line() -> None:
    text = repr(answer(text="long\n" * 1000))
    assert "\n" not in text
    assert len(text) < 200
    assert "length, 3 tokens, 41.3 tok/s" in text


def test_a_prompt_that_is_not_known_is_not_counted() -> None:
    stopped = answer(prompt_tokens=0, cached_tokens=0, finish_reason=FinishReason.ABORT)
    assert stopped.summary.startswith("3 answer tokens")


def test_card_and_markdown_show_counts_rate_and_reason() -> None:
    for shown in (answer()._repr_html_(), answer()._repr_markdown_()):
        assert "9 prompt (4 cached) + 3 answer tokens" in shown
        assert "41.3 tok/s" in shown
        assert "length" in shown


def test_to_dict_is_json_with_stable_keys() -> None:
    logprobs = (TokenLogprobs(logprob=-0.5, top=((5, -0.5), (8, -1.5))),)
    data = json.loads(json.dumps(answer(logprobs=logprobs).to_dict()))
    assert set(data) == set(
        words("""
        text reasoning tool_calls finish_reason token_ids prompt_tokens cached_tokens answer_tokens
        logprobs timing
    """)
    )
    assert data["finish_reason"] == "length"
    assert data["logprobs"] == [{"logprob": -0.5, "top": [[5, -0.5], [8, -1.5]]}]
    assert data["timing"]["tokens_per_s"] == 41.26
