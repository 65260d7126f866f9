"""Conversions of models with recurrent layers: their tensors have layouts of their own."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, by_mlxinfer, convert, write_source, write_tokenizer
from models.cases import CASES as ALL_CASES
from models.dense_kv import DenseCache
from models.random_weights import tiny_tensors
from models.runs import alike
from models.test_hybrid_layouts import packed, tensors_of
from models.tiny import arrays_in, config_of
from oracles.checkpoints import bf16, f32, from_bf16, write_folder
from oracles.floats import E4M3_VALUES, finite_e4m3, fp4_rows
from speculation.head_checkpoints import write
from speculation.head_names import MTP_CASES, mtp_tensors, num_streams

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import load
from mlxinfer.models.mtp import load_mtp
from tests.tables import words

pytestmark = pytest.mark.ci

CASES = words("""
    qwen3_next-v4 qwen3_5_text-v4 qwen3_5_moe_text-v4 granitemoehybrid-v4 lfm2-v4 gemma4_text-v4
    llama4_text-v4 mistral4-v4 deepseek_v4-v4
""")

EIGHT_BITS = tuple(
    f"{name}.weight"
    for name in words("wq_a wq_b attn.wkv wo_a wo_b experts.w1 experts.w2 experts.w3")
)


@pytest.mark.parametrize("case", alike(CASES))
def test_a_conversion_that_quantises_nothing_changes_nothing(case: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", case)
    convert(source, tmp_path / "out", "bf16")
    np.testing.assert_array_equal(by_mlxinfer(tmp_path / "out"), by_mlxinfer(source))


def test_stacks_of_a_model_that_says_nothing_of_their_order_are_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    stored = arrays_in(source)
    mx.save_safetensors(str(source / "model.safetensors"), packed(stored))
    with pytest.raises(UnsupportedModelError, match=r"experts\.\w+' .* inputs before outputs"):
        convert(source, tmp_path / "out", "bf16")


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    """Experts of four bits, other matrices of eight, scales that are powers of two; some of 16."""
    rng, stored, plain = np.random.default_rng(0), {}, {}
    for name, value in tiny_tensors(ALL_CASES["deepseek_v4-wide"]).items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        path, rows, columns = name.removesuffix(".weight"), value.shape[0], value.shape[-1]
        if ".experts." in name:
            octets = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
            powers = rng.integers(120, 126, (rows, columns // 32)).astype(np.uint8)
            stored[name] = "I8", octets.view(np.int8)
            plain[name] = fp4_rows(octets) * np.repeat(np.exp2(powers - 127.0), 32, axis=1)
        elif name.endswith(EIGHT_BITS):
            codes = finite_e4m3(value.shape, seed=rows) & 0xBF  # up to 2
            powers = rng.integers(122, 126, (-(-rows // 128), -(-columns // 128))).astype(np.uint8)
            scales = np.repeat(np.repeat(np.exp2(powers - 127.0), 128, axis=0), 128, axis=1)
            stored[name] = "F8_E4M3", codes
            plain[name] = E4M3_VALUES[codes] * scales[:rows, :columns]
        else:
            stored[name] = ("I64", value) if value.dtype == np.int64 else bf16(value)
            plain[name] = value if value.dtype == np.int64 else from_bf16(stored[name])
            continue
        stored[f"{path}.scale"] = "F8_E8M0", powers
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    source = write_folder(tmp_path / "source", stored, method, **ALL_CASES["deepseek_v4-wide"])
    write_tokenizer(source)
    convert(source, tmp_path / "out", "bf16")
    exact = {n: f32(v) if v.dtype != np.int64 else ("I64", v) for n, v in plain.items()}
    config = {**ALL_CASES["deepseek_v4-wide"], "dtype": "bfloat16"}
    same = write_folder(tmp_path / "plain", exact, **config)
    write_tokenizer(same)
    np.testing.assert_array_equal(by_mlxinfer(tmp_path / "out"), by_mlxinfer(same))


def ahead(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """A module that predicts further ahead, made of one attention layer of the model."""
    layer = {n: a for n, a in tensors.items() if n.startswith("model.layers.3.")}
    assert any("self_attn" in name for name in layer)
    renamed = {n.replace("model.layers.3.", "mtp.layers.0."): a for n, a in layer.items()}
    return renamed | {"mtp.fc.weight": mx.ones((64, 128)), "mtp.norm.weight": mx.ones((64,))}


@pytest.mark.alike
@pytest.mark.parametrize("case", ["qwen3_5_text-v4", "qwen3_5_moe_text-v4"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_heads_that_predict_ahead_are_kept(case: str, prefix: str, tmp_path: Path) -> None:
    whole = ahead(tensors_of(case))
    more = {prefix + name: array for name, array in whole.items()}
    source = write_source(tmp_path / "source", case, more=more)
    convert(write_source(tmp_path / "plain", case), tmp_path / "plain-out", "bf16")
    report = convert(source, tmp_path / "out", "bf16")
    np.testing.assert_array_equal(
        by_mlxinfer(tmp_path / "out"), by_mlxinfer(tmp_path / "plain-out")
    )
    kept = arrays_in(tmp_path / "out")
    assert {name for name in kept if "mtp." in name} >= {"mtp.fc.weight", "mtp.norm.weight"}
    count = sum(name.startswith("mtp.") for name in kept)
    assert any(note.startswith(f"{count} tensors (mtp.fc.weight") for note in report.notes)


def test_what_predicts_further_ahead_has_a_format_of_its_own(tmp_path: Path) -> None:
    """A target counts it, and measures the decoder alone."""
    case = "qwen3_5_text-v4"
    source = write_source(tmp_path / "source", case, more=ahead(tensors_of(case)))
    report = convert(source, tmp_path / "out", calibration=TEXT, target_bpw=6.5)
    assert report.bits_per_weight <= 6.5
    formats = {t["name"]: t["format"] for t in report.tensors if t["name"].startswith("mtp.")}
    assert formats["mtp.fc.weight"] == "8bit-g64"
    assert formats["mtp.norm.weight"] == "bfloat16"
    assert formats["mtp.layers.0.self_attn.q_proj.weight"].startswith("4bit")
    assert np.isfinite(by_mlxinfer(tmp_path / "out")).all()


def test_layers_behind_the_last_one_are_kept_and_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "deepseek_v3-v4", changes={"num_hidden_layers": 2})
    assert config_of(source)["num_hidden_layers"] == 2
    whole = write_source(tmp_path / "whole", "deepseek_v3-v4", changes={"num_hidden_layers": 3})
    config_of(whole, num_hidden_layers=2, num_nextn_predict_layers=1)
    for target in (None, 8.5):
        out = tmp_path / f"out-{target}"
        report = convert(whole, out, calibration=TEXT, target_bpw=target)
        kept = arrays_in(out)
        assert any(name.startswith("model.layers.2.") for name in kept)
        assert any("tensors (model.layers.2." in note for note in report.notes)
        assert np.isfinite(by_mlxinfer(out)).all()


def test_experts_of_gemma_4_are_quantised_as_other_matrices(tmp_path: Path) -> None:
    """Stacks that have no modules of their own on the hub, gate and up in one."""
    case = "gemma4_text-v4"
    source = write_source(tmp_path / "source", case, changes={"moe_intermediate_size": 64})
    report = convert(source, tmp_path / "out", "4bit-g32", calibration=TEXT)
    formats = {t["name"]: t["format"] for t in report.tensors if ".layers.0." in t["name"]}
    stacks = [n for n in formats if ".experts." in n]
    assert len(stacks) == 3
    assert {formats[name] for name in stacks} == {"4bit-g32"}
    assert formats["model.layers.0.router.proj.weight"] == "8bit-g64"
    plain = by_mlxinfer(source)
    changed = by_mlxinfer(tmp_path / "out") - plain
    assert 0 < np.abs(changed).mean() < 0.5 * plain.std()
    target = convert(source, tmp_path / "target", calibration=TEXT, target_bpw=6.0)
    assert target.bits_per_weight <= 6.0


@pytest.mark.alike
@pytest.mark.parametrize("case", MTP_CASES)
@pytest.mark.parametrize("recipe", ["bf16", "8bit"])
def test_a_kept_head_predicts_as_that_of_the_source(case: str, recipe: str, tmp_path: Path) -> None:
    """Latent and gated attention, experts stored one by one and stacked, norms less one."""
    source = write_source(tmp_path / "source", case)
    stated = config_of(source, num_nextn_predict_layers=1)
    tensors = {n: np.array(a.astype(mx.float32)) for n, a in arrays_in(source).items()}
    write(source, stated, tensors | mtp_tensors(stated, tensors), None)
    convert(source, tmp_path / "out", recipe)
    before, after = (head_logits(folder) for folder in (source, tmp_path / "out"))
    rows = np.sort(np.abs(before - after).max(axis=-1) / before.std())
    # In one row, two experts of nearly the same score may change places.
    assert rows[-2] < (0.2 if recipe == "bf16" else 0.6)
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.99


def head_logits(folder: Path) -> np.ndarray:
    """Of the head in a folder, over random hidden states."""
    model = load(folder, dtype="float32")
    head = load_mtp(folder, model)
    width = num_streams(config_of(folder)) * model.config.hidden_size
    hidden = np.random.default_rng(0).standard_normal((12, width))
    head.feed(mx.array(hidden.astype(np.float32)))
    logits = DenseCache(head).run(head, [("a", list(range(5, 17)))])
    return np.array(logits.astype(mx.float32))
