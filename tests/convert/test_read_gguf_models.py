"""Whole models as GGUF: tensors, config and logits are those of the checkpoints they came from."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from convert_cases import check_values, logits
from gguf import GGMLQuantizationType as Kind
from models.random_weights import tiny_tensors
from models.tiny import tiny_checkpoint, tiny_config, write
from oracles.gguf_files import finish, llama3_factors, write_model

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import SourceModel, open_source
from mlxinfer.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

YARN = {
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.6,
        "mscale_all_dim": 0.6,
    }
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {  # what a GGUF file can say, which is less than a config can
    "llama-v4": {},
    "llama-v4 with biases": {"attention_bias": True},
    "mistral-v4": {},
    "qwen2-v4": {},
    "qwen3-v4": {},
    "qwen3_moe-v4": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3_text-v4": {
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "num_hidden_layers": 7,
    },
    "gpt_oss-v4": {},
    "qwen3_5_text-v4": {},
    "qwen3_5_moe_text-v4": {},
    "qwen3_next-v4": {"mlp_only_layers": []},
    "gemma4_text-v4": {},
    "gemma4_e-v4": {},
    "lfm2-v4": {},
    "lfm2_moe-v4": {},
    "glm4-v4": {},
    "glm4_moe-v4": {},
    "glm4_moe-v5": {},
    "deepseek_v2-v5": {"attention_bias": False},
    "deepseek_v2-v5 with kv_b": {"attention_bias": False},
    "deepseek_v3-v4": YARN,
    "deepseek_v3-v4 with kv_b": YARN,
}


def make(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = {**tiny_config(case.split()[0]), **FILES[case]}
    return config, tiny_tensors(config)


def opened(folder: Path, case: str, **more: Any) -> SourceModel:
    config, tensors = make(case)
    path = folder / "model.gguf"
    write_model(path, config, tensors, rope_factors=llama3_factors(config), **more)
    return open_source(path)


def read(source: SourceModel) -> dict[str, mx.array]:
    arranged = arrange(source)
    return {output.name: arranged.whole(output) for output in arranged.outputs}


@pytest.mark.alike
@pytest.mark.parametrize("case", FILES)
def test_a_model_gives_the_logits_that_it_had(tmp_path: Path, case: str) -> None:
    config, tensors = make(case)
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    expected = logits(write(tmp_path / "hf", config, arrays))
    source = opened(tmp_path, case, split_kv="kv_b" not in case)
    actual = logits(write(tmp_path / "back", dict(source.config), read(source)))
    assert np.abs(actual - expected).max() <= 2e-5 * max(1.0, expected.std())
    assert expected.std() > 0.5


def test_quantised_rows_are_put_in_order_too(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.0.attn_k.weight": Kind.Q4_1}
    _, tensors = make("llama-v4")
    source = opened(tmp_path, "llama-v4", kinds=kinds)
    for part, bits in (("q", 8), ("k", 4)):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        values = np.array(source.read(name))
        error = np.abs(values - tensors[name]).max()
        assert 0 < error < 0.3 * np.abs(tensors[name]).max() / (1 if bits == 4 else 16)
        check_values(source, name, values, codes=True)


def test_stacked_experts_have_codes(tmp_path: Path) -> None:
    """(experts, out, in) blocks: gpt-oss as published in GGUF."""
    kinds = {"blk.1.ffn_up_exps.weight": Kind.MXFP4}
    source = opened(tmp_path, "gpt_oss-v4", kinds=kinds)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    packed = source.read_packed(name)
    assert packed.weight.shape == (4, 48, 8)
    assert packed.scales.shape == (4, 48, 2)
    check_values(source, name, np.array(source.read(name)), codes=True)


def test_what_predicts_further_ahead_is_kept(tmp_path: Path) -> None:
    config, tensors = make("qwen3_5_text-v4")
    layer = next(n.partition(".self_attn")[0] for n in tensors if n.endswith("q_norm.weight"))
    ahead = {
        name.replace(layer, "mtp.layers.0"): values
        for name, values in tensors.items()
        if name.startswith(f"{layer}.")
    }
    hidden = config["hidden_size"]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    ahead |= {f"mtp.{name}.weight": np.full(hidden, 0.25, np.float32) for name in norms}
    ahead["mtp.fc.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    config["mtp_num_hidden_layers"] = 1
    write_model(tmp_path / "model.gguf", config, {**tensors, **ahead})
    by_name = {n: a for n, a in read(open_source(tmp_path / "model.gguf")).items() if "mtp." in n}
    assert set(by_name) == set(ahead)
    for name, array in by_name.items():
        np.testing.assert_allclose(np.array(array), ahead[name], rtol=0, atol=1e-6)


def recurrent(path: Path, kind: Kind, dims: int, heads: int) -> tuple[str, np.ndarray]:
    """Write a model with recurrent layers; the output matrix of one, which is of this kind."""
    config, _ = make("qwen3_5_text-v4")
    config |= {"linear_value_head_dim": dims, "linear_num_value_heads": heads}
    tensors = tiny_tensors(config)
    (name, *_) = (name for name in tensors if name.endswith("linear_attn.out_proj.weight"))
    kinds = {f"blk.{name.split('.')[2]}.ssm_out.weight": kind}
    write_model(path, config, tensors, kinds=kinds)
    return name, tensors[name]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q6_K, Kind.MXFP4])
def test_quantised_columns_are_put_in_order(tmp_path: Path, kind: Kind) -> None:
    """Inputs of a recurrent layer's output, a value head of 64 or of 32 at a time."""
    name, matrix = recurrent(tmp_path / "model.gguf", kind, 64, 8)
    source = open_source(tmp_path / "model.gguf")
    actual = np.array(source.read(name))
    assert 0 < np.abs(actual - matrix).max() < 0.2 * np.abs(matrix).max()
    check_values(source, name, actual, codes=kind != Kind.Q6_K)


