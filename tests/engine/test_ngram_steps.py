"""Steps of a model with n-grams and an index: when rows are read, where prompts go on."""

import pytest
from engine.harness import PAGE, Harness, prompt, tiny_model
from models.runs import every

from mlxinfer.core import SamplingParams
from mlxinfer.engine.runner import Forward
from mlxinfer.models.decoder import Model
from mlxinfer.models.weights.row_table import FileRows

CASE = "qwen4_exp_text-v4"
ROWS = 4  # of a token
GREEDY = SamplingParams(max_tokens=12, logprobs=2)


def test_rows_are_read_when_all_of_a_step_is_built(monkeypatch):
    """In flight is the step before: it gives the token that says which rows."""
    events, in_flight = [], []
    run, read, logits = Forward.run, FileRows.read, Model.logits

    def noted_run(self, step, tokens, features=()):
        in_flight.append(tokens is not None and step.known_ids is None)
        return run(self, step, tokens, features)

    monkeypatch.setattr(Forward, "run", noted_run)
    monkeypatch.setattr(Model, "logits", lambda *args: (events.append("built"), logits(*args))[1])
    monkeypatch.setattr(
        FileRows,
        "read",
        lambda self, rows, memory: (events.append(len(rows)), read(self, rows, memory))[1],
    )
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model)
    assert len(harness.run("a", prompt(30), GREEDY).token_ids) == 12
    assert events[0] == PAGE * ROWS, "a chunk of the prompt, which samples nothing"
    assert events[1:3] == ["built", (30 - PAGE) * ROWS]
    assert events[3:] == ["built", ROWS] * (len(events) // 2 - 1)
    assert sum(in_flight) == 10, in_flight


@pytest.mark.parametrize("case", every(2, [CASE, "qwen4_exp_text-v5"]))
def test_a_prompt_goes_on_where_a_page_ends(case):
    """What the first tokens of an open block brought is not in pages."""
    harness, ids = Harness(tiny_model(case, quantized=True), prefill_chunk=2 * PAGE), []
    for turn, more in enumerate([prompt(4 * PAGE + 5), prompt(9, 1), prompt(40, 2)]):
        ids = ids + more
        outcome = harness.run(str(turn), ids, GREEDY)
        assert outcome.cached_tokens == (4 * PAGE if turn else 0)
    harness.check()


def test_a_short_sequence_beside_a_long_one():
    """The long one chooses blocks; the short one has none yet."""
    harness = Harness(tiny_model(CASE, quantized=True))
    for length in (50, 1, 2):
        harness.add(str(length), prompt(length), GREEDY)
    harness.check()
