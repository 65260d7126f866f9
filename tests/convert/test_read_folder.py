"""Folders of safetensors as sources: order, rows, memory, what is left out, what changes."""

import ast
import json
import os
import re
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import convert, write_source
from models.tiny import config_of, tiny_checkpoint
from oracles.checkpoints import bf16, f16, f32, from_bf16, write_file, write_folder

import mlxinfer
from mlxinfer.convert.read import expert_groups, open_source
from mlxinfer.convert.read.folder import local_side_files
from mlxinfer.errors import CheckpointError, ModelNotFoundError

RNG = np.random.default_rng(0)


def test_every_dtype_comes_as_it_is(tmp_path: Path) -> None:
    values = RNG.normal(0, 1, (6, 10)).astype(np.float32)
    stored = {"a": f32(values), "b": f16(values), "c": bf16(values), "s": f32(3.5)}
    source = open_source(write_folder(tmp_path, stored))
    assert [info.dtype for info in source.tensors.values()] == [
        *("float32", "float16", "bfloat16", "float32")
    ]
    assert np.array_equal(np.array(source.read("a")), values)
    assert np.array_equal(np.array(source.read("b", slice(2, 4))), values[2:4].astype(np.float16))
    assert source.read("c").dtype == mx.bfloat16
    assert np.array_equal(np.array(source.read("c").astype(mx.float32)), from_bf16(stored["c"]))
    assert source.read("s").item() == 3.5
    assert source.tensors["b"].stored_bytes == 120


def test_rows_are_a_range_of_the_first_axis(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    source = open_source(write_folder(tmp_path, {"a": f32(values)}))
    for rows in (
        slice(None),
        slice(2, None),
        slice(-2, None),
        slice(4, 100),
        slice(3, 3),
        slice(5, 2),
    ):
        expected = values[rows]
        assert np.array_equal(np.array(source.read("a", rows)), expected)
    with pytest.raises(ValueError, match="step"):
        source.read("a", slice(0, 6, 2))
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        source.read("b")
    with pytest.raises(CheckpointError, match="values"):
        source.read_packed("a")


def test_tensors_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    write_file(tmp_path / "model-2.safetensors", {"d": f32([1]), "a": f32([2])})
    write_file(tmp_path / "model-1.safetensors", {"c": f32([3]), "b": f32([4])})
    assert list(open_source(tmp_path).tensors) == ["c", "b", "d", "a"]


def test_a_few_rows_of_a_large_tensor_take_little_memory(tmp_path: Path) -> None:
    """Two gigabytes that take no room on the disk."""
    shape = (32_768, 32_768)
    header = {"a": {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 * shape[0] * shape[1]]}}
    text = json.dumps(header).encode()
    write_folder(tmp_path, {})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * shape[0] * shape[1])
    before = mx.get_active_memory()  # of models that other tests share
    mx.reset_peak_memory()
    tracemalloc.start()
    source = open_source(tmp_path)
    rows = source.read("a", slice(30_000, 30_016))
    mx.eval(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.shape == (16, 32_768)
    assert peak < 4 << 20
    assert mx.get_peak_memory() - before < 16 << 20


def test_the_config_loses_what_is_undone_and_notes_name_the_rest(tmp_path: Path) -> None:
    stored = {
        "a.weight": f32(np.ones((2, 2))),
        "a.k_scale": f32(1.0),
        "model.layers.0.self_attn.rotary_emb.inv_freq": f32([1, 2]),
    }
    text = {"hidden_size": 8, "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    source = open_source(write_folder(tmp_path, stored, model_type="gemma3", text_config=text))
    assert source.config == {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 8, "dtype": "bfloat16"},
    }
    assert list(source.tensors) == ["a.weight"]
    assert (source.dtype, source.format) == ("bfloat16", "FP8")
    assert source.notes == (
        "Scales of activations and of the KV cache are left out: they are not weights.",
        "config.json says that weights are fp8; all of them are plain floats.",
    )


def test_the_dtype_is_that_of_most_numbers_where_the_config_is_silent(tmp_path: Path) -> None:
    stored = {"a": f32(np.ones(4)), "b": bf16(np.ones((4, 4)))}
    assert open_source(write_folder(tmp_path, stored)).dtype == "bfloat16"


def test_fingerprints_follow_files(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "a", "llama")
    first = open_source(folder).fingerprint
    assert open_source(folder).fingerprint == first
    stat = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = open_source(folder).fingerprint
    config_of(folder, rope_theta=7.0)
    assert len({first, second, open_source(folder).fingerprint}) == 3


def test_side_files_are_those_of_tokenizer_and_templates(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "additional_chat_templates").mkdir()
    wanted = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
    for name in [*wanted, "modeling.py", "README.md", "training_args.bin"]:
        (folder / name).write_text(name)
    files = open_source(folder).side_files()
    assert sorted(files) == sorted(wanted)
    assert all(path == folder / name for name, path in files.items())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle"):
        open_source(tmp_path)
    write_folder(tmp_path, {"a": f32([1])}, model_type=3)
    with pytest.raises(CheckpointError, match="model_type"):
        open_source(tmp_path)
    write_folder(tmp_path, {})
    with pytest.raises(CheckpointError, match="no tensors"):
        open_source(tmp_path)


def test_bundled_models_have_their_names() -> None:
    source = open_source("demo")
    assert source.format == "MLX"
    assert "tokenizer.json" in source.side_files()


def test_experts_are_grouped_in_order() -> None:
    block = "model.layers.1.mlp"
    names = [f"{block}.experts.{index}.up_proj.weight" for index in (10, *range(10))]
    groups = expert_groups([*names, f"{block}.gate.weight", "model.norm.weight"])
    assert groups == {
        f"{block}.switch_mlp.up_proj.weight": [
            f"{block}.experts.{index}.up_proj.weight" for index in range(11)
        ]
    }
    mixtral = expert_groups(["model.layers.0.block_sparse_moe.experts.0.w2.weight"])
    assert list(mixtral) == ["model.layers.0.block_sparse_moe.switch_mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match="expert 3 is missing"):
        expert_groups([name for name in names if ".3." not in name])


TERMS = ("LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md")
READ = re.compile(r"[\w/]+\.(?:json|jinja|model|txt)")
NOT_OF_CHECKPOINTS = {
    # Made anew, or of the weights.
    "config.json", "model.safetensors.index.json", "hf_quant_config.json",
    "quant_config.json", "quantize_config.json",
    # Of adapters, of a user's folders, of speculation, and of servers.
    "adapter_config.json", "report.json", "verdicts.json", "unsupported.json",
}  # fmt: skip
READERS = ("text", "images", "pooling", "models")


def test_what_a_loader_reads_a_conversion_keeps(tmp_path: Path) -> None:
    """Every name of a file that the loaders mention is copied, but for those named above."""
    root = Path(mlxinfer.__file__).parent
    sources = [path for part in READERS for path in (root / part).rglob("*.py")]
    constants = {
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {value for value in constants if READ.fullmatch(value)} - NOT_OF_CHECKPOINTS
    assert {"video_preprocessor_config.json", "tokenizer.json"} <= names
    for name in (*names, *TERMS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert sorted(local_side_files(tmp_path)) == sorted({*names, *TERMS})


def test_files_that_are_not_copied_are_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    for name in (*TERMS, "modeling.py", "assets/picture.png", ".gitattributes", "old.bin"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    report = convert(source, tmp_path / "out")
    notes = [note for note in report.notes if note.startswith("Not copied")]
    assert notes == ["Not copied from source: assets/, modeling.py, old.bin."]
    assert all((tmp_path / "out" / name).is_file() for name in TERMS)