def test_columns_with_divided_blocks_are_refused(tmp_path: Path) -> None:
    recurrent(tmp_path / "m.gguf", Kind.Q8_0, 16, 4)
    with pytest.raises(UnsupportedModelError, match="divides its blocks of 32"):
        open_source(tmp_path / "m.gguf")


def test_split_files_are_one_source(tmp_path: Path) -> None:
    config, tensors = make("qwen3-v4")
    write_model(tmp_path / "model.gguf", config, tensors, split=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for chosen in (parts[0], parts[-1], tmp_path):
        source = open_source(chosen)
        assert len(source.tensors) == len(tensors)
        assert all(
            np.array_equal(np.array(source.read(name)), tensors[name]) for name in source.tensors
        )
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of"):
        open_source(parts[0])


def test_parts_of_different_splits_are_refused(tmp_path: Path) -> None:
    config, tensors = make("qwen3-v4")
    write_model(tmp_path / "model.gguf", config, tensors, split=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="Part 2"):
        open_source(parts[0])


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    opened(tmp_path, "qwen3-v4")
    (tmp_path / "other.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    (tmp_path / "mmproj-model.gguf").write_bytes(b"not looked at")
    with pytest.raises(CheckpointError, match="2 GGUF models"):
        open_source(tmp_path)


def test_fingerprints_follow_the_file_its_metadata_and_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.gguf", tmp_path / "other"
    first = opened(tmp_path, "qwen3-v4").fingerprint
    assert open_source(path).fingerprint == first
    data = bytearray(path.read_bytes())
    path.write_bytes(data)
    assert open_source(path).fingerprint != first
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    first = open_source(path, tokenizer=other).fingerprint
    (other / "tokenizer.json").write_text("[]")
    assert open_source(path, tokenizer=other).fingerprint != first
    # Even where size and times say nothing.
    monkeypatch.setattr("mlxinfer.convert.read.gguf.source.file_state", lambda stat: "")
    first = open_source(path).fingerprint
    data[data.index(b"qwen3.rope.freq_base") + len(b"qwen3.rope.freq_base") + 4] ^= 1
    path.write_bytes(data)
    assert open_source(path).fingerprint != first


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for arch, tensor, message in (
        ("mamba", "token_embd.weight", "'mamba'.*many more models run"),
        ("qwen3", "blk.0.ssm_in.weight", "ssm_in"),
    ):
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(1)
        writer.add_tensor(tensor, np.zeros((4, 64), np.float32))
        finish(writer)
        with pytest.raises(UnsupportedModelError, match=message):
            open_source(path)


def test_a_file_that_is_truncated_says_so(tmp_path: Path) -> None:
    opened(tmp_path, "qwen3-v4")
    path = tmp_path / "model.gguf"
    data = path.read_bytes()
    for size in (0, 3, 20, 400, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"truncated|empty"):
            open_source(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = opened(tmp_path, "qwen3-v4")
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="changed"):
        source.read("model.norm.weight")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, data, words in (
        ("model.bin", b"\x80\x04", "pickle"),
        ("weights.npz", b"PK", r"\.gguf"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            open_source(tmp_path / name)
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        open_source(tmp_path / "nowhere")


def test_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "hf", "qwen3-v4")
    config, tensors = make("qwen3-v4")
    write_model(tmp_path / "model.gguf", config, tensors)
    without = open_source(tmp_path / "model.gguf")
    assert without.side_files() == {}
    with pytest.raises(ModelNotFoundError, match=r"hf, has no tokenizer\.json"):
        open_source(tmp_path / "model.gguf", tokenizer=folder)
    (folder / "tokenizer.json").write_text("{}")
    source = open_source(tmp_path / "model.gguf", tokenizer=folder)
    assert source.side_files() == {"tokenizer.json": folder / "tokenizer.json"}


def test_of_a_folder_only_the_tokenizer_is_exchanged(tmp_path: Path) -> None:
    source, other = (tiny_checkpoint(tmp_path / name, "qwen3-v4") for name in ("own", "other"))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text("{}")
    (other / "tokenizer.json").write_text("{}")
    assert open_source(source, tokenizer=other).side_files() == {
        "tokenizer.json": other / "tokenizer.json",
        "generation_config.json": source / "generation_config.json",
    }


def test_parts_beside_the_language_model_are_left_out_and_said(tmp_path: Path) -> None:
    """As other exporters write: a tower and a module that predicts ahead, by names of their own."""
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    config, tensors = make("qwen3_5_text-v4")
    write_model(path, config, tensors)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(other, "qwen35")
    for key, field in reader.fields.items():
        if key.startswith("qwen35."):
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_uint32("qwen35.vision.block_count", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name.replace("ssm_dt.bias", "ssm_dt"), np.array(tensor.data))
    for name in ("v.blk.0.attn_q.weight", "mm.0.weight", "mtp.layers.0.attn_q.weight"):
        writer.add_tensor(name, np.ones((8, 8), np.float32))
    finish(writer)
    source = open_source(other)
    assert "3 tensors (mm.0.weight" in source.notes[0]
    assert source.tensors.keys() == open_source(path).tensors.keys()
