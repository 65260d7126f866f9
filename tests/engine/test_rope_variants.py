"""Long RoPE is a choice of each request: by its own greatest length, whatever runs beside it."""

import pytest
from engine.harness import Harness, tiny_model

from mlxinfer.core import SamplingParams

CASE = "phi3-v4"  # trained on 16 tokens: longer requests take the long factors
SHORT, LONG = list(range(3, 10)), list(range(3, 45))


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("chunk", [16, 64])
def test_batched_equals_alone(chunk: int) -> None:
    harness = Harness(tiny_model(CASE, quantized=True), prefill_chunk=chunk)
    harness.add("short", SHORT, params(9))
    harness.add("long", LONG, params(12))
    harness.add("grows", SHORT, params(20))
    outcomes = harness.check()
    assert outcomes["short"].token_ids != outcomes["grows"].token_ids[:9]
    assert [tiny_model(CASE).rope_variant(n) for n in (1, 16, 17, 128)] == [0, 0, 1, 1]


def test_keys_of_two_variants_are_never_shared() -> None:
    harness = Harness(tiny_model(CASE, quantized=True), page_size=4)
    harness.run("long", LONG, params(4))
    harness.add("short", LONG[:10], params(4))
    harness.add("again", LONG[:38], params(4))
    outcomes = harness.check()
    assert outcomes["short"].cached_tokens == 0
    assert outcomes["again"].cached_tokens >= 36
