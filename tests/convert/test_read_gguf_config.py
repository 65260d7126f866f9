"""Metadata into config.json: what files leave out, spellings, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.convert.read.gguf.families import FAMILIES
from mlxinfer.convert.read.gguf.names import ROPE_FACTORS
from mlxinfer.convert.read.gguf.source import make_config
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.models.config import normalise

SHAPES = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,)}


def metadata(arch: str, **more: Any) -> dict[str, Any]:
    """Keys as files have them; dots in names are double underscores here."""
    values = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    keyed = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": arch, **keyed}


def config(arch: str, **more: Any) -> dict[str, Any]:
    made = make_config(metadata(arch, **more), SHAPES, {}, "the file")
    normalise(made)  # nothing in it that our own models refuse
    return made


def test_gpt_oss_does_not_round_the_range_of_yarn() -> None:
    made = config(
        "gpt-oss",
        attention__sliding_window=128,
        expert_count=4,
        expert_used_count=2,
        expert_feed_forward_length=96,
        rope__scaling__type="yarn",
        rope__scaling__factor=32.0,
        rope__scaling__original_context_length=4096,
    )
    assert made["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    assert made["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "stated",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
    ],
)
def test_linear_scaling_under_every_name(stated: dict[str, Any]) -> None:
    assert config("llama", **stated)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    off = stated | {"rope__scaling__type": "none"}
    assert config("llama", **off)["rope_scaling"] is None
    assert config("llama", rope__scaling__type="linear")["rope_scaling"] is None


@pytest.mark.parametrize(("layers", "scalar"), [(34, 24), (62, 16)])
def test_the_27b_gemma_scales_otherwise(layers: int, scalar: int) -> None:
    more = {"attention__key_length": 24, "rope__dimension_count": 24, "block_count": layers}
    made = config("gemma3", attention__sliding_window=8, **more)
    assert made["query_pre_attn_scalar"] == scalar
    assert made["tie_word_embeddings"]


def test_gemma_may_say_of_each_layer_whether_it_slides() -> None:
    flags = np.array([True, False, True])
    more = {"attention__sliding_window": 8, "attention__sliding_window_pattern": flags}
    assert config("gemma3", **more)["layer_types"] == [
        *("sliding_attention", "full_attention", "sliding_attention")
    ]
    more["attention__sliding_window_pattern"] = flags[:2]
    with pytest.raises(CheckpointError, match="each layer"):
        config("gemma3", **more)


def test_one_number_for_each_layer_must_be_the_same() -> None:
    same = np.array([2, 2, 2], np.int32)
    assert config("llama", attention__head_count_kv=same)["num_key_value_heads"] == 2
    for odd in (np.array([2, 1, 2], np.int32), np.array([np.nan], np.float32)):
        with pytest.raises(UnsupportedModelError, match="differs between layers"):
            config("llama", attention__head_count_kv=odd)


def test_a_window_makes_a_mistral() -> None:
    assert config("llama")["model_type"] == "llama"
    made = config("llama", attention__sliding_window=8)
    assert (made["model_type"], made["sliding_window"]) == ("mistral", 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rope__dimension_count": 8}, UnsupportedModelError, "rotates 8 of 16"),
        ({"rope__scaling__type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"rope__scaling__type": "dynamic"}, UnsupportedModelError, "dynamic.*linear or yarn"),
        ({"attention__temperature_length": 8}, UnsupportedModelError, "temperature_length"),
        ({"rope__dimension_sections": 8}, UnsupportedModelError, "dimension_sections"),
        ({"attention__causal": False}, UnsupportedModelError, "attention.causal.*False"),
        ({"attention__scale": 0.5}, UnsupportedModelError, "attention.scale"),
        ({"attention__value_length": 8}, UnsupportedModelError, "value_length"),
        ({"embedding_length": 32}, CheckpointError, "32 columns"),
        ({"block_count": None}, CheckpointError, "block_count"),
        ({"block_count": 10**6}, CheckpointError, "block_count"),
        ({"attention__head_count": -4}, CheckpointError, "head_count"),
        ({"rope__freq_base": float("nan")}, CheckpointError, "freq_base"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        config("llama", **change)


def test_rope_factors_of_no_known_scaling() -> None:
    for factors, error in (
        (np.linspace(1, 9, 8), UnsupportedModelError),
        (np.ones(5), CheckpointError),
        (np.full(8, np.nan), CheckpointError),
    ):
        with pytest.raises(error, match=r"rope_freqs"):
            make_config(
                metadata("llama"), SHAPES, {ROPE_FACTORS: factors.astype(np.float32)}, "the file"
            )
    assert (
        make_config(metadata("llama"), SHAPES, {ROPE_FACTORS: np.ones(8, np.float32)}, "x")[
            "rope_scaling"
        ]
        is None
    )


def test_the_page_lists_the_architectures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conversion.md").read_text()
    listed = page.partition("GGUF files of these architectures are read:")[2].partition(".\n")[0]
    assert [name.strip() for name in listed.split(",")] == sorted(FAMILIES)
