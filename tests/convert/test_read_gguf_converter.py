"""Files that llama.cpp's own converter wrote give the logits of transformers.

`tests/data/gguf/make.py` makes them.
"""

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml
from convert_cases import by_mlxinfer, logits, write_tokenizer
from engine.seeing_cases import picture_logits
from models.cases import CASES as MODELS
from models.random_weights import coarse, tiny_tensors
from models.runs import every
from models.tiny import config_of, write
from pooling.test_pooling_parity import close, model_in, results, rows_of
from pooling.tiny_pooling import pooling_folder
from pooling.tiny_pooling import write_tokenizer as write_words

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.imports import import_gguf
from mlxinfer.convert.read import SourceModel
from mlxinfer.convert.read.gguf.source import open_gguf
from mlxinfer.convert.sidefiles import write_side_files
from mlxinfer.convert.zoo import arrange_made
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import load
from mlxinfer.models.registry import SUPPORTED

DATA = Path(__file__).parents[1] / "data" / "gguf"
LOGITS = np.load(DATA / "logits.npz")
CASES = yaml.safe_load((DATA / "cases.yml").read_text())
FILES = sorted(path.name.removesuffix(".gguf.xz") for path in DATA.glob("*.gguf.xz"))
TOWERS = [name.removeprefix("mmproj-") for name in FILES if name.startswith("mmproj-")]
POOLING = [name for name in FILES if name.startswith("pool-")]
TEXTS = [name for name in FILES if name not in TOWERS and not name.startswith(("mmproj-", "pool-"))]


def unpacked(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{path.name}.xz").read_bytes()))
    return path


def written(folder: Path, source: SourceModel) -> Path:
    """The folder of a source, in float32."""
    is_native = source.config["model_type"] in SUPPORTED
    arranged = (arrange if is_native else arrange_made)(source)
    tensors = {output.name: arranged.whole(output) for output in arranged.outputs}
    arrays = {
        name: array if array.dtype == mx.int64 else array.astype(mx.float32)
        for name, array in tensors.items()
    }
    return with_tokenizer(folder, dict(source.config), arrays)


def with_tokenizer(folder: Path, config: dict[str, Any], arrays: dict[str, mx.array]) -> Path:
    write(folder, config, arrays)
    write_tokenizer(folder)
    return folder


@pytest.mark.alike
@pytest.mark.parametrize("name", every(3, TEXTS))
def test_converted_files_give_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    """Or those of the folder that it was made of, which is compared with transformers elsewhere."""
    source, case = open_gguf(unpacked(tmp_path, name)), CASES[name.rpartition("-")[0]]
    ids = np.random.default_rng(1).integers(3, source.config["vocab_size"], 24).tolist()
    if "folder" in case:
        tiny = MODELS[case["folder"]]
        config = tiny | case.get("both", {})
        behind = f".layers.{config['num_hidden_layers']}."  # where the case has fewer layers
        values = {
            key: mx.array(coarse(array, key))
            for key, array in tiny_tensors(tiny).items()
            if behind not in key
        }
        expected = logits(with_tokenizer(tmp_path / "reference", config, values), ids)
    else:
        expected = LOGITS[name.rpartition("-")[0]]
    folder = written(tmp_path / "folder", source)
    is_native = source.config["model_type"] in SUPPORTED
    actual = (logits if is_native else by_mlxinfer)(folder, ids)
    assert np.abs(actual - expected).max() <= 1e-4 * expected.std()


@pytest.mark.alike
@pytest.mark.parametrize("name", every(3, TOWERS))
def test_a_text_and_its_tower_give_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    case = name.rpartition("-")[0]
    text, tower = (unpacked(tmp_path, one) for one in (name, f"mmproj-{name}"))
    folder = written(tmp_path / "folder", open_gguf(text, mmproj=tower))
    (actual, _), expected = picture_logits(load(folder), CASES[case]["seeing"]), LOGITS[case]
    assert np.abs(actual - expected).max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("name", [name for name in POOLING if name != "pool-bert-scores-f32"])
def test_a_file_gives_the_vectors_and_scores_of_its_folder(tmp_path: Path, name: str) -> None:
    """Of folders that are compared with sentence-transformers, with values that cost few bits."""
    case = CASES[name.rpartition("-")[0]]["pooling"]
    folder = pooling_folder(tmp_path / "hub", case, change=coarse)
    source = open_gguf(unpacked(tmp_path, name))
    if case == "gemma3":  # llama.cpp has this scale in its code: a head's width
        assert source.config["query_pre_attn_scalar"] == source.config["head_dim"]
        source = replace(source, config={**source.config, "query_pre_attn_scalar": 20})
    read = written(tmp_path / "folder", source)
    write_side_files(read, source)
    write_words(read, source.config["vocab_size"])
    rows, _ = rows_of(case)
    close(*(results(model_in(one), rows, None) for one in (read, folder)))


def test_a_reranker_without_what_comes_before_its_scores_is_refused(tmp_path: Path) -> None:
    """llama.cpp's converter leaves out the pooler of BERT."""
    with pytest.raises(UnsupportedModelError, match=r"scores pairs and has no cls\.weight"):
        open_gguf(unpacked(tmp_path, "pool-bert-scores-f32"))


def test_mlx_lms_models_keep_their_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = import_gguf(unpacked(tmp_path, "apertus-q8_0"))
    write_tokenizer(folder)
    expected = LOGITS["apertus"]
    ids = np.random.default_rng(1).integers(3, expected.shape[-1], len(expected)).tolist()
    assert config_of(folder)["quantization"]["bits"] == 8
    assert np.abs(by_mlxinfer(folder, ids) - expected).max() <= 1e-4 * expected.std()
