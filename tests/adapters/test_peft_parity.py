"""Logits with an adapter are those that PEFT's own layers give, for each kind that it writes."""

from pathlib import Path

import numpy as np
import pytest
from adapters.published import CASES, PROMPT, write_case
from engine.harness import Harness

from mlxinfer.core import SamplingParams
from mlxinfer.models import load

REFERENCES = Path(__file__).parents[1] / "data" / "adapters"


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    base, folder = write_case(tmp_path, name)
    expected = np.load(REFERENCES / f"{name}.npy")
    harness = Harness(load(base), adapters={"x": folder})
    for adapter in (None, "x"):
        params = SamplingParams(max_tokens=1)
        harness.add(str(adapter), PROMPT, params, prompt_logits=True, adapter=adapter)
    outcomes = harness.drain()
    actual, plain = (np.concatenate(outcomes[item].logits) for item in ("x", "None"))
    limit = 1e-4 * max(1.0, float(expected.std()))
    assert np.abs(actual - expected).max() < limit
    assert np.abs(plain - expected).max() > 1000 * limit, "the adapter changes nothing"
    assert (actual.argmax(axis=-1) == expected.argmax(axis=-1)).all()
