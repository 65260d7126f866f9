"""From other formats to an MLX folder: codes are copied where MLX has the format."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert_cases import TEXT, convert, logits, write_source
from models.random_weights import tiny_tensors
from models.tiny import config_of, tiny_checkpoint, tiny_config
from oracles.gguf_files import as_llama_cpp, write_model

from mlxinfer.convert.arrange import OutputTensor, arrange
from mlxinfer.convert.calibration.logits import limits_for
from mlxinfer.convert.plan import make_plan
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, affine, make_recipe, name_of
from mlxinfer.convert.run import Conversion, judged_bits
from mlxinfer.convert.verify import ShardReader
from mlxinfer.errors import CheckpointError, ConversionError

Kind = gguf.GGMLQuantizationType
IDS = [5, 17, 3, 80, 41, 9]


def write_gguf(path: Path, kinds: dict[str, Kind]) -> Path:
    config = {**tiny_config("qwen3-v4"), "tie_word_embeddings": False}
    write_model(path, config, tiny_tensors(config), kinds=kinds)
    return path


KINDS = {
    "blk.0.attn_q.weight": Kind.Q4_0,
    "blk.0.ffn_up.weight": Kind.Q8_0,
    "blk.1.ffn_gate.weight": Kind.Q5_1,
    "blk.2.attn_v.weight": Kind.MXFP4,
}


def test_gguf_codes_are_kept_and_norms_do_not_widen_the_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", KINDS)
    report = convert(source, tmp_path / "out", "keep")
    actual = {t["name"]: (t["format"], t["status"]) for t in report.tensors}
    layers = "model.layers."
    assert actual[f"{layers}0.self_attn.q_proj.weight"] == ("4bit-g32", "exact")
    assert actual[f"{layers}0.mlp.up_proj.weight"] == ("8bit-g32", "exact")
    assert actual[f"{layers}1.mlp.gate_proj.weight"] == ("5bit-g32", "exact")
    assert actual[f"{layers}2.self_attn.v_proj.weight"] == ("mxfp4", "exact")
    header = ShardReader(tmp_path / "out" / "model.safetensors").tensors
    model_dtype = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
    assert header["model.norm.weight"].dtype == model_dtype[open_source(source).dtype]
    assert header[f"{layers}0.self_attn.q_proj.scales"].dtype == "F16"
    plain = convert(source, tmp_path / "plain", "fp32")
    assert plain.bits_per_weight == 32
    expected = logits(tmp_path / "plain", IDS)
    error = np.abs(logits(tmp_path / "out", IDS) - expected).max()
    assert error < 4e-2 * max(1, expected.std())  # norms in bfloat16 have 8 bits


KEPT = {  # type in the source: format in the output, bits in the source
    Kind.F16: ("float16", 16),
    Kind.BF16: ("bfloat16", 16),
    Kind.Q6_K: ("8bit-g32", 6.5625),
    Kind.IQ4_NL: ("8bit-g32", 4.5),
    Kind.IQ4_XS: ("8bit-g32", 4.25),
    Kind.Q4_K: ("4bit-g32", 4.5),
    Kind.Q5_K: ("5bit-g32", 5.5),
    Kind.Q8_0: ("8bit-g32", 8.5),
    Kind.Q3_K: ("6bit-g32", 3.4375),
    Kind.Q2_K: ("6bit-g32", 2.625),
}


@pytest.mark.alike
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_keeping_formats_loses_next_to_nothing(tmp_path: Path, kind: Kind) -> None:
    """Where MLX has no such format the next better one is taken, and what is dense stays dense."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = {**tiny_config("qwen3-v4"), **changes, "tie_word_embeddings": False}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    matrices = ["blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"]
    write_model(
        tmp_path / "m.gguf", config, tiny_tensors(config), kinds=dict.fromkeys(matrices, kind)
    )
    options = ConversionOptions(recipe=make_recipe("keep"))
    report = Conversion(open_source(tmp_path / "m.gguf"), tmp_path / "out", options).run()
    unread = ConversionOptions(recipe=make_recipe("keep"), searched=False, check_tensors=False)
    fast = Conversion(open_source(tmp_path / "m.gguf"), tmp_path / "fast", unread).run()
    assert fast.counts == report.counts  # also where nothing is read again
    for one, other in zip(fast.tensors, report.tensors, strict=True):
        assert one["relative"] == pytest.approx(other["relative"], rel=0.5), one["name"]
    form, bits = KEPT[kind]
    stored = kind.name.lower() if kind in (Kind.F16, Kind.BF16) else kind.name
    [row] = [row for row in report.by_source if row["stored"] == stored]
    assert (row["format"], row["count"]) == (form, len(matrices))
    assert row["source_bits"] == pytest.approx(bits, abs=1e-3)
    assert row["relative"] < (0.02 if row["bits"] < 8 else 0.006)


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.BF16, "bfloat16"), (Kind.F16, "float16")])
def test_float32_norms_of_a_gguf_become_its_dtype(tmp_path: Path, kind: Kind, dtype: str) -> None:
    config = {**tiny_config("qwen3-v4"), "tie_word_embeddings": False}
    names = [n for n, v in as_llama_cpp(config, tiny_tensors(config)).items() if v.ndim == 2]
    source = write_gguf(tmp_path / "m.gguf", dict.fromkeys(names, kind))
    report = convert(source, tmp_path / "out", "keep")
    assert {tensor["format"] for tensor in report.tensors} == {dtype}


