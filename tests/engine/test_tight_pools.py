"""A prompt that was answered before must find room where it found room the first time."""

import pytest
from engine.harness import PAGE, Harness, prompt, tiny_model

from mlxinfer.core import SamplingParams


@pytest.mark.parametrize("case", ["qwen3-v4", "mistral-v4", "gemma3_text-v4"])
@pytest.mark.parametrize("length", [39, 48, 101])
def test_a_repeated_prompt_fits_in_a_pool_of_its_own_size(case: str, length: int) -> None:
    """What it shares is locked, a page cut in two besides: that must not be counted against it."""
    model = tiny_model(case, quantized=True)
    harness = Harness(model, num_pages=-(-(length + 5) // PAGE), max_batch=2)
    for i in range(3):
        harness.add(str(i), prompt(length), SamplingParams(max_tokens=5))
        harness.drain()
    first, *others = [outcome.token_ids for outcome in harness.outcomes.values()]
    assert len(first) == 5
    assert others == [first, first]
