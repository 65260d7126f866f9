"""Pictures in prompts: their features stand for embeddings, and all else composes with them."""

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import PAGE, Harness, alone, prompt
from engine.pictures import picture, placed, seeing, tower_of

from mlxinfer.core import Request, SamplingParams
from mlxinfer.images import Picture, PlacedPicture
from mlxinfer.layers.step import Step, StepFeatures
from mlxinfer.models.decoder import Model

GREEDY = SamplingParams(max_tokens=12, logprobs=2)
Asked = tuple[list[int], tuple[PlacedPicture, ...]]


def logits(model: Model, asked: Asked, **changes: object) -> np.ndarray:
    """(T, vocab) of a prompt through the engine."""
    harness = Harness(model, **changes)
    ids, pictures = asked
    harness.add("it", ids, SamplingParams(max_tokens=1), prompt_logits=True, pictures=pictures)
    outcome = harness.drain()["it"]
    assert outcome.error is None
    return np.concatenate(outcome.logits)


def features_of(model: Model, one: Picture) -> list[mx.array]:
    """The features of a picture, straight from the tower."""
    parts = []
    for tile in one.tiles:
        pieces = tower_of(model).run(tile)
        try:
            while True:
                next(pieces)
        except StopIteration as end:
            parts.append([end.value.vectors, *end.value.deep])
    return [mx.concatenate(list(part)) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("num_deep", [0, 2])
@pytest.mark.parametrize("chunk", [256, 16])
def test_features_stand_for_embeddings(num_deep: int, chunk: int) -> None:
    """As a forward pass without engine computes them, over plain attention."""
    model = seeing("qwen3-v4", num_deep=num_deep)
    asked = placed(
        prompt(20), picture(1, 3, 9, breaks=True), prompt(7, 1), picture(2, 2, 5, num_tiles=2), [5]
    )
    ids, pictures = asked
    arrays = [features_of(model, one) for one, _ in pictures]
    rows = np.flatnonzero(np.array(ids) == pictures[0].picture.feature_id).astype(np.int32)
    parts = [mx.concatenate(list(part)) for part in zip(*arrays, strict=True)]
    expected = dense_logits(model, ids, StepFeatures(mx.array(rows), parts[0], tuple(parts[1:])))
    found = logits(model, asked, prefill_chunk=chunk)
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))
    text = dense_logits(model, ids, None)
    assert np.abs(text - expected).max() > 0.1, "the picture makes no difference"


def dense_logits(model: Model, ids: list[int], features: StepFeatures | None) -> np.ndarray:
    """(T, vocab) of one pass over a prompt, through a cache of its own."""
    harness = Harness(model, prefill_chunk=256)
    forward = harness.loop.runner.forward
    kept: list[Step] = []
    call = model.__class__.__call__

    class Watched(model.__class__):  # type: ignore[name-defined,misc]
        def __call__(self, tokens: mx.array, step: Step) -> mx.array:
            step.features = features
            kept.append(step)
            return call(self, tokens, step)

    forward.model = model.__class__.__new__(Watched)
    forward.model.__dict__.update(model.__dict__)
    harness.add("it", ids, SamplingParams(max_tokens=1), prompt_logits=True)
    outcome = harness.drain()["it"]
    assert len(kept) == 1
    return np.concatenate(outcome.logits)


CASES = ["qwen3-v4", "gemma3_text-v4", "hybrid qwen3-v4", "deepseek_v3-v4"]


@pytest.mark.parametrize("case", CASES)
def test_any_chunks_and_neighbours_give_the_tokens_of_the_plain_run(case: str) -> None:
    model = seeing(case, spans=case.startswith("gemma3"))
    asked = [
        placed(prompt(11, i), picture(i, 4, 6, sees_itself=True), prompt(9, i), picture(9), [3 + i])
        for i in range(3)
    ]
    asked.append((prompt(50), ()))
    harness = Harness(model, prefill_chunk=48, max_batch=3)
    for name, (ids, pictures) in enumerate(asked):
        harness.add(str(name), ids, GREEDY, pictures=pictures)
    for name, outcome in harness.drain().items():
        ids, pictures = asked[int(name)]
        assert outcome.error is None
        assert outcome.token_ids == alone(model, ids, GREEDY, pictures=pictures).token_ids


def test_a_picture_in_another_conversation_runs_no_tower_and_shares_pages() -> None:
    model = seeing("qwen3-v4")
    one = picture(3, 4, 9)
    harness, before = Harness(model), len(tower_of(model).passes)
    ids, pictures = placed(one, prompt(3))
    harness.add("first", ids, GREEDY, pictures=pictures)
    harness.drain()
    assert len(tower_of(model).passes) == before + 1
    ids, pictures = placed(one, prompt(20, 5))
    harness.add("second", ids, GREEDY, pictures=pictures)
    second = harness.drain()["second"]
    assert second.cached_tokens >= len(one.token_ids)
    ids, pictures = placed(prompt(5), one, prompt(20, 5))
    harness.add("elsewhere", ids, GREEDY, pictures=pictures)
    elsewhere = harness.drain()["elsewhere"]
    assert elsewhere.cached_tokens == 0
    assert len(tower_of(model).passes) == before + 1
    assert harness.loop.stats()["pictures"]["cached"] == 1


def test_two_pictures_of_equal_size_and_text_share_nothing() -> None:
    model = seeing("qwen3-v4")
    harness = Harness(model)
    for seed in (1, 2):
        ids, pictures = placed(picture(seed, 4, 9), prompt(40))
        harness.add(str(seed), ids, GREEDY, pictures=pictures)
        outcome = harness.drain()[str(seed)]
        assert outcome.cached_tokens == 0
        assert outcome.token_ids == alone(model, ids, GREEDY, pictures=pictures).token_ids
    request = Request("text", ids, GREEDY)
    assert request.prompt_ids == ids
    harness.add("text", ids, GREEDY)  # nor with the same ids as text
    assert harness.drain()["text"].cached_tokens == 0
    assert len(ids) > PAGE
