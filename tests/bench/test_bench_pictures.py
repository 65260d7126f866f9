"""`bench pictures`: texts that become the same tokens again, near ties; and memory of a photo."""

import json
import sys
from pathlib import Path

import pytest
from models.runs import every
from models.tiny import config_of
from PIL import Image
from seeing_folder import seeing_folder

from benchmarks.pictures import is_right
from benchmarks.processes import run_python
from benchmarks.seeing_models import MODELS
from mlxinfer.text import Tokenizer


@pytest.mark.parametrize("name", every(2, MODELS))
def test_answers_become_the_same_tokens_in_the_next_turn(name: str, tmp_path: Path) -> None:
    seeing = MODELS[name]
    folder = seeing.write(tmp_path / "model")
    config = config_of(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokens = range(config["text_config"]["vocab_size"])
    letters = [token for token in tokens if token not in seeing.never]
    said = "".join([seeing.vocabulary[token] for token in letters])
    assert tokenizer.encode(said) == letters
    assert tokenizer.decode(letters) == said
    assert len(letters) == 52
    assert config["image_token_id"] in tokenizer.encode(seeing.picture, parse_special=True)


@pytest.mark.parametrize(
    ("tokens", "right"), [([1, 2, 3], True), ([1, 9, 3], True), ([9, 2, 3], False)]
)
def test_near_ties_count_as_right(tokens: list[int], right: bool) -> None:
    assert is_right(tokens, [1, 2, 3], [0.5, 0.004, 0.5]) is right


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_photo_of_24_megapixels_takes_20_bytes_for_a_pixel(tmp_path: Path) -> None:
    photo, folder = tmp_path / "photo.jpg", seeing_folder(tmp_path / "model")
    Image.effect_noise((6000, 4000), 64).convert("RGB").save(photo)
    ran = run_python("-m", "benchmarks.photo", str(folder), str(photo))
    content = json.loads(ran.lines[-1])
    assert content["prompt_tokens"] > 64
    assert content["process_bytes"] < 20 * 24_000_000
    assert content["array_bytes"] < 64 << 20
