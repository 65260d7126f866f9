"""A prompt that was answered before must find room where it found room the first time."""

import pytest
from engine.harness import PAGE, Harness, alone, prompt, tiny_model

from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine.batch import Sequence


@pytest.mark.alike
@pytest.mark.parametrize("case", ["qwen3-v4", "mistral-v4", "gemma3_text-v4"])
@pytest.mark.parametrize("length", [39, 48, 101])
def test_a_repeated_prompt_fits_in_a_pool_of_its_own_size(case: str, length: int) -> None:
    """What it shares is locked, a page cut in two besides: that must not be counted against it."""
    model = tiny_model(case, quantized=True)
    harness = Harness(model, num_pages=-(-(length + 5) // PAGE), max_batch=2)
    for i in range(3):
        harness.run(str(i), prompt(length), SamplingParams(max_tokens=5))
    first, *others = [outcome.token_ids for outcome in harness.outcomes.values()]
    assert len(first) == 5
    assert others == [first, first]


@pytest.mark.alike
@pytest.mark.parametrize("bits", [None, 8])
def test_preemption_in_the_step_of_admission_changes_no_other_sequence(bits: int | None) -> None:
    """It has no slot when the step begins: the last one is another sequence's."""
    model = tiny_model("qwen3-v4", quantized=True)
    harness = Harness(model, max_batch=4, prefix_cache=False, kv=KVOptions(bits=(bits, bits)))
    params = {
        name: SamplingParams(max_tokens=3 if name == "a" else 40, repetition_penalty=1.5)
        for name in "abcd"
    }
    for name in "abcd":
        harness.add(name, prompt(9, seed=ord(name)), params[name])
    harness.turn(6)
    queues, times = harness.loop.scheduler.queues, [2]
    hold = queues.hold

    def held(sequence: Sequence, num_tokens: int) -> bool:
        if sequence.request.id != "late" or not times[0]:
            return hold(sequence, num_tokens)
        times[0] -= 1
        queues.preempt(sequence)
        return False

    queues.hold = held  # type: ignore[method-assign]
    harness.add("late", prompt(9, seed=7), SamplingParams(max_tokens=5))
    outcomes = harness.drain()
    assert not times[0]
    for name in "bcd":
        expected = alone(
            model, prompt(9, seed=ord(name)), params[name], kv=KVOptions(bits=(bits, bits))
        )
        assert outcomes[name].token_ids == expected.token_ids
