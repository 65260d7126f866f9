"""Rejection sampling in the engine: requests that speculate and others take turns in one slot."""

import numpy as np
import pytest
from engine.harness import Harness, alone, config, prompt, tiny_model
from speculation.test_predictors import with_eagle, with_head

from mlxinfer.core import SamplingParams
from mlxinfer.models.decoder import Model
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.draft import DraftProposer
from mlxinfer.speculation.predictor import PredictorProposer
from mlxinfer.speculation.speculation import Speculation

NUM_REQUESTS = 160  # every second one speculates
LIKELY = range(10, 16)  # the tokens that are drawn
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
    return SamplingParams(
        max_tokens=4,
        temperature=1.0,
        logit_bias=dict.fromkeys(LIKELY, 20.0),
        seed=seed,
        speculate=seed % 2 == 0,
    )


@pytest.mark.alike
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("draft", "qwen3_5_text-v4")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "glm4_moe_lite-v4")),
    ],
)
def test_requests_with_and_without_speculation_take_turns(kind: str) -> None:
    """Those without get the tokens of the plain run, those with its distribution (chi-square)."""
    model, source = model_and_source(kind)
    speculation = Speculation([source], FixedDepth(3), max_depth=3)
    harness = Harness(model, proposer=speculation, max_batch=1)
    for seed in range(NUM_REQUESTS):
        harness.add(str(seed), PROMPT, params(seed))
    outcomes = harness.drain()
    stats = speculation.stats()
    assert 0 < stats["accepted"] < stats["drafted"]
    for seed in range(1, 21, 2):
        assert outcomes[str(seed)].token_ids == alone(model, PROMPT, params(seed)).token_ids
    tokens = np.array([outcomes[str(seed)].token_ids for seed in range(NUM_REQUESTS)])
    for index in range(1, 4):
        times = np.array([np.bincount(tokens[half::2, index], minlength=96) for half in (0, 1)])
        times = times[:, LIKELY]
        assert times.sum() == NUM_REQUESTS
        expected = times.sum(axis=0) / 2
        statistic = ((times - expected) ** 2 / np.maximum(expected, 1)).sum()
        assert statistic < 26  # 5 degrees of freedom: 1 in 10,000 by chance
