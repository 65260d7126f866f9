"""Micro-batches of pipeline stages with proposals: several of such steps in flight at once."""

import random

import pytest
from engine.harness import Harness, alone, prompt, tiny_model
from engine.oracle import Oracle
from engine.stages import NoOtherRanks

from mlxinfer.core import SamplingParams

CASES = ("qwen3-v4", "qwen3_next-v4", "gemma3_text-v4")


class Always(Oracle):
    """Proposals for every step, some of which hold."""

    def __init__(self, answers: dict[str, list[int]], seed: int) -> None:
        super().__init__(answers, seed)
        self._rests = 0.0


def params_of(i: int) -> SamplingParams:
    """Some greedy, some drawn, some with a penalty on what was said."""
    drawn = SamplingParams(max_tokens=20, temperature=0.8, seed=i)
    return [
        SamplingParams(max_tokens=20),
        drawn,
        SamplingParams(max_tokens=20, repetition_penalty=1.3),
    ][i % 3]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("num_stages", "leaves"), [(2, False), (4, True)], ids=["all stay", "some leave"]
)
def test_steps_with_proposals_take_turns_and_give_the_tokens_of_one_rank(
    num_stages: int, leaves: bool, case: str
) -> None:
    """Also where neighbours finish or are preempted while proposals are verified."""
    model, rng = tiny_model(case, quantized=True), random.Random(f"{num_stages} {case}")
    asked = {str(i): (prompt(12 + 5 * i, i), params_of(i)) for i in range(8)}
    plains = {name: alone(model, *one).token_ids for name, one in asked.items()}
    followers = NoOtherRanks(num_stages)
    harness = Harness(model, proposer=Always(plains, 7), followers=followers, prefill_chunk=256)
    for name, (ids, params) in asked.items():
        harness.add(name, list(ids), params)
    while not harness.loop.idle:
        harness.turn()
        queues = harness.loop.scheduler.queues
        if leaves and queues.running and rng.random() < 0.5:
            one = rng.choice(queues.running)
            if rng.random() < 0.1:
                harness.loop.abort(one.request.id)
            else:
                queues.preempt(one)
    for name, outcome in harness.drain().items():
        said = outcome.token_ids
        assert said == plains[name][: len(said) if leaves else None]
    assert followers.most_verified == num_stages or (leaves and followers.most_verified > 1)
    counters = harness.loop.scheduler.counters
    assert 0 < counters.tokens_accepted < counters.tokens_proposed
