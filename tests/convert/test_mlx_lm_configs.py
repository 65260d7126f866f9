"""mlx-lm reads what `convert` writes as it is meant, or the conversion's end says what it misses.

Every family's configs of the tests are converted, in the spellings of transformers 4 and 5. They
have keys that published checkpoints leave as they are: what is told of them is no everyday case.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import agreed, by_mlxinfer, convert, write_source
from models.cases import CASES
from models.runs import alike

from mlxinfer.convert.mlx_lm import OTHERWISE, UNDEFINED_BY_MLX_LM

IDS = [5, 17, 3, 80, 41, 9, 22, 64, 33, 71, 12, 50]  # more than the windows, less than contexts


@pytest.mark.parametrize("case", alike(CASES))
def test_a_config_is_read_as_it_is_meant_or_its_reader_is_warned(tmp_path: Path, case: str) -> None:
    source = write_source(tmp_path / "source", case, dtype=mx.float32)
    report = convert(source, tmp_path / "out", "fp32")
    ours = by_mlxinfer(tmp_path / "out", IDS)
    assert np.allclose(ours, by_mlxinfer(source, IDS), atol=1e-5)
    if CASES[case]["model_type"] in (*UNDEFINED_BY_MLX_LM, *OTHERWISE):
        return
    if any(note.startswith("mlx-lm's definition") for note in report.notes):
        with pytest.raises((AssertionError, ValueError)):
            agreed(tmp_path / "out", IDS)
    else:
        agreed(tmp_path / "out", IDS)
