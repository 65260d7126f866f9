"""Models that see give the logits of transformers through the engine: in chunks, beside others."""

import numpy as np
import pytest
from engine.harness import Harness
from engine.harness import prompt as text
from engine.seeing_cases import own_prompt, seeing_model
from models.picture_cases import ALL_PICTURE_CASES, DATA
from models.runs import every

from mlxinfer.core import SamplingParams


@pytest.mark.parametrize("name", every(2, ALL_PICTURE_CASES))
def test_logits_equal_the_reference_in_chunks_and_company(name: str) -> None:
    model, (ids, pictures) = seeing_model(name), own_prompt(name)
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["logits"]
    harness = Harness(model, prefill_chunk=16, max_batch=3)
    one = SamplingParams(max_tokens=3)
    harness.add("text", text(30), SamplingParams(max_tokens=40))
    for name_ in "ab":
        harness.add(name_, ids, one, prompt_logits=True, pictures=pictures)
    outcomes = harness.drain()
    for name_ in "ab":
        assert outcomes[name_].error is None
        logits = np.concatenate(outcomes[name_].logits)
        assert logits.shape == expected.shape
        assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, expected.std())
