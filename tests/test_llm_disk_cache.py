"""LLM(disk_cache=…): a conversation goes on after a restart, at the cost of its newest part."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlxinfer
from mlxinfer import LLM, InvalidRequestError, SamplingParams

DEMO = Path(mlxinfer.__file__).parent / "assets" / "demo-draft"
SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly. " * 12}
FEW = SamplingParams(max_tokens=8)


def ask(folder: Path | None, question: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The result of one question in an LLM of its own, and its counters."""
    if folder is not None:
        arguments |= {"disk_cache": "50MB", "disk_cache_dir": folder}
    with LLM("demo-draft", num_pages=64, **arguments) as llm:
        result = llm.chat([SYSTEM, {"role": "user", "content": question}], FEW)
        return result, llm.stats()


def test_a_restart_reuses_the_prompt(tmp_path: Path) -> None:
    ask(tmp_path, "What is a cat?")
    result, stats = ask(tmp_path, "What is a dog?")
    cold, plain_stats = ask(None, "What is a dog?")
    assert result.text == cold.text
    assert result.cached_tokens == stats["disk"]["tokens_loaded"] > 64
    assert stats["prompt_tokens_computed"] == result.prompt_tokens - result.cached_tokens
    assert stats["disk"]["num_bytes"] > 0
    assert "disk" not in plain_stats
    other, _ = ask(tmp_path, "What is a dog?", kv_bits=8)
    assert other.cached_tokens == 0, "other bytes, other pages"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"cannot lie in .*file/kv: Not a dir") as caught:
        LLM("demo-draft", disk_cache="1MB", disk_cache_dir=tmp_path / "file" / "kv")
    assert caught.value.param == "disk_cache_dir"


def test_weights_that_differ_in_a_few_rows_share_no_pages(tmp_path: Path) -> None:
    """A finetune may differ from its base by some tokens' embeddings alone."""
    base, tuned = (shutil.copytree(DEMO, tmp_path / name) for name in ("base", "tuned"))
    weights = mx.load(str(base / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    weights["model.embed_tokens.scales"][20:24] *= -3
    mx.save_safetensors(str(tuned / "model.safetensors"), weights, metadata={"format": "mlx"})
    ids, params = [20, 21, 22, 23] * 16, SamplingParams(max_tokens=12, ignore_eos=True)
    cache: dict[str, Any] = {"disk_cache": "100MB", "disk_cache_dir": tmp_path / "cache"}
    with LLM(base, **cache) as llm:
        llm.generate(ids, params)
    with LLM(tuned) as llm:
        alone = llm.generate(ids, params)
    with LLM(tuned, **cache) as llm:
        result = llm.generate(ids, params)
    assert (result.token_ids, result.cached_tokens) == (alone.token_ids, 0)
    with LLM(tuned, **cache) as llm:
        again = llm.generate(ids, params)
    assert again.token_ids == alone.token_ids
    assert again.cached_tokens > 0
