"""Once the last layer has stored keys, a prompt goes on with the rows that give logits."""

import os
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, Outcome, prompt, tiny_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models.cases import CASES
from models.runs import every

from mlxinfer.cache.attention import Prepared
from mlxinfer.core import SamplingParams
from mlxinfer.errors import RequestFailedError

SHARING = ("gemma4_e-v4", "gemma4_e-v5", "gemma3n_text-v4", "gemma3n_text-v5")
SHORT_PAGED = [case for case in CASES if not case.startswith("deepseek_v4")]
ONE_OF_EACH = {case.rpartition("-")[0]: case for case in SHORT_PAGED}
RUNS = [*every(16, [case for case in ONE_OF_EACH.values() if case not in SHARING]), *SHARING]
PARAMS = SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True)


class Counted:
    """A feed-forward block or a projection that notes the rows it is given."""

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


def assert_alike(ours: dict[str, Outcome], others: dict[str, Outcome]) -> None:
    for name, outcome in others.items():
        assert ours[name].error is None
        assert ours[name].token_ids == outcome.token_ids, name
        for one, other in zip(ours[name].logprobs, outcome.logprobs, strict=True):
            assert np.isclose(one.logprob, other.logprob, atol=1e-4)


@pytest.mark.alike
@pytest.mark.parametrize("case", RUNS)
def test_answers_are_those_of_steps_that_compute_all_rows(case: str) -> None:
    assert_alike(answers(case, all_rows=False), answers(case, all_rows=True))


@given(
    case=st.sampled_from([*ONE_OF_EACH.values(), *SHARING]),
    prompts=st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=4),
    chunk=st.sampled_from([16, 32, 64]),
    cached=st.booleans(),
    begin=st.integers(0, 40),
)
@example(case="qwen3-v4", prompts=[(20, True), (30, False)], chunk=64, cached=False, begin=0)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "8")))
def test_random_programs_answer_as_steps_that_compute_all_rows(
    case: str, prompts: list[tuple[int, bool]], chunk: int, cached: bool, begin: int
) -> None:
    """Prompts that begin alike; some answers have a grammar, and are sampled last."""
    outcomes = []
    for all_rows in (False, True):
        harness = Harness(
            tiny_model(case, quantized=True), prefill_chunk=chunk, prefix_cache=cached, max_batch=3
        )
        for number, (length, constrained) in enumerate(prompts):
            ids = prompt(begin) + prompt(length, seed=number)
            grammar = FakeGrammar(number) if constrained else None
            harness.add(str(number), ids, PARAMS, prompt_logits=all_rows, grammar=grammar)
            harness.turn(number % 2)
        outcomes.append(harness.drain())
    assert_alike(*outcomes)


@pytest.mark.alike
@pytest.mark.parametrize("case", ["qwen3-v4", "gemma3_text-v4", *SHARING])
def test_late_blocks_see_the_rows_that_are_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer that stores anything, and of all behind it, whose keys are earlier ones."""
    model = tiny_model(case, quantized=True)
    most: dict[str, list[int]] = {"queries": []}
    attend = Prepared.attend

    def counted(self: Prepared, layer: Any, queries: Any, softmax: Any) -> Any:
        most["queries"].append(len(queries))  # of all layers in turn
        return attend(self, layer, queries, softmax)

    monkeypatch.setattr(Prepared, "attend", counted)
    blocks: dict[str, list[Counted]] = {"mlp": [], "o_proj": []}
    for layer in model.layers:
        for name, of in (("mlp", layer), ("o_proj", getattr(layer.mixer, "args", layer.mixer))):
            blocks[name].append(Counted(getattr(of, name)))
            monkeypatch.setattr(of, name, blocks[name][-1])
    answers(case, all_rows=False, beside=False)
    first, last = model.last_to_store, len(model.layers)
    most["queries"] = [max(most["queries"][index::last]) for index in range(last)]
    most |= {name: [max(one.rows) for one in counted] for name, counted in blocks.items()}
    for name, rows in most.items():
        assert min(rows[:first], default=17) > 16, f"a chunk goes through earlier {name} as a whole"
        assert max(rows[first:]) <= 2, f"{name}: a row of each prompt at most"
    assert first < last - 1 or case != "gemma3n_text-v4"


class Damaged:
    """A projection that gives no numbers for the fourth row of 32."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __call__(self, x: mx.array) -> mx.array:
        bad = (mx.arange(len(x)) == 3) & (len(x) == 32)
        return mx.where(bad[:, None], mx.nan, self.base(x))

    def some_outputs(self, outputs: slice) -> "Damaged":
        return Damaged(self.base.some_outputs(outputs))


def test_unseen_keys_that_are_no_numbers_end_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of 8 hide them from all rows that are read; a page would keep them."""
    model = tiny_model("mistral-v4", quantized=True)
    args = model.layers[-1].mixer.args
    monkeypatch.setattr(args, "qkv_proj", Damaged(args.qkv_proj))
    harness = Harness(model, prefill_chunk=32)
    assert isinstance(harness.run("a", prompt(80), PARAMS).error, RequestFailedError)
