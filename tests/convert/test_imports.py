"""A GGUF file runs: it is imported exactly, once, and found again by what is in it."""

import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import contents
from gguf import GGMLQuantizationType as Kind
from hub.standin import Repo, StandIn
from huggingface_hub import close_session
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.gguf_files import as_llama_cpp, write_model

from mlxinfer import LLM, SamplingParams, hub
from mlxinfer.cli import main
from mlxinfer.convert.imports import import_gguf
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.errors import (
    ConversionError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mlxinfer.library import resolve
from mlxinfer.models import load

BYTES = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
TOKENS = [*BYTES, *(chr(256 + n) for n in range(256 - len(BYTES))), "ab"]
TOKENIZER = {
    "model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "types": [1] * len(TOKENS),
    "merges": ["a b"],
}  # fmt: skip
DATA = Path(__file__).parents[1] / "data" / "gguf"
PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_file(path: Path, **more: Any) -> Path:
    config = {**tiny_config("qwen3-v4"), "vocab_size": len(TOKENS)}
    kinds = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.1.ffn_up.weight": Kind.Q4_0}
    tensors = tiny_tensors(config, more.pop("seed", 0))
    path.parent.mkdir(exist_ok=True)
    write_model(path, config, tensors, kinds=kinds, tokenizer=TOKENIZER, **more)
    return path


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def convert_as(path: Path, out: Path, dtype: str | None) -> set[mx.Dtype]:
    """Keep formats, and numbers as they are or in a dtype; returns the dtypes of matrices."""
    recipe = make_recipe("keep", dtype=dtype)
    options = ConversionOptions(recipe=recipe, searched=False, check_tensors=False)
    Conversion(open_source(path), out, options).run()
    return number_types(out)


def number_types(folder: Path) -> set[mx.Dtype]:
    (path,) = folder.glob("*.safetensors")
    return {array.dtype for array in mx.load(str(path)).values() if array.ndim > 1}


def test_float32_is_kept_by_keep_and_becomes_bfloat16_where_a_file_runs(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    config = {**tiny_config("qwen3-v4"), "vocab_size": len(TOKENS)}
    write_model(path, config, tiny_tensors(config, 0), tokenizer=TOKENIZER)
    assert convert_as(path, tmp_path / "kept", None) == {mx.float32}
    assert convert_as(path, tmp_path / "stated", "float16") == {mx.float16}
    assert number_types(import_gguf(path)) == {mx.bfloat16}
    exact = resolve(str(path), lambda *_: None, dtype="float32")
    assert number_types(exact) == {mx.float32}
    assert import_gguf(path, exact=True) == exact != import_gguf(path)


def test_a_file_answers_as_its_converted_folder_does(tmp_path: Path) -> None:
    path, out = write_file(tmp_path / "tiny.gguf"), tmp_path / "out"
    convert_as(path, out, "bfloat16")
    answers = []
    for name in (out, path, path):
        with LLM(str(name)) as llm:
            answers.append(llm.generate("hello there", PARAMS).token_ids)
    with LLM(str(out), draft=str(path)) as llm:
        answers.append(llm.generate("hello there", PARAMS).token_ids)
    assert answers == [answers[0]] * 4
    folder = hub.resolve(str(path))
    weights = {name: data for name, data in contents(out).items() if name.endswith("safetensors")}
    assert weights.items() <= contents(folder).items()


def unpacked(path: Path, name: str) -> Path:
    """A file that llama.cpp's converter wrote."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return path


def test_a_tower_beside_it_is_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = unpacked(tmp_path / "a" / "see-Q8_0.gguf", "see-qwen3_vl-q8_0")
    blind = resolve(str(text), lambda *_: None)
    assert load(blind).tower is None
    assert [message.split(":")[0] for message in caplog.messages] == [
        "see-Q8_0.gguf reads text only",
        f"{text} is a GGUF file; an MLX format may be faster",
    ]
    tower = unpacked(tmp_path / "a" / "mmproj-F32.gguf", "mmproj-see-qwen3_vl-f32")
    caplog.clear()
    seeing = resolve(str(text), lambda *_: None)
    assert load(seeing).tower is not None
    assert len(caplog.messages) == 1
    assert hub.resolve(str(text), download=False) == seeing
    other = unpacked(tmp_path / "b" / "other.gguf", "see-gemma3-f32")
    assert "preprocessor_config.json" in {path.name for path in seeing.iterdir()}
    with pytest.raises(UnsupportedModelError, match=r"sees for qwen3vl .* is gemma3 of width 64"):
        resolve(str(other), lambda *_: None, mmproj=tower)
    shutil.copy(tower, other.with_name("mmproj-F16.gguf"))
    caplog.clear()
    assert load(resolve(str(other), lambda *_: None)).tower is None
    assert "reads text only" in caplog.messages[0]
    gemma = unpacked(tmp_path / "tower.gguf", "mmproj-see-gemma3-f32")
    assert load(resolve(str(other), lambda *_: None, mmproj=gemma)).tower is not None
    tower.unlink()
    assert resolve(str(text), lambda *_: None) == blind


@pytest.mark.parametrize("given", ["file", "folder"])
def test_show_tells_of_a_tower_that_is_named(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = unpacked(tmp_path / "a" / "see.gguf", "see-qwen3_vl-q8_0")
    tower = unpacked(tmp_path / "tower.gguf", "mmproj-see-qwen3_vl-f32")
    name = str(text if given == "file" else text.parent)
    sizes = []
    for more in ((), ("--mmproj", str(tower))):
        with pytest.raises(SystemExit):  # for want of a vocabulary
            main(["show", "--json", name, *more])
        facts = json.loads(capsys.readouterr().out)
        sizes.append(facts["tower_bytes"])
    assert sizes[0] == 0 < sizes[1] <= tower.stat().st_size


def test_a_tower_is_refused_where_there_is_no_file_for_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="mmproj"):
        resolve(str(write_file(tmp_path / "m.gguf")), lambda *_: None, mmproj="none.gguf")
    with pytest.raises(InvalidRequestError, match="mmproj goes with a GGUF file"):
        resolve("demo", lambda *_: None, mmproj="x.gguf")


def test_a_file_of_a_repository_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "tiny-Q8_0.gguf")
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    close_session()
    answers = []
    with StandIn({"org/tiny-GGUF": Repo({path.name: path.read_bytes()})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for name in ("org/tiny-GGUF:q8_0", "org/tiny-GGUF", str(path)):
            with LLM(name) as llm:
                answers.append(llm.generate("hello there", PARAMS).token_ids)
            server.log.clear() if name.endswith("q8_0") else None
        assert server.log == []  # it is asked once
    assert answers == [answers[0]] * 3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, "bfloat16"),  # whose activations may not fit float16
        (Kind.BF16, "bfloat16"),
        (Kind.F16, "float16"),
        (Kind.Q8_0, "float16"),  # as its scales
    ],
)
def test_a_float32_file_becomes_bfloat16(tmp_path: Path, kind: Kind, dtype: str) -> None:
    config = tiny_config("qwen3-v4")
    tensors = tiny_tensors(config)
    stored = as_llama_cpp(config, tensors).items()
    kinds = {name: kind for name, values in stored if values.ndim > 1}
    write_model(tmp_path / "m.gguf", config, tensors, kinds=kinds)
    assert open_source(tmp_path / "m.gguf").dtype == dtype


def test_the_same_content_is_imported_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "tiny.gguf")
    steps: list[tuple[int, int]] = []
    folder = import_gguf(path, lambda *seen: steps.append(seen))
    total = path.stat().st_size
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert steps == sorted(steps)
    written = {file: file.stat().st_mtime_ns for file in files_below(folder)}
    copy = tmp_path / "other.gguf"
    shutil.copy(path, copy)
    os.utime(path)  # touched
    for again in (path, path, copy, copy):
        assert import_gguf(again) == folder
    assert {file: file.stat().st_mtime_ns for file in files_below(folder)} == written
    steps.clear()
    import_gguf(path, lambda *seen: steps.append(seen))
    assert steps == []  # known without being read


def test_other_content_in_the_same_place_is_imported_anew(tmp_path: Path) -> None:
    path = write_file(tmp_path / "tiny.gguf")
    first = import_gguf(path)
    data, state = bytearray(path.read_bytes()), path.stat()
    data[-5] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    second = import_gguf(path)
    assert second != first
    assert hub.resolve(str(path)) == second


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    write_file(tmp_path / "tiny.gguf", split=8)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 2
    folder = import_gguf(parts[1])
    assert import_gguf(parts[0]) == folder
    assert "tiny-" in folder.parents[1].name
    assert "-of-" not in folder.parents[1].name


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.9, 1.0])
def test_an_interrupt_leaves_nothing(tmp_path: Path, hub_cache: Path, share: float) -> None:
    path = write_file(tmp_path / "tiny.gguf")

    def interrupt(done: int, total: int) -> None:
        if done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, interrupt)
    assert files_below(hub_cache) == []
    assert import_gguf(path).is_dir()


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "tiny.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(ConversionError, match=r"tiny\.gguf could not be imported.*free"):
            import_gguf(path)
    assert files_below(hub_cache) == []


def test_what_a_kill_left_is_cleared_away(tmp_path: Path, hub_cache: Path) -> None:
    path = write_file(tmp_path / "tiny.gguf")
    folder = import_gguf(path)
    shutil.rmtree(folder.parents[1] / "refs")
    shutil.rmtree(folder.parents[1] / "sources")
    left = folder.with_name(f"{folder.name}.partial") / "model"
    left.parent.mkdir()
    folder.rename(left)
    (left.parent / "journal.jsonl").write_text("{}")
    (left / "model.safetensors").write_bytes(b"half")
    assert not any("tiny" in model.name for model in hub.list_models() if model.complete)
    assert import_gguf(path) == folder
    assert not left.exists()
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_an_unreadable_file_writes_nothing(tmp_path: Path, hub_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    data = write_file(path).read_bytes()
    path.write_bytes(data.replace(b"qwen3", b"qwen9"))
    with pytest.raises(UnsupportedModelError, match="qwen9"):
        import_gguf(path)
    assert files_below(hub_cache) == []


def test_commands_know_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path / "tiny.gguf")

    def call(*args: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(list(args))
        seen = capsys.readouterr()
        assert not stop.value.code, seen.err
        return seen.out

    assert "qwen3" in call("show", str(path)).lower()
    said = call("run", "-m", str(path), "--raw", "--max-tokens", "3", "hello")
    (name,) = (m.name for m in hub.list_models() if m.name.startswith("gguf/tiny-"))
    assert name in call("list")
    assert said == call("run", "-m", name, "--raw", "--max-tokens", "3", "hello")
    call("rm", "--yes", name)
    assert not any(m.name == name for m in hub.list_models())
    assert np.array_equal(said, call("run", "-m", str(path), "--raw", "--max-tokens", "3", "hello"))
