"""Behind the last layer that stores keys, a prompt goes on with the rows that give logits."""

from typing import Any

import numpy as np
import pytest
from engine.harness import Harness, Outcome, prompt, tiny_model
from models.cases import CASES
from models.runs import every

from mlxinfer.core import SamplingParams

SHARING = ("gemma4_e-v4", "gemma4_e-v5", "gemma3n_text-v4", "gemma3n_text-v5")
SHORT_PAGED = [case for case in CASES if not case.startswith("deepseek_v4")]
ONE_OF_EACH = {case.rpartition("-")[0]: case for case in SHORT_PAGED}
RUNS = [*every(16, [case for case in ONE_OF_EACH.values() if case not in SHARING]), *SHARING]
PARAMS = SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True)


class Counted:
    """A feed-forward block that notes the rows it is given."""

    def __init__(self, block: Any) -> None:
        self.block, self.rows = block, [0]

    def __call__(self, x: Any, *rest: Any) -> Any:
        self.rows.append(x.shape[0])
        return self.block(x, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


def answers(case: str, *, all_rows: bool, beside: bool = True) -> dict[str, Outcome]:
    """Answers to two prompts in chunks, beside one that is being answered."""
    harness = Harness(tiny_model(case, quantized=True), prefill_chunk=32, prefix_cache=False)
    if beside:
        harness.add("before", prompt(21), SamplingParams(max_tokens=20, ignore_eos=True))
        harness.turn(3)
    for name, length in {"long": 75, "short": 30}.items():
        harness.add(name, prompt(length), PARAMS, prompt_logits=all_rows)
    return harness.drain()


@pytest.mark.parametrize("case", RUNS)
def test_answers_are_those_of_steps_that_compute_all_rows(case: str) -> None:
    expected, narrowed = answers(case, all_rows=True), answers(case, all_rows=False)
    for name, outcome in expected.items():
        assert narrowed[name].token_ids == outcome.token_ids
        for ours, all_of_them in zip(narrowed[name].logprobs, outcome.logprobs, strict=True):
            assert np.isclose(ours.logprob, all_of_them.logprob, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3-v4", "gemma3_text-v4", *SHARING])
def test_late_blocks_see_the_rows_that_are_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer that stores anything, and of all behind it, whose keys are earlier ones."""
    model = tiny_model(case, quantized=True)
    counted = []
    for layer in model.layers:
        counted.append(Counted(layer.mlp))
        monkeypatch.setattr(layer, "mlp", counted[-1])
    answers(case, all_rows=False, beside=False)
    first, last = model.last_to_store, len(model.layers)
    most = [max(block.rows) for block in counted]
    assert min(most[:first], default=17) > 16, "a chunk goes through earlier layers as a whole"
    assert max(most[first:last]) <= 2, "a row of each prompt at most"
    assert first < last - 1 or case != "gemma3n_text-v4"
