"""Background requests run in what others leave: no other request waits a step for them."""

import os
import random

from engine.test_scheduler import assert_only_cached, build, rows, step

from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.scheduler import Scheduler

NUM_SEEDS = int(os.environ.get("MLXINFER_BACKGROUND_SEEDS", "15"))


def request(name: str, num_prompt: int, max_tokens: int = 8) -> Request:
    """Its prompt is like no other's."""
    own = int.from_bytes(name.encode()) << 16
    return Request(name, list(range(own, own + num_prompt)), SamplingParams(max_tokens=max_tokens))


def background(name: str, num_prompt: int, max_tokens: int = 8) -> Request:
    found = request(name, num_prompt, max_tokens)
    found.background = True
    return found


def add(scheduler: Scheduler, asked: Request) -> None:
    scheduler.queues.add(asked, max_output=asked.params.max_tokens or 1)


def test_a_request_takes_the_slot_of_the_youngest_background_sequence() -> None:
    scheduler = build(max_batch=2)
    for name in "ab":
        add(scheduler, background(name, 3))
    assert rows(step(scheduler)) == {"a": 3, "b": 3}
    add(scheduler, background("c", 3))
    add(scheduler, request("live", 5))
    assert rows(step(scheduler)) == {"a": 1, "live": 5}
    assert [s.request.id for s in scheduler.queues.waiting] == ["b", "c"]
    assert scheduler.counters.preemptions == 1


def test_a_request_takes_the_pages_of_background_sequences() -> None:
    scheduler = build(pages=8, max_batch=4)
    for name in "ab":
        add(scheduler, background(name, 14, 2))
    step(scheduler)
    add(scheduler, request("live", 20, 4))
    assert rows(step(scheduler))["live"] == 16
    assert all(s.request.id == "live" for s in scheduler.queues.running)
    while not scheduler.queues.idle:
        step(scheduler)
    assert_only_cached(scheduler)


def test_prompts_of_the_background_wait_for_all_others() -> None:
    scheduler = build(chunk=32)
    add(scheduler, background("b", 60))
    step(scheduler)
    add(scheduler, request("live", 40))
    assert rows(step(scheduler)) == {"live": 32}
    assert rows(step(scheduler)) == {"live": 8}
    assert rows(step(scheduler)) == {"live": 1, "b": 4}  # a page beside a request that decodes


def first_tokens(seed: int, *, beside: bool) -> dict[str, int]:
    """Steps from the arrival of each request to its first token, with background ones or without.

    Requests arrive and end at the same steps in both.
    """
    rng, other = random.Random(seed), random.Random(f"background {seed}")
    scheduler = build(pages=rng.randint(40, 80), max_batch=rng.randint(1, 4), chunk=16)
    arrived: dict[str, int] = {}
    found: dict[str, int] = {}
    for number in range(120):
        if rng.random() < 0.15 and number < 100:
            name, size = f"r{number}", rng.randint(1, 60)
            add(scheduler, request(name, size, rng.randint(1, 12)))
            arrived[name] = number
        if beside and other.random() < 0.5:
            num_prompt, max_tokens = other.randint(1, 60), other.randint(1, 30)
            add(scheduler, background(f"b{number}", num_prompt, max_tokens))
        if scheduler.queues.idle:
            continue
        for sequence in step(scheduler).sampling.sequences:
            if not sequence.background:
                found.setdefault(sequence.request.id, number - arrived[sequence.request.id])
    return found


def test_no_request_waits_a_step_longer_for_background_requests() -> None:
    num_compared = 0
    for seed in range(NUM_SEEDS):
        alone, beside = first_tokens(seed, beside=False), first_tokens(seed, beside=True)
        assert beside.keys() >= alone.keys(), seed
        assert all(beside[name] <= steps for name, steps in alone.items()), seed
        num_compared += len(alone)
    assert num_compared > 10 * NUM_SEEDS


def test_background_requests_do_not_push_others_out_of_the_prefix_cache() -> None:
    scheduler = build(pages=24, max_batch=2)
    add(scheduler, request("live", 32, 1))
    step(scheduler), step(scheduler)
    for number in range(20):
        add(scheduler, background(f"b{number}", 30, 3))
    while not scheduler.queues.idle:
        step(scheduler)
    again = request("live", 32, 1)
    sequence = scheduler.queues.add(again, max_output=1)
    step(scheduler)
    assert sequence.num_cached >= 28
