"""Each family that sees, from a folder to an answer: processor, tower and text model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.picture_cases import ALL_PICTURE_CASES, picture_tensors
from models.runs import every
from models.tiny import write
from seeing_folder import MARKS, TEMPLATE, some_image
from text.text_data import DATA
from tokenizers import Tokenizer

from mlxinfer import LLM
from mlxinfer.images import PROCESSORS
from mlxinfer.models.towers.loading import TOWERS

MORE = [
    "<start_of_image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    "[IMG_BREAK]", "[IMG_END]",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)),
]  # fmt: skip
FILES: dict[str, dict[str, Any]] = {  # of a model type: what preprocessor_config.json says
    "qwen": {"min_pixels": 64, "max_pixels": 4096},
    "gemma4": {"max_soft_tokens": 70},
    "lfm2": {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16},
}
TABLES = (
    *("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"),
    *(".embed.weight", ".unembed.weight"),
)
NAMES = [name for name, case in ALL_PICTURE_CASES.items() if "text_config" in case.config]
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprobs": 0}


def family_folder(folder: Path, name: str) -> Path:
    """The folder, with a case's model for texts of bytes, and its processor's files."""
    tokenizer = Tokenizer.from_file(str(DATA / "bytelevel" / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS, *MORE])
    size, token = tokenizer.get_vocab_size(), tokenizer.token_to_id
    whole = ALL_PICTURE_CASES[name].config
    kind, old = whole["model_type"], whole["text_config"]["vocab_size"]
    lengths = {old, whole["text_config"].get("unpadded_vocab_size", old)}
    text = {**whole["text_config"], "vocab_size": size, "max_position_embeddings": 2048}
    text |= dict.fromkeys(text.keys() & {"vocab_size_per_layer_input", "unpadded_vocab_size"}, size)
    begin = MORE[0] if kind == "gemma3" else MARKS[2]
    config = {**whole, "text_config": {**text, "eos_token_id": token(MARKS[1])}}
    for ending in ("token_id", "token_index"):
        ids = {"image": token(MARKS[2]), "boi": token(MORE[0]), "eoi": token(MARKS[4])}
        config |= {f"{what}_{ending}": value for what, value in ids.items()}
    tensors, rng = picture_tensors(name), np.random.default_rng(0)
    for key, array in tensors.items():
        if key.endswith(TABLES) and len(array) in lengths:
            tensors[key] = rng.normal(size=(size, *array.shape[1:])).astype(np.float32) * 0.3
    write(folder, config, tensors)
    tokenizer.save(str(folder / "tokenizer.json"))
    spelling = {"chat_template": TEMPLATE.replace("PICTURE", begin), "eos_token": MARKS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(spelling))
    files = next((value for start, value in FILES.items() if kind.startswith(start)), {})
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    return folder


@pytest.mark.alike
@pytest.mark.parametrize("name", every(2, NAMES))
def test_a_picture_changes_the_answer_and_is_cached(name: str, tmp_path: Path) -> None:
    with LLM(family_folder(tmp_path, name), max_memory="200MB") as llm:
        assert llm.model_info.sees
        first, other, again, blind = (
            llm.chat("?", images=images, **ASKED)  # near: windows are small
            for images in ([some_image(1)], [some_image(2)], [some_image(1)], [])
        )
        assert again.token_ids == first.token_ids
        assert again.cached_tokens >= first.prompt_tokens // 16 * 16 - 16
        assert first.prompt_tokens == other.prompt_tokens > blind.prompt_tokens + 4
        scores = [
            [logprob.logprob for logprob in result.logprobs] for result in (first, other, blind)
        ]
        assert scores[0] != scores[1]
        assert scores[0] != scores[2]
        assert llm.stats()["pictures"]["seen"] == 2


def test_what_has_a_tower_has_a_processor() -> None:
    assert {name.replace("-", "_") for name in TOWERS} == set(PROCESSORS)
