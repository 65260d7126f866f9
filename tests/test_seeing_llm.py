"""Pictures through the library: chats, turns, programs with forks; what the tower had to do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from seeing_folder import seeing_folder, some_image

from mlxinfer import LLM, convert_model

ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = seeing_folder(tmp_path_factory.mktemp("seeing"), request.param)
    with LLM(folder, max_memory="100MB") as llm:
        yield llm


def seen(llm: LLM) -> int:
    count: int = llm.stats()["pictures"]["seen"]
    return count


def test_a_picture_is_seen_once_in_turns_and_other_conversations(llm: LLM) -> None:
    before = seen(llm)
    first = llm.chat("What is on it?" * 4, images=[some_image()], **ASKED)
    again = llm.chat("What is on it?" * 4, images=[some_image()], **ASKED)
    assert again.token_ids == first.token_ids
    assert again.cached_tokens >= first.prompt_tokens - 16 > 35
    other = llm.chat("What is on it?" * 4, images=[some_image(2)], **ASKED)
    assert other.cached_tokens < 16, "two pictures of one size share nothing"
    assert [logprob.logprob for logprob in other.logprobs] != [
        logprob.logprob for logprob in first.logprobs
    ]
    llm.chat("Somewhere else. " * 4, images=[some_image()], **ASKED)
    assert seen(llm) == before + 2


def test_branches_of_a_program_share_its_picture(llm: LLM) -> None:
    before = seen(llm)
    with llm.program(**ASKED) as p:
        p.user("What do you see? " * 3, images=[some_image(3)])
        p.gen("first")
        branches = p.fork(3)
        for branch, words in zip(branches, ("left", "right", "above"), strict=True):
            branch.user(f"And {words}? ")
        branches.gen("more")
        chosen = branches.select("sure", ["yes", "no"])
        plain = [llm.chat(branch.messages[:-1], **ASKED) for branch in branches]
        assert seen(llm) == before + 1
        assert len({selection.scores["yes"] for selection in chosen}) == 3
        blind = llm.program(**ASKED)
        blind.user("What do you see? " * 3)
        assert blind.select("sure", ["yes", "no"]).scores != chosen[0].scores
    assert all(result.cached_tokens > 35 for result in plain)


@pytest.mark.ci
def test_a_picture_of_one_step_does_not_depend_on_the_size_of_steps(tmp_path: Path) -> None:
    """In Gemma 4 its features see each other: the step with them grows."""
    folder = seeing_folder(tmp_path, "gemma4_moe")
    collected = []
    for chunk in (None, 16, 160):
        with LLM(folder, max_memory="20MB", prefill_chunk=chunk) as llm:
            plain = llm.chat("What is on it?", **ASKED)
            result = llm.chat("What is on it?", images=[some_image()], **ASKED)
            assert 140 < result.prompt_tokens - plain.prompt_tokens - 2 <= 280
            collected.append((result.prompt_tokens, result.token_ids))
    assert collected == collected[:1] * 3


def test_a_converted_folder_sees_the_same(llm: LLM, tmp_path: Path) -> None:
    """The files about pictures come along: without them, sizes and colours would be others."""
    convert_model(llm.path, tmp_path / "out", recipe="dense", calibration=None, check=False)
    kept = tmp_path / "out" / "preprocessor_config.json"
    assert kept.read_bytes() == (llm.path / kept.name).read_bytes()
    question: Any = {"images": [some_image()], **ASKED}
    with LLM(tmp_path / "out", max_memory="100MB") as other:
        ours, theirs = (item.chat("What is on it?", **question) for item in (llm, other))
    assert theirs.prompt_tokens == ours.prompt_tokens > 35
    assert theirs.token_ids == ours.token_ids
