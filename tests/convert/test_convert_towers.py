"""Conversion keeps what sees pictures: as it is, or quantised, and the config that describes it."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, by_mlx_lm, by_mlxinfer, convert, logits, write_source
from models.picture_cases import ALL_PICTURE_CASES, picture_tensors
from models.test_qwen_layouts import features
from models.tiny import arrays_in, config_of

from mlxinfer.errors import CheckpointError, InvalidRequestError
from mlxinfer.layers.linear import QuantizedLinear
from mlxinfer.models import load
from mlxinfer.models.language import reachable

pytestmark = pytest.mark.ci

BY_MLX_LM = ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_5_vl-flat", "qwen2_vl"]


def seeing(folder: Path, name: str, without: str | None = None) -> Path:
    """A source with a tower and a tokenizer, in float32; `without`: tensors that it lacks."""
    source = write_source(folder)
    (source / "config.json").write_text(json.dumps(ALL_PICTURE_CASES[name].config))
    tensors = {key: mx.array(value) for key, value in picture_tensors(name).items()}
    some = {key: value for key, value in tensors.items() if without is None or without not in key}
    mx.save_safetensors(str(source / "model.safetensors"), some)
    return source


@pytest.mark.alike
@pytest.mark.parametrize("name", ALL_PICTURE_CASES)
def test_a_dense_conversion_is_the_same_model(name: str, tmp_path: Path) -> None:
    source = seeing(tmp_path / "source", name)
    convert(source, tmp_path / "out", "dense")
    ours, theirs = (load(folder) for folder in (source, tmp_path / "out"))
    for one, other in zip(ours.tower.arrays(), theirs.tower.arrays(), strict=True):
        assert mx.array_equal(one, other)
    np.testing.assert_array_equal(logits(source), logits(tmp_path / "out"))
    config = config_of(tmp_path / "out")
    assert config["model_type"] == config_of(source)["model_type"]
    assert config["vision_config"] == config_of(source)["vision_config"]
    assert "quantization" not in config


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl-flat"])
def test_a_tower_stays_as_it_is_unless_it_is_asked_for(name: str, tmp_path: Path) -> None:
    source = seeing(tmp_path / "source", name)
    convert(source, tmp_path / "4", "4bit-g32")
    expected = features(load(source), name)
    actual = features(load(tmp_path / "4"), name)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert config_of(tmp_path / "4")["quantization"]["bits"] == 4


def test_a_quantised_tower_loads_and_counts(tmp_path: Path) -> None:
    name = "qwen3_vl"
    source = seeing(tmp_path / "source", name)
    convert(source, tmp_path / "4", "4bit-g32")
    report = convert(source, tmp_path / "8", "4bit-g32", tower_bits=8)
    model = load(tmp_path / "8")
    packed = list(reachable([model.tower.merger, list(model.tower.deep.values())], QuantizedLinear))
    assert {one.bits for one in packed} == {8}
    assert len(packed) == 6  # blocks have 48 inputs, which fill no groups
    expected = features(load(source), name)
    assert np.abs(features(model, name) - expected).max() < 0.05 * expected.std()
    assert model.num_bytes < load(tmp_path / "4").num_bytes
    assert report.num_bytes < sum(value.nbytes for value in arrays_in(tmp_path / "4").values())


def test_a_target_is_the_language_models_and_calibration_leaves_the_tower(tmp_path: Path) -> None:
    name = "qwen3_vl"
    source = seeing(tmp_path / "source", name)
    report = convert(source, tmp_path / "out", "mixed", calibration=TEXT * 3, target_bpw=6.0)
    text = [entry for entry in report.tensors if "vision_tower" not in entry["name"]]
    assert 5 < sum(e["num_bytes"] for e in text) * 8 / sum(e["num_weights"] for e in text) <= 6
    assert len(text) < len(report.tensors)
    np.testing.assert_allclose(
        features(load(tmp_path / "out"), name), features(load(source), name), atol=1e-5
    )


def test_a_source_without_a_tower_has_none_to_quantise(tmp_path: Path) -> None:
    source = seeing(tmp_path / "source", "qwen3_vl", without="visual.")
    convert(source, tmp_path / "out", "4bit-g32")
    assert "vision_config" not in config_of(tmp_path / "out")
    with pytest.raises(InvalidRequestError, match="--quantize-tower"):
        convert(source, tmp_path / "other", "4bit-g32", tower_bits=8)


def test_a_broken_tower_is_found_before_the_work(tmp_path: Path) -> None:
    source = seeing(tmp_path / "source", "qwen3_vl", without="blocks.1.norm1.bias")
    with pytest.raises(CheckpointError, match=r"sees pictures: .*blocks\.1\.norm1\.bias"):
        convert(source, tmp_path / "out", "4bit-g32")


@pytest.mark.alike
@pytest.mark.parametrize("name", BY_MLX_LM)
def test_mlx_lm_reads_the_language_model(name: str, tmp_path: Path) -> None:
    source = seeing(tmp_path / "source", name)
    convert(source, tmp_path / "out", "8bit-g32")
    ours, theirs = by_mlxinfer(tmp_path / "out"), by_mlx_lm(tmp_path / "out")
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * max(1.0, theirs.std()))
