"""Requests, logits and histories that hypothesis draws for the sampling tests."""

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from sampling_reference import Row

from mlxinfer.core import SamplingParams
from mlxinfer.sampling.draw import pad_rows
from mlxinfer.sampling.parts import SamplerSlot, SamplerStep
from mlxinfer.sampling.sampler import make_plan

VOCAB = 300
TOKENS = st.integers(0, VOCAB - 1)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 100, VOCAB - 1, VOCAB]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.01, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    repetition_window=st.sampled_from([-1, -1, 0, 1, 3, 20]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.1]),
    logit_bias=st.one_of(
        st.just({}), st.dictionaries(TOKENS, st.sampled_from([-1e9, -3.0, 0.5, 8.0]), max_size=4)
    ),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.5]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.8, 0.2]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.6]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 0.8, 3.0]),
    dry_base=st.sampled_from([1.0, 1.75, 100.0]),
    dry_allowed_length=st.sampled_from([1, 1, 2, 3]),
    dry_penalty_last_n=st.sampled_from([-1, -1, 0, 3, 8]),
    seed=st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),  # which is none
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
)


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    """(VOCAB,) float32 on a grid, so that equal values are frequent; some of them may be -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 4, 30, 100]))
    x = rng.integers(-spread, spread + 1, VOCAB).astype(np.float32) / 8
    if draw(st.booleans()):
        x[rng.random(VOCAB) < 0.4] = -np.inf
        x[rng.integers(VOCAB)] = 1.0
    return x


@st.composite
def rows(draw: st.DrawFn) -> Row:
    few = st.integers(0, 9)  # from few tokens, so that they repeat
    return Row(
        params=draw(PARAMS),
        logits=draw(logits()),
        prompt_ids=draw(st.lists(st.one_of(few, TOKENS), max_size=12)),
        output_ids=draw(st.lists(st.one_of(few, TOKENS), max_size=6)),
        stop_ids=draw(st.frozensets(TOKENS, max_size=3)),
        breakers=draw(st.sampled_from([frozenset(), frozenset({0}), frozenset({3, 7})])),
    )


def changed(
    cases: list[Row], pending: list[int] | None = None, *, fused: bool = True
) -> np.ndarray:
    """(R, V) logits after all parts; tokens of `pending` come after those of the rows."""
    slots = [
        SamplerSlot(row.params, row.prompt_ids, row.output_ids, row.stop_ids, row.breakers)
        for row in cases
    ]
    vocab_size = len(cases[0].logits)
    plan = make_plan(slots, vocab_size)
    logits = pad_rows(mx.array(np.stack([row.logits for row in cases])))
    recent = None if pending is None else mx.array(pending, mx.int32)[:, None]
    step = SamplerStep(np.array([len(row.output_ids) for row in cases]), recent)
    for part in plan.before + (plan.fused if fused else []):
        logits = part.apply(logits, step)
    assert mx.isinf(logits[:, vocab_size:]).all()
    return np.array(logits)[:, :vocab_size]
