"""LLM(disk_cache=…): a conversation goes on after a restart, at the cost of its newest part."""

from pathlib import Path
from typing import Any

import pytest

from mlxinfer import LLM, InvalidRequestError, SamplingParams

SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly. " * 12}
FEW = SamplingParams(max_tokens=8)


def ask(folder: Path | None, question: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The result of one question in an LLM of its own, and its counters."""
    if folder is not None:
        arguments |= {"disk_cache": "50MB", "disk_cache_dir": folder}
    with LLM("demo", num_pages=64, **arguments) as llm:
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


@pytest.mark.parametrize(
    ("arguments", "param"),
    [({"disk_cache": "much"}, "disk_cache"), ({"disk_cache_dir": "/tmp"}, "disk_cache_dir")],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        LLM("demo", **arguments)
    assert caught.value.param == param


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"cannot lie in .*file/kv: Not a dir") as caught:
        LLM("demo", disk_cache="1MB", disk_cache_dir=tmp_path / "file" / "kv")
    assert caught.value.param == "disk_cache_dir"
