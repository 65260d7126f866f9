"""mlx-lm's definitions in this engine: the tokens of mlx-lm's own greedy run, whatever happens."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from engine.harness import Harness, disk_at, prompt
from engine.oracle import Oracle
from models.runs import every
from models.zoo_table import small_model

from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError
from mlxinfer.models.zoo.running import AloneModel, FlatModel

BATCHED = ("gpt_neox", "mimo_v2_flash", "stablelm")  # biases; windows and sinks; casts of keys
ALONE = ("jamba", "recurrent_gemma")  # states beside attention; beside windows of attention
TEN = SamplingParams(max_tokens=10)
LENGTHS = (3, 40, 70, 1, 17)


@cache
def model_of(name: str) -> FlatModel | AloneModel:
    return small_model(name)


@cache
def own_tokens(name: str, length: int) -> list[int]:
    """mlx-lm's own greedy answer of ten tokens: the whole prompt at once, then step by step."""
    definition = model_of(name).definition
    caches, ids, answer = definition.own_caches(), prompt(length, seed=length), []
    for _ in range(10):
        logits = definition(mx.array([ids]), caches)
        ids = [int(mx.argmax(logits[0, -1]).item())]
        answer += ids
    return answer


def add_all(harness: Harness, round: str = "") -> None:
    for length in LENGTHS:
        harness.add(f"{length}{round}", prompt(length, seed=length), TEN)


def check_all(harness: Harness, name: str) -> None:
    for asked, outcome in harness.drain().items():
        assert outcome.error is None, outcome.error
        assert outcome.token_ids == own_tokens(name, int(asked.rstrip("'"))), asked


@pytest.mark.alike
@pytest.mark.parametrize("name", every(3, BATCHED + ALONE))
def test_preempted_and_asked_again_equals_mlx_lm(name: str) -> None:
    """The second time prompts are found computed, where the model can have a prefix cache."""
    lacking = "prefix_cache" in model_of(name).lacks
    harness = Harness(model_of(name), prefill_chunk=32, prefix_cache=not lacking)
    add_all(harness)
    for _ in range(4):
        harness.turn(3)
        harness.loop.scheduler.queues.preempt(harness.loop.scheduler.queues.running[-1])
    check_all(harness, name)
    add_all(harness, "'")
    check_all(harness, name)
    assert (harness.outcomes["70'"].cached_tokens > 60) != lacking


def test_what_needs_pages_is_refused_by_name_where_there_are_none() -> None:
    model = model_of("jamba")
    for options, param in [(KVOptions(bits=(8, 8)), "kv_bits"), (KVOptions(window=9), "kv_window")]:
        with pytest.raises(InvalidRequestError, match=param):
            Harness(model, kv=options)
    with pytest.raises(InvalidRequestError, match="Speculation"):
        Harness(model, proposer=Oracle({}, seed=1))


def test_pages_count_what_own_caches_take(tmp_path: Path) -> None:
    """A pool that holds one sequence at a time: the others wait, and nothing is kept at the end."""
    harness = Harness(model_of("jamba"), num_pages=6, prefix_cache=False)
    add_all(harness)
    check_all(harness, "jamba")
    harness.add("3'", prompt(3, seed=3), TEN)  # its first step carries out what is left
    harness.turn()
    assert harness.loop.cache.state_group.bytes_allocated > 0  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="needs 8 pages"):
        harness.add("long", prompt(120), TEN)


def test_restarts_find_pages_on_disk(tmp_path: Path) -> None:
    for again in (False, True):
        harness = Harness(model_of("gpt_neox"), disk=disk_at(tmp_path))
        add_all(harness)
        check_all(harness, "gpt_neox")
        assert (harness.outcomes["70"].cached_tokens > 0) == again
        harness.loop.close()
