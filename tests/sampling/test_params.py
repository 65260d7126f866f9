import random

import numpy as np
import pytest

from mlxinfer.core import DRY_BREAKERS, LEAST_SEED, MOST_SEED, SamplingParams, later_seed
from mlxinfer.errors import InvalidRequestError

WRONG: list[tuple[str, object, str]] = [  # a field, its value, and what is said
    ("max_tokens", 10**400, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("min_tokens", 10**400, "min_tokens"),
    ("min_tokens", 9, "min_tokens"),
    ("temperature", float("nan"), "temperature is nan"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_k", 1.5, "top_k"),
    ("top_k", -(10**5000), "top_k is a very large int"),
    ("top_n_sigma", 1e300, "top_n_sigma"),
    ("seed", 2**63, "seed"),
    ("stop", [1], "stop"),
    ("stop", ["a" * 10_000, 1], r"stop is .{1,90}; expected"),
    ("stop", "half \ud800", "stop"),
    ("stop_token_ids", 5, "stop_token_ids is 5"),
    ("logprobs", 21, "logprobs"),
    ("logit_bias", {"a": 1.0}, "logit_bias"),
    ("logit_bias", "a", "logit_bias is 'a'"),
    ("logit_bias", {1: float("nan")}, "logit_bias"),
    ("ignore_eos", "off", "ignore_eos is 'off'"),
    ("repetition_penalty", 0, r"expected a finite number in \(0, "),
    ("repetition_penalty", 1e300, "repetition_penalty"),
    ("repetition_penalty", 10**400, "repetition_penalty is 1000"),
    ("dry_sequence_breakers", [str(i) for i in range(300)], "dry_sequence_breakers"),
]


def test_a_value_that_no_engine_can_use_is_refused_by_name() -> None:
    for name, value, said in WRONG:
        with pytest.raises(InvalidRequestError, match=said) as caught:
            SamplingParams(**{"max_tokens": 3, name: value})  # type: ignore[arg-type]
        assert (caught.value.param, caught.value.status) == (name, 400)


def test_params_have_a_hash() -> None:
    one, same = SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={3: 1.0})
    assert hash(one) == hash(same)
    assert {one: 1}[same] == 1


def test_the_largest_numbers_that_are_taken_are_float32s() -> None:
    params = SamplingParams(repetition_penalty=3.4e38, max_tokens=2**63 - 1, stop="\U0001f600")
    assert np.isfinite(np.float32(params.repetition_penalty))
    assert params.dry_sequence_breakers == DRY_BREAKERS


def test_a_seed_of_minus_one_is_none_and_no_later_seed_is_it() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    number = random.randrange(2**32)
    print(f"seed {number}")
    chance = random.Random(number)
    for _ in range(300):
        near = chance.choice([LEAST_SEED, -3, 5, MOST_SEED - 2, chance.randrange(MOST_SEED)])
        seed, steps = near + chance.randrange(2), sorted(chance.sample(range(-99, 99), 20))
        later = [later_seed(seed, step) for step in steps]
        assert -1 not in later
        assert len({*later}) == len(later)
        assert min(later) >= LEAST_SEED
        assert max(later) <= MOST_SEED
        assert [later_seed(one, -step) for one, step in zip(later, steps, strict=True)] == [
            seed
        ] * len(steps)
