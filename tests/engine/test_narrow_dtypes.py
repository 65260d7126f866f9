"""With 16-bit activations what shares a step with a prompt does not change it, nor its precision.

Models are dense and small: MLX's products then compute each row by itself.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, prompt
from models.tiny import tiny_checkpoint

from mlxinfer.core import SamplingParams
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

CASES = (
    "llama-v4", "gemma3_text-v4", "gpt_oss-v4", "qwen3_moe-v4",
    "qwen3_5_text-v4", "granitemoehybrid-v5", "lfm2-v4",
)  # fmt: skip
NARROW = {"bfloat16": mx.bfloat16, "float16": mx.float16}


@cache
def narrow_model(case: str, dtype: str) -> Model:
    return load(tiny_checkpoint(Path(mkdtemp()), case), dtype=dtype)


class Listening:
    """A model that notes the dtype of what comes of each pass."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.dtypes: set[mx.Dtype] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, *args: object, **options: object) -> mx.array:
        hidden = self._model(*args, **options)  # type: ignore[arg-type]
        self.dtypes.add(hidden.dtype)
        return hidden


def prompt_logits(model: object, *, beside: bool) -> np.ndarray:
    """(21, vocab) of a prompt in one step, alone or beside one that decodes."""
    harness = Harness(model, max_batch=4, num_pages=40)  # type: ignore[arg-type]
    if beside:
        harness.add("other", prompt(3, seed=9), SamplingParams(max_tokens=20))
        harness.turn(4)
    harness.add("it", prompt(21, seed=3), SamplingParams(max_tokens=9), prompt_logits=True)
    outcomes = harness.drain()
    assert [outcome.error for outcome in outcomes.values()] == [None] * len(outcomes)
    return np.concatenate(outcomes["it"].logits)


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, case in enumerate(CASES)
        for j, dtype in enumerate(NARROW)
    ],
)
def test_a_prompt_beside_others_is_the_prompt_alone(case: str, dtype: str) -> None:
    model = Listening(narrow_model(case, dtype))
    alone, beside = prompt_logits(model, beside=False), prompt_logits(model, beside=True)
    assert model.dtypes == {NARROW[dtype]}
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(alone, beside)


@pytest.mark.alike
@pytest.mark.parametrize("case", CASES)
def test_16_bits_are_the_same_model(case: str) -> None:
    exact = prompt_logits(narrow_model(case, "float32"), beside=False)
    for dtype in NARROW:
        narrow = prompt_logits(narrow_model(case, dtype), beside=False)
        assert np.abs(narrow - exact).mean() < 0.05 * exact.std()
