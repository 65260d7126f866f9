"""Prompts saved and loaded between steps: every kind of layer goes on where it was."""

from pathlib import Path
from typing import Any

import pytest
from engine.harness import Harness, disk_at, model_of, prompt
from models.runs import every

from mlxinfer.cache.disk.entry import decode
from mlxinfer.cache.disk.saved import SavedSession, SavedSessions
from mlxinfer.config import KVOptions
from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.save_load import Saving, load
from mlxinfer.errors import RequestFailedError

PLACE = ("anna", 3)
CASES = ("qwen3-v4", "gemma3_text-v4", "gpt_oss-v4", "hybrid deepseek_v3-v4", "recurrent qwen3-v4")


def on_disk(folder: Path, case: str, **changes: Any) -> Harness:
    """A loop that keeps its pages under `folder`."""
    return Harness(model_of(case), disk=disk_at(folder, case), **changes)


def answer(harness: Harness, ids: list[int]) -> tuple[list[int], int]:
    """The answer to a prompt of the place, and the prompt's tokens that were computed."""
    counters, name = harness.loop.scheduler.counters, str(len(harness.outcomes))
    before = counters.prompt_tokens_computed
    harness.add(name, ids, SamplingParams(max_tokens=6))
    sequence = harness.loop.scheduler.queues.find(name)
    request: Request = sequence.request
    request.owner, request.id_slot = PLACE
    harness.drain()
    return harness.outcomes[name].token_ids, counters.prompt_tokens_computed - before


def save(harness: Harness, sessions: SavedSessions) -> SavedSession:
    """Save the prompt of the place, with steps of other requests between the pieces."""
    saving = Saving(PLACE, None)
    for _ in saving.pieces(harness.loop):
        harness.turn()
    saved = SavedSession(
        name="work", owner="anna", model="m", created_s=1, num_bytes=1, prompt=saving.prompt
    )
    assert harness.loop.store.disk is not None
    keys = [key for _, key in saved.prompt.keys(saved.prompt.root)]
    sessions.save(saved, harness.loop.store.disk, keys)
    return saved


@pytest.mark.alike
@pytest.mark.parametrize("bits", every(2, [None, 8]))
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_session_goes_on_as_cold(case: str, bits: int | None, tmp_path: Path) -> None:
    kv = KVOptions(bits=(bits, bits))
    ids, sessions = prompt(100), SavedSessions(tmp_path)
    earlier = on_disk(tmp_path, case, kv=kv)
    answer(earlier, ids)
    earlier.add("other", prompt(90, 7), SamplingParams(max_tokens=30))
    earlier.turn(3)
    saved = save(earlier, sessions)
    earlier.drain()
    earlier.loop.close(save=False)

    later = on_disk(tmp_path, case, kv=kv)
    session = sessions.find("work", "anna")
    assert session == saved
    assert later.loop.store.disk is not None
    sessions.restore(session, later.loop.store.disk)
    load(later.loop, PLACE, session.prompt, None)
    assert later.loop.store.tokens_loaded == len(session.prompt.token_ids) >= 96
    more = ids + prompt(20, 5)
    tokens, computed = answer(later, more)
    cold = on_disk(tmp_path / "cold", case, kv=kv)
    assert (tokens, len(more)) == answer(cold, more)
    assert computed <= len(more) - 96


@pytest.mark.parametrize("case", every(3, CASES))
def test_pages_that_came_from_peers_and_wait_are_saved_too(case: str, tmp_path: Path) -> None:
    ids, here, there = prompt(100), tmp_path / "here", tmp_path / "there"
    first = on_disk(there, case)
    answer(first, ids)
    save(first, SavedSessions(there))
    harness = on_disk(here, case)
    answer(harness, ids)
    harness.loop.store.received.max_bytes = 1 << 26
    for path in there.glob("[!s]*/*.kv"):
        entry = decode(path.read_bytes())
        assert entry is not None
        assert harness.loop.store.received.store(entry)
    saved = save(harness, SavedSessions(here))
    assert len(saved.prompt.token_ids) >= 96


def test_a_step_that_fails_meanwhile_ends_the_save(tmp_path: Path) -> None:
    harness = on_disk(tmp_path, "qwen3-v4")
    answer(harness, prompt(100))
    pieces = Saving(PLACE, None).pieces(harness.loop)
    harness.loop.store.chunks = lambda spills: iter([[spill] for spill in spills])  # type: ignore[method-assign]
    next(pieces)
    harness.loop.scheduler.kv_manager.forget()
    with pytest.raises(RequestFailedError, match="A step failed"):
        for _ in pieces:
            pass
