"""Through pages, tails, chunks and ragged batches every family still gives transformers' logits."""

from pathlib import Path

import numpy as np
import pytest
from engine.harness import Harness, prompt, tiny_model
from models.cases import CASES

from mlxinfer.core import SamplingParams

DATA = Path(__file__).parents[1] / "data" / "parity"


def reference(case: str) -> tuple[list[int], np.ndarray]:
    with np.load(DATA / f"{case}.npz") as saved:
        return saved["ids"].tolist(), saved["logits"].astype(np.float32)


def assert_parity(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, expected.std())
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("case", CASES)
def test_chunks_beside_others(case: str) -> None:
    ids, expected = reference(case)
    harness = Harness(tiny_model(case), prefill_chunk=32)
    harness.add("before", prompt(21), SamplingParams(max_tokens=30))
    harness.turn(3)
    harness.add("it", ids, SamplingParams(max_tokens=1), prompt_logits=True)
    harness.add("beside", prompt(50), SamplingParams(max_tokens=3))
    outcome = harness.drain()["it"]
    assert len(outcome.logits) > 1, "one chunk only"
    assert_parity(np.concatenate(outcome.logits), expected)
    assert outcome.token_ids == [int(expected[-1].argmax())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_prompt", [3, 17])
def test_steps_beside_others(case: str, num_prompt: int) -> None:
    """The reference's own tokens, forced one by one, so that every position is a decode step."""
    ids, expected = reference(case)
    harness = Harness(tiny_model(case), launch_ahead=False)
    params = SamplingParams(max_tokens=len(ids), logprobs=0)
    harness.add("it", ids[:num_prompt], params)
    harness.add("beside", prompt(9), SamplingParams(max_tokens=50))
    logits = []
    wrapped = harness.loop.runner.sampler.sample

    def spy(rows, slots, *rest):  # type: ignore[no-untyped-def]
        logits.extend(np.array(rows)[[s == 0 for s in slots]])
        return wrapped(rows, slots, *rest)

    harness.loop.runner.sampler.sample = spy  # type: ignore[method-assign]
    sequence = harness.loop.scheduler.queues.find("it")
    assert sequence is not None
    while len(logits) <= len(ids) - num_prompt:
        harness.turn()
        if sequence.num_known > num_prompt and sequence.num_known <= len(ids):
            sequence.token_ids[-1] = ids[sequence.num_known - 1]
    assert_parity(np.stack(logits), expected[num_prompt - 1 :])
