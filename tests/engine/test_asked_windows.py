"""A window and sinks that a user asks for, in all families, against dense attention under masks.

They apply to layers that see everything. Layers that were trained with a window, or within chunks,
keep theirs: a window that is narrower than the trained one would change what they compute, and
sinks that they never saw even more.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine.harness import Harness, hybrid_model, prompt, tiny_model, zoo_model
from hypothesis import given, settings
from hypothesis import strategies as st
from models.cases import CASES
from models.dense_kv import DenseCache, dense_cache

from mlxinfer.cache_specs import CacheSpec, KVSpec, LatentSpec, StateSpec
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError
from mlxinfer.session.options import EngineOptions

MIXED = {"hybrid gemma3_text-v4": (1, 2), "hybrid deepseek_v3-v4": (1,)}  # recurrent layers
ZOO = ("zoo gpt_neox", "zoo mimo_v2_flash", "zoo stablelm")


def model_of(case: str) -> Any:
    if case in MIXED:
        return hybrid_model(case.split()[1], MIXED[case])
    return zoo_model(case.split()[1]) if case in ZOO else tiny_model(case)


def takes_windows(spec: CacheSpec) -> bool:
    """Whether a layer sees all positions, as attention without an index does."""
    return isinstance(spec, KVSpec | LatentSpec) and spec.window is None


def chooses_itself(spec: CacheSpec) -> bool:
    return not isinstance(spec, KVSpec | LatentSpec | StateSpec) or (
        isinstance(spec, LatentSpec) and spec.num_ranked > 0
    )


def dense_logits(model: Any, ids: list[int], window: int, sinks: int) -> np.ndarray:
    """Every position's logits (T, vocab) under masks, all tokens in one step."""
    cache = DenseCache(model)
    cache.rope_variants["a"] = model.rope_variant(len(ids) + 1)
    for mixer, spec in zip(model.mixers, model.cache_specs, strict=True):
        if takes_windows(spec):
            cache.layers[mixer] = dense_cache(mixer, replace(spec, window=window, sinks=sinks))
    return np.array(cache.run(model, [("a", ids)]))


@given(
    case=st.sampled_from([*CASES, *MIXED, *ZOO]),
    window=st.integers(1, 50),
    sinks=st.sampled_from([0, 1, 4, 17]),
    chunk=st.sampled_from([16, 64, 256]),
    length=st.integers(1, 110),
)
@settings(max_examples=int(os.environ.get("MLXINFER_PROGRAMS", "12")))
def test_full_layers_get_the_window_and_trained_ones_keep_theirs(
    case: str, window: int, sinks: int, chunk: int, length: int
) -> None:
    model, options = model_of(case), KVOptions(window=window, sinks=sinks)
    if any(chooses_itself(spec) for spec in model.cache_specs):
        with pytest.raises(InvalidRequestError, match="kv_window"):
            Harness(model, kv=options)
        return
    harness = Harness(model, kv=options, prefill_chunk=chunk, num_pages=40)
    ids = prompt(length)
    harness.add("other", prompt(40, seed=1), SamplingParams(max_tokens=9))
    harness.turn(2)
    ours = harness.logits(ids)
    expected = dense_logits(model, ids, window, sinks)
    assert np.abs(ours - expected).max() <= 2e-4 * max(1.0, expected.std())


@pytest.mark.parametrize("case", ["mistral-v4", "gemma3_text-v4", "hybrid gemma3_text-v4"])
def test_a_window_that_no_layer_would_take_is_refused(case: str) -> None:
    model = model_of(case)
    options, takes = EngineOptions(kv_window=9), any(map(takes_windows, model.cache_specs))
    assert takes == (case != "mistral-v4")
    if takes:
        assert options.config(model, None, 1 << 26).kv.window == 9
        return
    with pytest.raises(InvalidRequestError, match="no layer of this model sees all positions"):
        options.config(model, None, 1 << 26)
