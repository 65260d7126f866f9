"""Rejection sampling keeps the distribution: chi-square over many draws of small vocabularies.

MLXINFER_DRAWS=100000 pytest tests/sampling/test_rejection.py
"""

import os

import mlx.core as mx
import numpy as np
import pytest
from models.runs import every

from mlxinfer.core import SamplingParams
from mlxinfer.sampling import sampler as sampler_module
from mlxinfer.sampling.draw import Drawn
from mlxinfer.sampling.sampler import Sampler

NUM_DRAWS = int(os.environ.get("MLXINFER_DRAWS", "4000"))
VOCAB, ROWS = 24, 1000
SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "both": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "min_p": {"min_p": 0.15},
    "biased": {"logit_bias": {3: 2.0, 5: -4.0}},
}


def params(name: str, seed: int) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, **SETTINGS[name]})  # type: ignore[arg-type]


def draws(name: str, *, target: np.ndarray, draft: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Tokens drawn for the target's logits, and how many of the proposals were taken."""
    verifying = Sampler(len(target))
    proposing = Sampler(VOCAB if draft is None else len(draft), proposes=True)
    slots = tuple(range(ROWS))
    for slot in slots:
        for sampler in (verifying, proposing):
            sampler.add(slot, params(name, slot), [], [], frozenset())
    draws, taken = [], 0
    for count in range(-(-NUM_DRAWS // ROWS)):
        counts = np.full(ROWS, count)
        proposed: list[Drawn | None] = []
        if draft is not None:
            sampled = proposing.sample(mx.array(np.tile(draft, (ROWS, 1))), slots, counts)
            guesses, weights = np.array(sampled.tokens), sampled.weights
            assert weights is not None
            for row, guess in enumerate(guesses.tolist()):
                proposed.append((guess, weights[row]) if guess < len(target) else None)
        rows = mx.array(np.tile(target, (ROWS, 1)))
        sampled = verifying.sample(rows, slots, counts, proposed=proposed)
        draws.append(np.array(sampled.tokens))
        taken += 0 if draft is None else int((draws[-1] == guesses).sum())
    return np.concatenate(draws), taken / (len(draws) * ROWS)


def kept(name: str, logits: np.ndarray) -> np.ndarray:
    """The probabilities after temperature, top-k, top-p, min-p and biases, in float64."""
    how = params(name, 0)
    logits = logits.astype(np.float64)
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    p = np.exp((logits - logits.max()) / how.temperature)
    p /= p.sum()
    if how.top_k:
        p[p < np.sort(p)[-how.top_k]] = 0
        p /= p.sum()
    if how.top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= how.top_p]] = 0
        p /= p.sum()
    p[p < how.min_p * p.max()] = 0
    return p / p.sum()


def chi_square(tokens: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """The statistic over tokens that are expected five times at least, and its freedom."""
    expected = p * len(tokens)
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), "a token that was cut"
    usual = expected >= 5
    actual = np.append(counts[usual], counts[~usual].sum())
    wanted = np.append(expected[usual], expected[~usual].sum())
    actual, wanted = actual[wanted > 0], wanted[wanted > 0]
    return float(((actual - wanted) ** 2 / wanted).sum()), len(actual) - 1


def logits_of(seed: int, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, size).astype(np.float32)


@pytest.mark.alike
@pytest.mark.parametrize("name", every(2, SETTINGS))
def test_tokens_have_the_models_distribution_whatever_is_proposed(name: str) -> None:
    target = logits_of(1)
    draft = target + logits_of(2) * 0.7  # alike
    tokens, taken = draws(name, target=target, draft=draft.astype(np.float32))
    p, q = kept(name, target), kept(name, draft)
    statistic, freedom = chi_square(tokens, p)
    # 1 in 10,000 by chance: the tail of the chi-square distribution by Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
    expected = np.minimum(p, q).sum()  # the most that any rule can accept
    assert taken == pytest.approx(expected, abs=4 * np.sqrt(0.25 / len(tokens)))


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 9])
def test_a_draft_with_another_number_of_tokens_keeps_the_distribution(size: int) -> None:
    target = logits_of(1)
    tokens, _ = draws("plain", target=target, draft=logits_of(5, size))
    statistic, freedom = chi_square(tokens, kept("plain", target))
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3


def test_the_test_finds_a_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proposed is always taken: the draft's distribution, which is not the model's."""

    def always(weights, proposed, *rest):  # type: ignore[no-untyped-def]
        return mx.array([token_id for token_id, _ in proposed], mx.uint32)

    monkeypatch.setattr(sampler_module, "take_or_redraw", always)
    target = logits_of(1)
    tokens, _ = draws("plain", target=target, draft=target + logits_of(2) * 0.7)
    statistic, freedom = chi_square(tokens, kept("plain", target))
    assert statistic > 10 * freedom


def test_rows_without_a_drawn_proposal_are_sampled_as_always() -> None:
    target = logits_of(1)
    tokens, _ = draws("plain", target=target, draft=None)
    plain = Sampler(VOCAB)
    slots = tuple(range(ROWS))
    for slot in slots:
        plain.add(slot, params("plain", slot), [], [], frozenset())
    rows = mx.array(np.tile(target, (ROWS, 1)))
    expected = [
        np.array(plain.sample(rows, slots, np.full(ROWS, count)).tokens)
        for count in range(len(tokens) // ROWS)
    ]
    assert (tokens == np.concatenate(expected)).all()
