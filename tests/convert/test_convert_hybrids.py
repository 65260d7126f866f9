"""Conversions of models with recurrent layers, whose tensors have layouts of their own."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import convert, write_source
from models.test_hybrid_layouts import nested, packed, prefixed, tensors_of
from test_convert_run import by_mlxinfer

CASES = (
    "qwen3_next-v4",
    "qwen3_5_text-v4",
    "qwen3_5_moe_text-v4",
    "granitemoehybrid-v4",
    "lfm2-v4",
)


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_that_quantises_nothing_changes_nothing(case: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", case)
    convert(source, tmp_path / "out", "bf16")
    np.testing.assert_array_equal(by_mlxinfer(tmp_path / "out"), by_mlxinfer(source))


ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}
SPELLED = {"rope_theta": None, "partial_rotary_factor": None, "rope_parameters": ROPE}


def multimodal(folder: Path, case: str) -> Path:
    """A source as the hub has it: packed experts inside of a multimodal model, in bfloat16."""
    source = write_source(folder, case, changes=SPELLED)
    config = json.loads((source / "config.json").read_text())
    for file in source.glob("*.safetensors*"):
        file.unlink()
    whole = nested(config)
    whole["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(whole))
    tensors = {name: array.astype(mx.bfloat16) for name, array in tensors_of(case).items()}
    mx.save_safetensors(str(source / "model.safetensors"), prefixed(packed(tensors), "hub"))
    return source


@pytest.mark.parametrize("case", ["qwen3_5_text-v4", "qwen3_5_moe_text-v4"])
def test_a_multimodal_source_becomes_its_language_model(case: str, tmp_path: Path) -> None:
    source = multimodal(tmp_path / "source", case)
    convert(source, tmp_path / "out", "bf16")
    np.testing.assert_array_equal(by_mlxinfer(tmp_path / "out"), by_mlxinfer(source))
