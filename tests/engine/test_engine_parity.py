"""Through pages, tails, chunks and ragged batches every family still gives transformers' logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.harness import Harness, prompt, tiny_model
from models.cases import CASES
from models.runs import runs

from mlxinfer.core import SamplingParams

DATA = Path(__file__).parents[1] / "data" / "parity"
# Of a fifth of the families one case is run in chunks, of another fifth in steps; in .ci/run of
# every other one and of the rest. models/test_parity.py has both ways for each.
FIRST = list({case.rpartition("-")[0]: case for case in reversed(CASES)}.values())[::-1]
LAST = list({case.rpartition("-")[0]: case for case in CASES}.values())


def on_short_pages(cases: list[Any]) -> list[Any]:
    """Less the model that needs pages of 128 tokens, see `models/test_deepseek_v4.py`."""
    return [case for case in cases if case.values != ("deepseek_v4-wide",)]


def reference(case: str) -> tuple[list[int], np.ndarray]:
    with np.load(DATA / f"{case}.npz") as saved:
        return saved["ids"].tolist(), saved["logits"].astype(np.float32)


def assert_parity(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, expected.std())
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.alike
@pytest.mark.parametrize("case", on_short_pages(runs(LAST[1::8], LAST[1::2])))
def test_chunks_beside_others_give_the_reference_logits(case: str) -> None:
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


@pytest.mark.alike
@pytest.mark.parametrize("case", on_short_pages(runs(FIRST[::8], FIRST[::2])))
def test_decode_steps_beside_others_give_the_reference_logits(case: str) -> None:
    """The reference's own tokens, forced one by one after two beginnings of them in one batch, so
    that every position is a decode step.
    """
    ids, expected = reference(case)
    harness = Harness(tiny_model(case), launch_ahead=False, prefix_cache=False)
    logits: dict[int, list[np.ndarray]] = {3: [], 17: []}  # by the length of the prompt
    slots = dict(enumerate(logits))
    for num_prompt in logits:
        params = SamplingParams(max_tokens=len(ids), logprobs=0)
        harness.add(str(num_prompt), ids[:num_prompt], params)
    wrapped = harness.loop.runner.sampler.sample

    def spy(rows, places, *rest, **named):  # type: ignore[no-untyped-def]
        for row, place in zip(np.array(rows), places, strict=True):
            logits[slots[place]].append(row)
        return wrapped(rows, places, *rest, **named)

    harness.loop.runner.sampler.sample = spy  # type: ignore[method-assign]
    sequences = {
        num_prompt: harness.loop.scheduler.queues.find(str(num_prompt)) for num_prompt in logits
    }
    while any(len(logits[num_prompt]) <= len(ids) - num_prompt for num_prompt in logits):
        harness.turn()
        for num_prompt, sequence in sequences.items():
            if num_prompt < len(sequence.token_ids) <= len(ids):
                sequence.token_ids[-1] = ids[len(sequence.token_ids) - 1]
    for num_prompt, rows in logits.items():
        assert_parity(np.stack(rows[: len(ids) - num_prompt + 1]), expected[num_prompt - 1 :])