def test_a_divergence_is_judged_by_the_bits_of_what_is_kept(tmp_path: Path) -> None:
    """Of the source, where a format is kept; of the output, where one was asked for."""
    arranged = arrange(open_source(write_source(tmp_path / "m")))
    assert limits_for(judged_bits(make_plan(arranged, make_recipe("keep")))) == limits_for(16)
    four = make_plan(arranged, make_recipe("4bit-g32"))
    assert limits_for(judged_bits(four)) == limits_for(four.bits_per_weight) > limits_for(16)
    both = make_plan(arranged, make_recipe("4bit-g32", keep_format=True))
    assert limits_for(judged_bits(both)) == limits_for(judged_bits(four))
    stored = {"stored": "Q6_K", "stored_bytes": 10**6, "lossless": affine(4, 32)}
    outputs = tuple(replace(output, **stored) for output in arranged.outputs)
    kept = make_plan(replace(arranged, outputs=outputs), make_recipe("keep"))
    assert kept.bits_per_weight < 16
    assert limits_for(judged_bits(kept)) == limits_for(16)


@pytest.mark.parametrize(
    ("stored", "bits", "form"),
    [
        ("GPTQ int4 g64 act-order", 4.3, "8bit-g32"),
        ("GPTQ int3 g64 act-order", 3.3, "6bit-g32"),
        ("fp8 per row", 8.01, "8bit-g32"),
        ("nvfp4 g16 with a global scale", 4.5, "8bit-g32"),
    ],
)
def test_formats_that_mlx_lacks_are_kept_as_better(stored: str, bits: float, form: str) -> None:
    path, shape = "model.layers.0.mlp.up_proj", (64, 64)
    num_bytes = int(bits * 64 * 64 / 8)
    output = OutputTensor(f"{path}.weight", (path,), shape, "float32", stored, num_bytes)
    assert name_of(make_recipe("keep").choose(output)) == form
    assert name_of(make_recipe("2bit", keep_format=True).choose(output)) == form
    odd = replace(output, shape=(64, 63))
    assert make_recipe("keep").choose(odd) is None, "groups of 32 fill no row: dense"


def test_without_a_tokenizer_it_is_said_what_to_do(tmp_path: Path) -> None:
    source, out = write_gguf(tmp_path / "m.gguf", KINDS), tmp_path / "out"
    with pytest.raises(ConversionError, match=r"no tokenizer.*--tokenizer FOLDER.*--check tensors"):
        convert(source, out, "keep", calibration=TEXT)
    assert not list(tmp_path.glob("out*"))
    assert "--tokenizer FOLDER" in convert(source, tmp_path / "without", "keep").notes[0]
    options = ConversionOptions(recipe=make_recipe("keep"), calibration=TEXT)
    opened = open_source(source, tokenizer=write_source(tmp_path / "hf"))
    assert Conversion(opened, out, options).run().passed
    assert (out / "tokenizer.json").is_file()


