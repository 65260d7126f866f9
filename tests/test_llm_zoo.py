"""Models without a native family through the public API: one batched, one alone."""

from pathlib import Path
from shutil import copy
from typing import Any

import mlx.core as mx
import pytest
from models.runs import every
from models.test_zoo import definition_of, save

from mlxinfer import LLM, InvalidRequestError, SamplingParams
from mlxinfer.hub import resolve

PROMPT = "The KV cache of a model"
TEN = SamplingParams(max_tokens=10, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def checkpoint(folder: Path, name: str) -> tuple[Path, Any]:
    """A checkpoint of random weights with the demo's tokenizer."""
    demo = resolve("demo")
    raw, definition = definition_of(name, vocab_size=2048)
    save(folder, raw, definition)
    for path in demo.iterdir():
        if path.name.startswith(("tokenizer", "special", "chat")):
            copy(path, folder)
    return folder, definition


@pytest.mark.alike
@pytest.mark.parametrize(("name", "cached"), every(2, [("dbrx", True), ("jamba", False)]))
def test_answers_are_mlx_lm_s_and_features_work(tmp_path: Path, name: str, cached: bool) -> None:
    folder, definition = checkpoint(tmp_path, name)
    with LLM(folder) as llm:
        ids = llm.tokenizer.encode(PROMPT) * 8
        first, *others = llm.generate([ids, "Another", "A third"], TEN)
        again = llm.generate(ids, TEN)
        assert first.token_ids == again.token_ids == own_answer(definition, ids)
        assert all(len(result.token_ids) == 10 for result in others)
        assert (again.cached_tokens > 0) == cached
        drawn = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
        alone, batched = llm.generate(PROMPT, drawn), llm.generate(["Hi", PROMPT], drawn)[1]
        assert alone.token_ids == batched.token_ids
        said = llm.generate(PROMPT, SamplingParams(max_tokens=40), response_format=SCHEMA_FORMAT)
        assert '"a"' in said.text


def test_what_a_model_alone_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "model", "mamba")
    disk = {"disk_cache": "1GB", "disk_cache_dir": tmp_path / "disk"}
    for options in (disk, {"kv_bits": 8}, {"kv_window": 64}):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            LLM(folder, **options)  # type: ignore[arg-type]


def own_answer(definition: Any, ids: list[int]) -> tuple[int, ...]:
    """mlx-lm's own greedy answer of ten tokens."""
    caches, answer = definition.own_caches(), []
    for _ in range(10):
        ids = [int(mx.argmax(definition(mx.array([ids]), caches)[0, -1]).item())]
        answer += ids
    return tuple(answer)
