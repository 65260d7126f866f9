"""Models that also see or hear: what comes out is their language model, as mlx-lm reads it too."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, by_mlx_lm, by_mlxinfer, convert, write_source
from models.test_hybrid_layouts import packed, prefixed
from models.tiny import arrays_in, config_of

from mlxinfer.convert import run
from mlxinfer.convert.recipes import ConversionOptions
from mlxinfer.errors import ConversionError
from mlxinfer.models.towers.loading import TOWERS

pytestmark = pytest.mark.ci

ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}
SPELLED = {"rope_theta": None, "partial_rotary_factor": None, "rope_parameters": ROPE}
CASES = {  # model_type -> that of the text, a case, changes of its config
    "mistral3": ("mistral", "mistral-v4", {}),
    "kimi_vl": ("deepseek_v3", "deepseek_v3-v4", {}),
    "lfm2_vl": ("lfm2", "lfm2-v4", {"block_dim": 64}),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2-v4", {}),
    "qwen3_vl": ("qwen3_vl_text", "qwen3-v4", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_moe-v4", {}),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_text-v4", SPELLED),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_text-v4", SPELLED),
    "gemma3n": ("gemma3n_text", "gemma3n_text-v4", {"altup_coef_clip": 120.0}),
    "gemma4": ("gemma4_text", "gemma4_e-v4", {}),
    "gemma4_unified": ("gemma4_unified_text", "gemma4_text-v4", {"enable_moe_block": False}),
    "llama4": ("llama4_text", "llama4_text-v4", {"attention_bias": False, "use_qk_norm": True}),
}
STACKED = {"qwen3_5_moe": False, "qwen3_vl_moe": True}  # whether inputs come before outputs


def multimodal(folder: Path, outer: str, *, stacked: bool = True) -> Path:
    """A source as the hub has it: a text_config, tensors under `model.language_model`."""
    inner, case, changes = CASES[outer]
    source = write_source(folder, case, changes=changes)
    text = config_of(source)
    tied = text.get("tie_word_embeddings", text.get("tie_embedding", True))
    config: dict[str, Any] = {
        "model_type": outer,
        "architectures": ["SeesAndWrites"],
        "text_config": {**text, "model_type": inner, "eos_token_id": None},
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": tied,
        "eos_token_id": [3, 5],
    }
    (source / "config.json").write_text(json.dumps(config))
    tensors = arrays_in(source)
    if stacked and outer in STACKED:
        tensors = packed(tensors)
        if STACKED[outer]:
            for name in [name for name in tensors if ".experts." in name]:
                tensors[name] = tensors[name].swapaxes(1, 2)
    # Towers that are known here stay, see test_convert_towers.py: these are checkpoints without.
    sees = {} if outer in TOWERS else {"model.visual.blocks.0.attn.qkv.weight": mx.zeros((2, 2))}
    whole = {name: array for name, array in prefixed(tensors, "hub").items() if "mtp." not in name}
    mx.save_safetensors(str(source / "model.safetensors"), whole | sees)
    return source


@pytest.mark.alike
@pytest.mark.parametrize("outer", CASES)
def test_a_multimodal_source_becomes_its_language_model(outer: str, tmp_path: Path) -> None:
    source = multimodal(tmp_path / "source", outer)
    expected = by_mlxinfer(source)
    convert(source, tmp_path / "out", "bf16")
    np.testing.assert_array_equal(by_mlxinfer(tmp_path / "out"), expected)
    config = config_of(tmp_path / "out")
    assert not config.keys() & {"vision_config", "audio_config"}
    assert config["eos_token_id"] == [3, 5]


# mlx-lm adds 1 to norms in bfloat16; it turns heads of Llama 4 otherwise, so the first place counts
AGREE = {"qwen3_5": (8, 0.2), "qwen3_5_moe": (8, 0.2), "llama4": (1, 2e-4)}


@pytest.mark.alike
@pytest.mark.parametrize("outer", [c for c in CASES if c != "gemma3n"])  # wants unused K and V
def test_mlx_lm_reads_the_quantised_language_model(outer: str, tmp_path: Path) -> None:
    source = multimodal(tmp_path / "source", outer)
    # mlx-lm quantises kv_b_proj anew, over inputs that here fill no group
    convert(source, tmp_path / "out", "bf16" if outer == "kimi_vl" else "8bit")
    count, tolerance = AGREE.get(outer, (8, 2e-4))
    ours, theirs = by_mlxinfer(tmp_path / "out")[:count], by_mlx_lm(tmp_path / "out")[:count]
    np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, theirs.std()))


@pytest.mark.alike
@pytest.mark.parametrize("outer", STACKED)
def test_stacks_of_experts_become_what_experts_one_by_one_do(outer: str, tmp_path: Path) -> None:
    """Gate and up in one tensor on the hub, with inputs or outputs first."""
    for stacked in (True, False):
        source = multimodal(tmp_path / f"source-{stacked}", outer, stacked=stacked)
        convert(source, tmp_path / f"{stacked}", "4bit-g32")
    one, other = (arrays_in(tmp_path / f"{stacked}") for stacked in (True, False))
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]) for name in one)


@pytest.mark.alike
@pytest.mark.parametrize("outer", ["llama4", "qwen3_vl_moe"])
def test_stacks_are_calibrated_under_the_names_that_are_written(
    outer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error feedback finds the inputs of experts, though their names differ from the decoder's."""
    source = multimodal(tmp_path / "source", outer)
    stated = config_of(source)["text_config"]
    config_of(source, text_config={**stated, "attention_chunk_size": 8192})  # Llama 4: one chunk
    text = TEXT * 3  # enough for each expert
    convert(source, tmp_path / "fed-back", "4bit-g32", calibration=text)
    monkeypatch.setattr(ConversionOptions, "feeds_back", False)
    convert(source, tmp_path / "nearest", "4bit-g32", calibration=text)
    one, other = (arrays_in(tmp_path / name) for name in ("fed-back", "nearest"))
    stacks = [name for name in one if "experts." in name or "switch_mlp." in name]
    stacks = [name for name in stacks if name.endswith(".weight") and one[name].ndim == 3]
    assert len(stacks) >= 3
    changed = [name for name in stacks if one[name].dtype == mx.uint32]
    assert changed
    assert all(not mx.array_equal(one[name], other[name]) for name in changed)