def test_a_format_that_is_asked_for_is_copied_and_others_are_not(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", KINDS)
    by_name = {
        t["name"]: t["status"] for t in convert(source, tmp_path / "out", "4bit-g32").tensors
    }
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == "exact"  # Q4_0 is 4bit-g32
    assert by_name["model.layers.0.mlp.up_proj.weight"] == "requantised"
    noted = convert(source, tmp_path / "again", "mxfp4").notes
    assert any("already (Q4_0, Q8_0, Q5_1)" in note for note in noted)
    kept = convert(source, tmp_path / "kept", "keep", overrides=("up_proj=4bit-g32",))
    by_name = {t["name"]: t["format"] for t in kept.tensors}
    assert by_name["model.layers.0.mlp.up_proj.weight"] == "4bit-g32"
    assert by_name["model.layers.1.mlp.gate_proj.weight"] == "5bit-g32"


@pytest.mark.alike
@pytest.mark.parametrize("recipe", ["keep", "bf16", "mxfp4"])
def test_mlx_checkpoints_are_sources_too(tmp_path: Path, recipe: str) -> None:
    source = write_source(tmp_path / "plain", "qwen3_moe-v4")
    convert(source, tmp_path / "four", "4bit-g32")
    report = convert(tmp_path / "four", tmp_path / "out", recipe)
    close = 1e-5 if recipe == "keep" else 0.05 if recipe == "bf16" else 3.0
    before, after = logits(tmp_path / "four", IDS), logits(tmp_path / "out", IDS)
    assert np.abs(after - before).max() <= close * before.std()
    assert (set(report.counts) == {"exact"}) == (recipe == "keep")


@pytest.mark.parametrize("override", ["down_proj=8bit-g32", "o_proj=mxfp4"])
def test_exceptions_left_out_of_a_config_are_refused_by_name(tmp_path: Path, override: str) -> None:
    """8 bits in groups of 32 have the shapes of 4 in groups of 64 and twice the inputs."""
    sizes = {"intermediate_size": 64, "head_dim": 32}
    source = write_source(tmp_path / "plain", "qwen3-v4", changes=sizes)
    convert(source, tmp_path / "four", "4bit-g64", overrides=(override,))
    config = config_of(tmp_path / "four")
    stated = config.pop("quantization")
    config["quantization"] = {k: v for k, v in stated.items() if not isinstance(v, dict)}
    del config["quantization_config"]
    (tmp_path / "four" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{override.partition('=')[0]}\."):
        convert(tmp_path / "four", tmp_path / "out", "keep")


@pytest.mark.alike
@pytest.mark.parametrize("case", ["deepseek_v3-v4", "granitemoehybrid-v4", "gemma4_e-v4"])
def test_quantised_families_with_odd_widths_are_converted_again(tmp_path: Path, case: str) -> None:
    four = tiny_checkpoint(tmp_path / "four", case, quantize={"group_size": 32, "bits": 4})
    report = convert(four, tmp_path / "out", "keep")
    assert set(report.counts) == {"exact"}
    np.testing.assert_allclose(logits(tmp_path / "out", IDS), logits(four, IDS), atol=1e-4)


def test_experts_of_gpt_oss_stay_mxfp4(tmp_path: Path) -> None:
    """As published: blocks and scales, taken apart into gate and up."""
    folder = write_source(tmp_path / "dense", "gpt_oss-v4")
    convert(folder, tmp_path / "mxfp4", "mxfp4")
    again = convert(tmp_path / "mxfp4", tmp_path / "again", "8bit-g32", run={})
    assert "requantised" in again.counts
    kept = convert(tmp_path / "mxfp4", tmp_path / "kept", "keep")
    assert set(kept.counts) == {"exact"}
    assert np.array_equal(logits(tmp_path / "kept", IDS), logits(tmp_path / "mxfp4", IDS))
