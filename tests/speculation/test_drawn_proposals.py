"""Rejection sampling in the engine: requests that speculate and others take turns in one slot."""

from typing import Any

import numpy as np
import pytest
from engine.harness import Harness, config, prompt, tiny_model
from speculation.test_predictors import with_eagle, with_head

from mlxinfer.core import SamplingParams
from mlxinfer.models.decoder import Model
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.draft import DraftProposer
from mlxinfer.speculation.predictor import PredictorProposer
from mlxinfer.speculation.speculation import Speculation

NUM_REQUESTS = 60  # every second one speculates
LIKELY = range(10, 16)  # the tokens that are drawn
TEMPERATURE = 3.0  # lower, nearly all that is drawn is one token, of which no rule can be told
PROMPT = prompt(9)


def model_and_source(kind: str) -> tuple[Model, DraftProposer]:
    """A model, and a draft or head that proposes with another distribution."""
    sizes, how = config(num_pages=60), {"cost": 0.1, "rejects": True, "vocab_size": 96}
    if kind == "draft":
        model, draft = (tiny_model(case, quantized=True) for case in ("qwen3-v4", "gpt_oss-v4"))
        return model, DraftProposer(draft, sizes, **how)  # type: ignore[arg-type]
    model, head = with_eagle() if kind == "eagle" else with_head(kind, right=False)
    return model, PredictorProposer(head, sizes, name=kind, **how)  # type: ignore[arg-type]


def params(seed: int) -> SamplingParams:
    bias = dict.fromkeys(LIKELY, 60.0)  # others have a chance of 1e-7
    how: dict[str, Any] = {"max_tokens": 24, "temperature": TEMPERATURE, "logit_bias": bias}
    return SamplingParams(**how, seed=seed, speculate=seed % 2 == 0)


@pytest.mark.alike
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("draft", "qwen3_5_text-v4")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "glm4_moe_lite-v4")),
    ],
)
def test_requests_with_and_without_speculation_take_turns(kind: str) -> None:
    """Those without get the tokens of the plain run, those with the model's own distribution.

    Its tokens are counted by their rank among the likely ones (chi-square): a rule that takes what
    is proposed, or draws again from all that the model may say, chooses the first one too seldom.
    """
    model, source = model_and_source(kind)
    speculation = Speculation([source], FixedDepth(3), max_depth=3)
    harness = Harness(model, proposer=speculation, max_batch=1)
    for seed in range(NUM_REQUESTS):
        harness.add(str(seed), PROMPT, params(seed))
    outcomes = harness.check(*[str(seed) for seed in range(1, 21, 2)])
    stats = speculation.stats()
    assert 0 < stats["accepted"] < stats["drafted"]
    plain, counts, expected = Harness(model), np.zeros(len(LIKELY)), np.zeros(len(LIKELY))
    for seed in range(0, NUM_REQUESTS, 2):
        answer = outcomes[str(seed)].token_ids
        logits = plain.logits(PROMPT + answer[:-1])[len(PROMPT) :, LIKELY]  # (N - 1, L)
        weights = np.exp(logits / TEMPERATURE)
        p = weights / weights.sum(axis=1, keepdims=True)
        order = np.argsort(-p, axis=1)
        expected += np.take_along_axis(p, order, axis=1).sum(axis=0)
        counts += (np.array(answer[1:])[:, None] == np.array(LIKELY)[order]).sum(axis=0)
    assert counts.sum() == expected.sum().round() == NUM_REQUESTS // 2 * 23
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 26  # 5 degrees of freedom: 1 in 10,000 by chance