@pytest.mark.parametrize("tied", [True, False])
def test_the_outer_statement_of_a_tied_table_counts(tmp_path: Path, tied: bool) -> None:
    """transformers writes its default inside of text_config: what is written loads all the same."""
    source = multimodal(tmp_path / "source", "mistral3")
    text = {**config_of(source)["text_config"], "tie_word_embeddings": not tied}
    config_of(source, tie_word_embeddings=tied, text_config=text)
    tensors = {name: a for name, a in arrays_in(source).items() if tied <= ("lm_head" not in name)}
    if not tied:
        tensors["lm_head.weight"] = mx.ones((text["vocab_size"], 64))
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    convert(source, tmp_path / "out", "bf16")
    ours = by_mlxinfer(tmp_path / "out")
    assert np.array_equal(ours, by_mlxinfer(source))
    assert np.allclose(ours, by_mlx_lm(tmp_path / "out"), atol=1e-2)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is tied


def test_a_folder_that_would_not_load_is_not_written(tmp_path: Path, monkeypatch) -> None:
    source = write_source(tmp_path / "source")
    right = run.config_json

    def wrong(*given: Any) -> dict[str, Any]:
        return right(*given) | {"num_hidden_layers": 7}

    monkeypatch.setattr(run, "config_json", wrong)
    with pytest.raises(ConversionError, match="The result would not load"):
        convert(source, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_stacks_with_either_order_of_down_proj(tmp_path: Path) -> None:
    """Versions of transformers turn the matrices of Qwen3-VL's experts, or not."""
    source = multimodal(tmp_path / "source", "qwen3_vl_moe")
    expected = by_mlxinfer(source)
    tensors = arrays_in(source)
    for end in ("down_proj", "gate_up_proj"):
        for name in [name for name in tensors if name.endswith(f"experts.{end}")]:
            tensors[name] = tensors[name].swapaxes(1, 2)
        mx.eval(tensors)
        mx.save_safetensors(str(source / "model.safetensors"), tensors)
        convert(source, tmp_path / end, "bf16")
        np.testing.assert_array_equal(by_mlxinfer(source), expected)
        np.testing.assert_array_equal(by_mlxinfer(tmp_path / end), expected)
