"""The queue's bound, by itself; and what a model's own files say of sampling it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.core import SamplingParams
from mlxinfer.errors import OverloadedError
from mlxinfer.server.served import read_defaults
from mlxinfer.server.service import MAX_RETRY_S, MIN_RETRY_S, Admission

arrivals = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50), st.booleans()), max_size=40)


@given(arrivals=arrivals, limit=st.integers(1, 8), token_limit=st.integers(1, 200))
def test_waiting_requests_and_tokens_stay_within_bounds(
    arrivals: list[tuple[int, int, bool]], limit: int, token_limit: int
) -> None:
    """A call enters whole or not at all; only one that finds no other waiting may pass a bound."""
    admission = Admission(limit, token_limit)
    inside: list[int] = []  # tokens of each that waits
    for count, tokens, leaves in arrivals:
        fits = len(inside) + count <= limit and sum(inside) + count * tokens <= token_limit
        if fits or not inside:
            admission.enter(count, count * tokens)
            inside += [tokens] * count
        else:
            with pytest.raises(OverloadedError) as caught:
                admission.enter(count, count * tokens)
            assert MIN_RETRY_S <= caught.value.retry_after_s <= MAX_RETRY_S
        if leaves and inside:
            admission.leave(inside.pop())
        assert (admission.num_waiting, admission.num_waiting_tokens) == (len(inside), sum(inside))


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        (None, {"temperature": 1.0}),
        ({}, {"temperature": 1.0}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": "hot", "top_p": 7, "top_k": -1, "min_p": None}, {}),
        ({"top_p": 0, "repetition_penalty": 0}, {}),
        ({"temperature": True}, {}),
    ],
)
def test_defaults_are_the_models_own(
    tmp_path: Path, given_values: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    if given_values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given_values))
    assert read_defaults(tmp_path) == SamplingParams(
        **{"max_tokens": None, "temperature": 1.0, **expected}
    )
