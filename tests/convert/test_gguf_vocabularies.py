"""Vocabularies of llama.cpp's own tests give the tokens that it expects (ci)."""

import os
import re
import warnings
from pathlib import Path

import pytest
import tokenizers

from mlxinfer.convert.read.gguf.source import read_header
from mlxinfer.convert.read.gguf.tokenizer import PRETOKENIZERS, RAW, tokenizer_files

FOLDER = "MLXINFER_LLAMA_CPP"  # environment variable: a folder of llama.cpp's sources
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(FOLDER not in os.environ, reason=f"no {FOLDER} with llama.cpp's sources"),
]
MODELS = Path(os.environ.get(FOLDER, "/none")) / "models"
NAMES = sorted(path.name.removesuffix(".gguf.inp") for path in MODELS.glob("*.gguf.inp"))
DIFFERENT = {"ggml-vocab-qwen35": 3}  # Unicode composition, which llama.cpp leaves out
BETWEEN = "\n__ggml_vocab_test__\n"


def test_there_are_vocabularies() -> None:
    assert len(NAMES) >= 15


def test_every_name_of_the_converter_is_known() -> None:
    source = (MODELS.parent / "conversion" / "base.py").read_text()
    names = set(re.findall(r'res = "([^"]+)"', source))
    word_pieces = {"bert-bge", "bert-bge-large", "jina-v2-en"}
    assert len(names) > 80
    assert names - PRETOKENIZERS.keys() - set(RAW) == word_pieces


@pytest.mark.alike
@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_gives_the_expected_tokens(name: str) -> None:
    path = MODELS / f"{name}.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older files do not name their expression
        files = tokenizer_files(read_header(path)[0].metadata, str(path))
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    texts = path.with_name(f"{name}.gguf.inp").read_bytes().decode().split(BETWEEN)
    expected = path.with_name(f"{name}.gguf.out").read_text().split("\n")
    pairs = list(zip(texts, expected, strict=False))
    actual = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in pairs]
    wrong = [text for (text, ids), made in zip(pairs, actual, strict=True)
             if made != [int(item) for item in ids.split()]]  # fmt: skip
    assert len(pairs) > 40
    assert len(wrong) == DIFFERENT.get(name, 0), wrong
