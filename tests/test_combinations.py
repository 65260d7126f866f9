"""What does not go together is what docs/combinations.md says, and each of it is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from models.tiny import arrays_of, tiny_config, write
from test_llm_zoo import checkpoint

from mlxinfer import LLM
from mlxinfer.errors import MlxinferError
from mlxinfer.hub import resolve

PAGE = (Path(__file__).parents[1] / "docs" / "combinations.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
OPTIONS = {  # options that exclude each other -> what the error says
    ("disk_cache", "prefix_cache"): ({"disk_cache": "1GB", "prefix_cache": False}, "is off"),
    ("peers", "prefix_cache"): ({"peers": ["http://127.0.0.1:9"], "prefix_cache": False}, "is off"),
    ("prefill_at", "ranks"): ({"prefill_at": "http://127.0.0.1:9", "ranks": 2}, "part of a page"),
    ("expert_memory", "ranks"): ({"expert_memory": "1GB", "ranks": 2}, "leave one of them out"),
    ("pipeline", "one rank"): ({"pipeline": True}, "there is only one"),
}
MODELS = {  # a word of the row, a model, an option -> what the error says
    ("kv_window", "trained windows"): ("mistral-v4", {"kv_window": 32}, "no layer of this model"),
    ("kv_window", "by an index"): ("deepseek_v32-v4", {"kv_window": 32}, "chooses the tokens"),
    ("kv_bits=(8, 4)", "latent"): ("deepseek_v3-v4", {"kv_bits": (8, 4)}, "one latent vector"),
    ("kv_bits", "multiples of 8"): ("deepseek_v3-v5", {"kv_bits": 8}, "multiple of 8"),
    ("mtp", "without a head"): ("qwen3-v4", {"speculate": "mtp"}, "mtp"),
    ("expert_memory", "dense"): ("qwen3-v4", {"expert_memory": "1GB"}, "has none"),
}
OF_MLX_LM = {  # a definition, an option -> what the error says
    ("dbrx", "expert_memory"): ({"expert_memory": "1GB"}, "holds all experts"),
    ("dbrx", "mtp"): ({"speculate": "mtp"}, "hidden states"),
    ("jamba", "disk_cache"): ({"disk_cache": "1GB"}, "caches of its own"),
    ("jamba", "kv_bits"): ({"kv_bits": 8}, "caches of its own"),
    ("jamba", "kv_window"): ({"kv_window": 64}, "caches of its own"),
    ("jamba", "speculate"): ({"speculate": "ngram"}, "caches of its own"),
}


def in_page(*words: str) -> bool:
    return any(all(word in row for word in words) for row in ROWS)


def refused(load: Callable[[], LLM], said: str) -> None:
    with pytest.raises(MlxinferError, match=re.escape(said)):
        load().close()


@pytest.mark.parametrize("words", OPTIONS)
def test_options_that_exclude_each_other(words: tuple[str, ...], tmp_path: Path) -> None:
    options, said = OPTIONS[words]
    if "disk_cache" in options:
        options = {**options, "disk_cache_dir": tmp_path}
    refused(lambda: LLM("demo", **options), said)
    assert in_page(*words)


@pytest.mark.parametrize("words", MODELS)
def test_options_that_a_model_cannot_have(words: tuple[str, ...], tmp_path: Path) -> None:
    case, options, said = MODELS[words]
    folder = write(tmp_path, tiny_config(case), arrays_of(tiny_config(case)))
    for path in resolve("demo").iterdir():
        if path.name.startswith(("tokenizer", "special", "chat")):
            copy(path, folder)
    refused(lambda: LLM(folder, **options), said)  # type: ignore[arg-type]
    assert in_page(*words)


@pytest.mark.alike
@pytest.mark.parametrize("words", OF_MLX_LM)
def test_options_that_mlx_lms_definitions_lack(words: tuple[str, str], tmp_path: Path) -> None:
    options, said = OF_MLX_LM[words]
    if "disk_cache" in options:
        options = {**options, "disk_cache_dir": tmp_path / "disk"}
    folder, _ = checkpoint(tmp_path / "model", words[0])
    refused(lambda: LLM(folder, **options), said)  # type: ignore[arg-type]
    assert in_page(words[1], "definition")
