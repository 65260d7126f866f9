"""Whether a model fits follows from sizes alone, and agrees with what the cache would take."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.fit import Verdict, fit_of, kv_bytes, longest_context
from mlxinfer.models.config import ModelConfig, load_config

LLAMA = {
    **{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "eos_token_id": 2},
}
WEIGHTS = 1_000_000


def config(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return load_config(folder)


def test_the_longest_context_fits_and_one_token_more_does_not(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = config(tmp_path)
    for _ in range(50):
        bits, limit = rng.choice((16, 8, 4)), rng.randrange(WEIGHTS, 12 * WEIGHTS)
        longest = longest_context(model, WEIGHTS, limit, bits)
        assert WEIGHTS + kv_bytes(model, longest, bits) <= limit
        more = WEIGHTS + kv_bytes(model, longest + 1, bits)
        assert longest == model.max_context or more > limit


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        (20_000_000, Verdict.FITS),
        (4_000_000, Verdict.SHORT),
        (1_500_000, Verdict.TOO_LARGE),
        (900_000, Verdict.TOO_LARGE),
    ],
)
def test_verdicts_follow_from_the_context_that_is_left(
    tmp_path: Path, limit: int, verdict: Verdict
) -> None:
    found = fit_of(config(tmp_path), WEIGHTS, limit)
    assert found.verdict is verdict
    assert found.as_dict()["text"] == found.text
    assert found.contexts is not None
    assert found.contexts[8] >= found.contexts[16]


def test_a_model_that_is_too_large_says_what_a_conversion_would_take(tmp_path: Path) -> None:
    assert "converted to 4 bits" in fit_of(config(tmp_path), 10 * WEIGHTS, 5 * WEIGHTS).text
    quantised = config(tmp_path, quantization={"bits": 4, "group_size": 64})
    found = fit_of(quantised, 10 * WEIGHTS, 5 * WEIGHTS)
    assert found.converted_bytes is None
    assert "converted" not in found.text


def test_windows_make_long_contexts_cheap(tmp_path: Path) -> None:
    plain = config(tmp_path)
    window = config(tmp_path, model_type="mistral", sliding_window=256)
    assert kv_bytes(window, 8192) == kv_bytes(plain, 256)
    assert fit_of(window, WEIGHTS, 2 * WEIGHTS).verdict is Verdict.FITS
