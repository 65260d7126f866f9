"""Models that see give the logits of transformers through the engine: in chunks, beside others."""

import numpy as np
import pytest
from engine.seeing_cases import picture_logits, seeing_model
from models.picture_cases import ALL_PICTURE_CASES, DATA
from models.runs import ALIKE

CASES = [  # one that is the same model under other names is drawn
    pytest.param(name, marks=ALIKE if "-" in name else ()) for name in ALL_PICTURE_CASES
]


@pytest.mark.alike
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference_in_chunks_and_company(name: str) -> None:
    with np.load(DATA / f"{name}.npz") as reference:
        expected = reference["logits"]
    for logits in picture_logits(seeing_model(name), name):
        assert logits.shape == expected.shape
        assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, expected.std())
