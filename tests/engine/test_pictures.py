"""Pictures in prompts: their features stand for embeddings, and all else composes with them."""

from dataclasses import fields, replace
from functools import cache
from math import inf
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import MROPE, PAGE, Harness, Outcome, alone, disk_at, model_of, prompt
from engine.pictures import RandomTower, picture, placed, run_tower, seeing, tower_of, with_tower
from models.runs import every
from models.tiny import arrays_of, tiny_config, write

from mlxinfer.cache.inputs import StepMetadata
from mlxinfer.config import KVOptions
from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.features import PictureFeatures
from mlxinfer.engine.prompt_pictures import PromptPictures
from mlxinfer.errors import InsufficientMemoryError, InvalidRequestError, RequestFailedError
from mlxinfer.fair import Tenant
from mlxinfer.images import Picture, PlacedPicture
from mlxinfer.images.picture import rope_positions
from mlxinfer.layers.step import Step, StepFeatures
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from mlxinfer.server.metrics import FAMILIES
from mlxinfer.session.options import EngineOptions

GREEDY = SamplingParams(max_tokens=12, logprobs=2)
SLICE_S = 600.0  # longer than any step takes
Asked = tuple[list[int], tuple[PlacedPicture, ...]]
TALK = ["hybrid qwen3-v4", "qwen3_5_text-v5", "gemma3_text-v4"]


def logits(model: Model, asked: Asked, **changes: object) -> np.ndarray:
    """(T, vocab) of a prompt through the engine."""
    ids, pictures = asked
    return Harness(model, **changes).logits(ids, pictures=pictures)


def features_of(model: Model, one: Picture) -> list[mx.array]:
    """The features of a picture, straight from the tower."""
    passes = [run_tower(tower_of(model), tile) for tile in one.tiles]
    parts = [[seen.vectors, *seen.deep] for seen in passes]
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
    in_chunks = logits(model, asked, prefill_chunk=chunk)
    np.testing.assert_allclose(in_chunks, expected, atol=1e-4 * max(1.0, float(expected.std())))
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
    logits = harness.logits(ids)
    assert len(kept) == 1
    return logits


def test_a_picture_in_another_conversation_runs_no_tower_and_shares_pages() -> None:
    model = seeing("qwen3-v4")
    one = picture(3, 4, 9)
    harness, before = Harness(model), len(tower_of(model).passes)
    ids, pictures = placed(one, prompt(3))
    harness.run("first", ids, GREEDY, pictures=pictures)
    assert len(tower_of(model).passes) == before + 1
    ids, pictures = placed(one, prompt(20, 5))
    second = harness.run("second", ids, GREEDY, pictures=pictures)
    assert second.cached_tokens >= len(one.token_ids)
    ids, pictures = placed(prompt(5), one, prompt(20, 5))
    elsewhere = harness.run("elsewhere", ids, GREEDY, pictures=pictures)
    assert elsewhere.cached_tokens == 0
    assert len(tower_of(model).passes) == before + 1
    assert harness.loop.stats()["pictures"]["cached"] == 1


def test_two_pictures_of_equal_size_and_text_share_nothing() -> None:
    harness = Harness(seeing("qwen3-v4"))
    for seed in (1, 2):
        ids, pictures = placed(picture(seed, 4, 9), prompt(40))
        harness.run(str(seed), ids, GREEDY, pictures=pictures)
    harness.add("text", ids, GREEDY)  # nor with the same ids as text
    assert [outcome.cached_tokens for outcome in harness.check().values()] == [0, 0, 0]
    assert len(ids) > PAGE


@pytest.mark.alike
@pytest.mark.parametrize("case", every(3, TALK))
def test_a_conversation_computes_no_more_than_its_new_tokens(case: str) -> None:
    """Five turns with two pictures: at most 5 % of earlier turns again, and two tower passes."""
    spans, mrope = case.startswith("gemma3"), model_of(case).rope_axes == 3
    model = seeing(case, spans=spans)
    harness, before = Harness(model, max_context=4096), len(tower_of(model).passes)
    parts: list[list[int] | Picture] = []
    earlier = again = 0
    for turn in range(5):
        if turn in (0, 2):
            parts.append(picture(turn, 5, 8, mrope=mrope, sees_itself=True))
        parts.append(prompt(60, turn))
        ids, pictures = placed(*parts)
        computed = harness.loop.scheduler.counters.prompt_tokens_computed
        outcome = harness.run(str(turn), ids, GREEDY, pictures=pictures)
        computed = harness.loop.scheduler.counters.prompt_tokens_computed - computed
        again += computed - (len(ids) - earlier)
        parts.append(outcome.token_ids)
        earlier = len(ids) + len(outcome.token_ids)
    harness.check()
    assert again <= 0.05 * earlier, (again, earlier)
    assert len(set(tower_of(model).passes[before:])) == 2
    assert harness.loop.stats()["pictures"]["seen"] == 2


@pytest.mark.alike
@pytest.mark.parametrize("case", ["hybrid qwen3-v4", "qwen3_5_text-v5", "lfm2-v4"])
def test_another_question_after_a_picture_goes_on_from_the_end_of_its_turn(case: str) -> None:
    """Recurrent layers have a snapshot there: they see a picture as any other tokens."""
    mrope = model_of(case).rope_axes == 3
    model = seeing(case)
    harness, before = Harness(model), len(tower_of(model).passes)
    shown = [prompt(11), picture(1, 5, 9, mrope=mrope), prompt(24, 1)]
    boundary = len(placed(*shown)[0])
    for name in range(2):
        ids, pictures = placed(*shown, prompt(50, 7 + name))
        outcome = harness.run(str(name), ids, GREEDY, pictures=pictures, boundaries=(boundary,))
    harness.check()
    assert outcome.cached_tokens == boundary - boundary % PAGE > len(placed(*shown[:2])[0])
    assert len(set(tower_of(model).passes[before:])) == 1


class Broken(RuntimeError):
    """What a tower raises."""


def test_an_error_in_the_tower_fails_that_request_alone() -> None:
    model = seeing("qwen3-v4")
    harness, tower = Harness(model), tower_of(model)
    harness.add("text", prompt(30), GREEDY)
    harness.turn()
    ids, pictures = placed(prompt(9), picture(1, 3, 3), prompt(5))
    tower.fails = Broken("no such thing")
    try:
        harness.add("broken", ids, GREEDY, pictures=pictures)
        while harness.outcomes["broken"].reason is None:
            harness.turn()
    finally:
        tower.fails = None
    harness.add("again", ids, GREEDY, pictures=pictures)
    error = harness.check("text", "again")["broken"].error
    assert isinstance(error, RequestFailedError)
    assert "cannot be seen: Broken: no such thing" in str(error)
    assert harness.loop.stats()["pictures"]["failed"] == 1
    assert tower.num_open == 0


def test_of_two_requests_that_wait_for_a_picture_one_fails_with_its_pass() -> None:
    model = seeing("qwen3-v4")
    harness, tower = Harness(model), tower_of(model)
    for i in range(2):
        ids, pictures = placed(prompt(9, i), picture(1, 3, 3), prompt(5))
        harness.add(str(i), ids, GREEDY, pictures=pictures)
    tower.fails = Broken("once")
    while harness.loop.stats()["pictures"]["failed"] == 0:
        harness.turn()
    tower.fails = None
    assert harness.check("1")["0"].error is not None


def test_an_abort_ends_the_pass_of_its_picture() -> None:
    model = seeing("qwen3-v4")
    harness, tower = Harness(model), tower_of(model)
    ids, pictures = placed(prompt(9), picture(6, 8, 8, num_tiles=4), prompt(5))
    harness.add("gone", ids, GREEDY, pictures=pictures)
    harness.turn(3)
    assert tower.num_open == 1
    harness.loop.abort("gone")
    assert tower.num_open == 0
    assert harness.loop.idle
    assert harness.loop.stats()["pictures"]["cached"] == 0


def test_running_answers_get_a_token_between_two_pieces_of_a_pass() -> None:
    model = seeing("qwen3-v4")
    harness = Harness(model, launch_ahead=False)
    harness.add("text", prompt(30), SamplingParams(max_tokens=40))
    harness.turn(2)
    ids, pictures = placed(picture(2, 8, 8, num_tiles=8), prompt(5))
    began = harness.turns
    harness.add("seen", ids, SamplingParams(max_tokens=2), pictures=pictures)
    delayed = []
    launch = harness.loop.runner.launch

    def watched(batch: Any, previous: Any) -> Any:
        delayed.append(batch.was_delayed)
        return launch(batch, previous)

    harness.loop.runner.launch = watched  # type: ignore[method-assign]
    outcomes = harness.drain()
    waited = outcomes["seen"].turns[0] - began
    assert sum(delayed) >= 8 * 3, "what measures steps learns that others came between"
    assert not delayed[-1]
    assert waited >= 8 * 3, "a pass of many pieces"
    turns = [turn for turn in outcomes["text"].turns if began <= turn <= began + waited]
    assert turns == list(range(turns[0], turns[0] + len(turns)))
    assert len(turns) >= waited


def running(*parts: list[int] | Picture, salt: str | None = None) -> Sequence:
    """A sequence of a prompt, with nothing computed."""
    ids, pictures = placed(*parts)
    request = Request("it", ids, GREEDY, pictures=pictures, cache_salt=salt)
    in_prompt = PromptPictures.of(request, sees_spans=False)
    return Sequence(request, 100, ids, len(ids), pictures=in_prompt)


class Clock:
    """Each look at it takes a while."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


@pytest.mark.parametrize(
    ("slice_s", "most_s", "pieces"),
    [(None, inf, 1), (0.25, inf, 2), (0.45, inf, 4), (0.45, 0.25, 2), (0.45, -1, 1)],
)
def test_a_slice_ends_before_late_ones(slice_s: float | None, most_s: float, pieces: int) -> None:
    tower = RandomTower(64)
    clock = Clock(0.1)
    features = PictureFeatures(
        tower, dtype=mx.float32, max_bytes=1 << 20, slice_s=slice_s, clock=clock
    )
    sequence = running(picture(1, 4, 4, num_tiles=4), prompt(5))
    ids = sequence.token_ids
    assert features.available(sequence, len(ids)) == 0
    slices = 0
    while features.wanted:
        assert features.work(most_s) is None
        slices += 1
    assert slices == -(-17 // pieces)  # four pieces a tile, and what keeps the features
    assert features.available(sequence, len(ids)) == len(ids)


def test_small_pictures_share_a_slice() -> None:
    """Such as the frames of a video: each would otherwise wait for a step of the others."""
    features = PictureFeatures(
        RandomTower(64), dtype=mx.float32, max_bytes=1 << 20, slice_s=2.0, clock=Clock(0.1)
    )
    sequence = running(*[picture(seed, 2, 2) for seed in range(8)], [3])
    assert features.available(sequence, 33) == 0
    slices = 0
    while features.wanted:
        features.work()
        slices += 1
    assert slices == 3  # of some 19 pieces: each picture has five
    assert features.available(sequence, 33) == 33


def test_tenants_share_the_tower() -> None:
    """One picture beside 20 of another tenant, one of which is half seen: a piece for each."""
    features = PictureFeatures(
        RandomTower(64), dtype=mx.float32, max_bytes=1 << 24, clock=Clock(0.1)
    )
    heavy = running(*[picture(seed, 4, 4, num_tiles=4) for seed in range(20)], [3])
    heavy.request.tenant = Tenant("heavy")
    assert features.available(heavy, len(heavy.token_ids)) == 0
    for _ in range(3):
        features.work()
    light = running(picture(99, 4, 4, num_tiles=4), [3])
    light.request.tenant = Tenant("light")
    pieces = 0
    while not features.available(light, 65):
        features.work()
        pieces += 1
    assert 30 <= pieces <= 2 * 17 + 1  # alone it takes 17
    features.release(heavy)
    features.release(light)
    assert not features.wanted
    assert not features._passes


def test_a_slice_of_the_tower_is_shorter_beside_an_answer_of_another_tenant() -> None:
    """As long as a slice of a prompt would be: the answer has its share of the time."""
    harness = Harness(seeing("qwen3-v4"), launch_ahead=False, prefill_slice_s=SLICE_S)
    tenants = Tenant("answered"), Tenant("seeing")
    harness.add("text", prompt(30), SamplingParams(max_tokens=60), tenant=tenants[0])
    harness.turn(8)  # steps are timed
    given: list[float] = []
    work = harness.loop.features.work

    def watched(most_s: float) -> Any:
        given.append(most_s)
        return work(0.0)

    harness.loop.features.work = watched  # type: ignore[method-assign,assignment]
    ids, pictures = placed(picture(2, 8, 8, num_tiles=4), prompt(5))
    harness.add("seen", ids, GREEDY, pictures=pictures, tenant=tenants[1])
    harness.turn(4)
    assert given
    assert max(given) < SLICE_S / 10, "three steps of an answer"
    harness.loop.abort("text")
    given.clear()
    harness.turn(2)
    assert min(given) >= SLICE_S / 10, "no answer waits"


def test_requests_of_different_salts_share_no_features() -> None:
    tower = RandomTower(64)
    features = PictureFeatures(tower, dtype=mx.float32, max_bytes=1 << 20)
    for salt in ("one", "two", "one"):
        sequence = running(picture(1, 4, 4), [3], salt=salt)
        features.available(sequence, 17)
        while features.wanted:
            features.work()
        assert features.available(sequence, 17) == 17
    assert len(tower.passes) == 2


@pytest.mark.parametrize(("times", "fails"), [(1, False), (2, True)])
def test_a_pass_that_macos_stopped_on_the_gpu_is_tried_once_more(times: int, fails: bool) -> None:
    model = seeing("qwen3-v4")
    harness, tower = Harness(model), tower_of(model)
    ids, pictures = placed(prompt(9), picture(1, 3, 3), prompt(5))
    harness.add("it", ids, GREEDY, pictures=pictures)
    tower.fails = Broken("(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)")
    while harness.loop.stats()["pictures"]["failed"] < times:
        harness.turn()
    tower.fails = None
    assert (harness.drain()["it"].error is not None) is fails


def test_room_is_for_features_that_come_back_into_use_too() -> None:
    one = 4 * 4 * 64 * 4
    features = PictureFeatures(RandomTower(64), dtype=mx.float32, max_bytes=one)
    before, other, again = (running(picture(seed, 4, 4), [3]) for seed in (1, 2, 1))
    assert features.available(before, 17) == 0
    while features.wanted:
        features.work()
    features.release(before)
    assert features.available(other, 17) == 0
    assert features.wanted
    assert features.available(again, 17) == 0, "the other picture will take its place"
    while features.wanted:
        features.work()
    assert features.num_bytes == one
    assert features.available(other, 17) == 17


def test_features_that_were_used_last_stay() -> None:
    model = seeing("qwen3-v4")
    one_picture = 16 * model.config.hidden_size * 4
    harness, tower = Harness(model, feature_bytes=2 * one_picture), tower_of(model)
    before = len(tower.passes)

    def ask(name: str, seed: int) -> None:
        ids, pictures = placed(prompt(3, int(name)), picture(seed, 4, 4), prompt(3))
        harness.run(name, ids, SamplingParams(max_tokens=1), pictures=pictures)

    for name, seed in enumerate((1, 2, 1, 3, 1)):  # 3 takes the place of 2
        ask(str(name), seed)
    assert len(tower.passes) == before + 3
    ask("5", 2)
    assert len(tower.passes) == before + 4
    assert harness.loop.stats()["pictures"]["cached_bytes"] == 2 * one_picture
    large = placed(picture(4, 5, 7), prompt(3))
    with pytest.raises(InsufficientMemoryError, match=r"35 tokens takes 9\.0 kB, and 8\.2 kB"):
        harness.add("large", large[0], GREEDY, pictures=large[1])


@pytest.mark.alike
@pytest.mark.parametrize("fixed", [None, 8, 16, 48])
def test_a_span_is_cut_by_no_chunk_and_by_no_prefix(fixed: int | None) -> None:
    """A step grows for a span; else it has the tokens that were asked for."""
    model = seeing("qwen3-v4", spans=True)
    seen = picture(1, 5, 8, sees_itself=True)
    ids, pictures = placed(prompt(21), seen, prompt(30), picture(2, 2, 5, sees_itself=True))
    harness = Harness(model, prefill_chunk=48, prefill_fixed=fixed, page_size=8)
    launch, chunks = harness.loop.runner.launch, []

    def watched(batch: Any, previous: Any) -> Any:
        chunks.extend([(s.start, s.stop) for s in batch.ragged])
        return launch(batch, previous)

    harness.loop.runner.launch = watched  # type: ignore[method-assign]
    harness.add("it", ids, GREEDY, pictures=pictures)
    plain = alone(model, ids, GREEDY, pictures=pictures)
    assert harness.drain()["it"].token_ids == plain.token_ids
    spans = [(21, 61), (91, 101)]
    for start, stop in chunks:
        assert not any(low < edge < high for edge in (start, stop) for low, high in spans)
        assert stop - start <= (fixed or 48) or (start, stop) in spans
    harness.add("again", ids, GREEDY, pictures=pictures)  # its last token is in a span
    outcome = harness.drain()["again"]
    assert (outcome.cached_tokens, outcome.token_ids) == (91, plain.token_ids)
    long = placed(picture(3, 7, 7, sees_itself=True), [5])
    with pytest.raises(InvalidRequestError, match="the 49 tokens of a picture in one step"):
        harness.add("long", long[0], GREEDY, pictures=long[1])


def test_features_see_each_other_only_where_layers_and_pictures_say_so() -> None:
    blind, sees = seeing("qwen3-v4"), seeing("qwen3-v4", spans=True)
    tokens = {}
    for itself in (False, True):
        asked = placed(prompt(5), picture(1, 4, 4, sees_itself=itself), prompt(5))
        tokens[itself] = [logits(model, asked) for model in (blind, sees)]
    np.testing.assert_array_equal(*tokens[False])
    assert np.abs(tokens[True][0] - tokens[True][1])[5:].max() > 0.01
    np.testing.assert_array_equal(tokens[True][0][:5], tokens[True][1][:5])


def test_a_picture_on_the_disk_runs_no_tower_after_a_restart(tmp_path: Path) -> None:
    model = seeing("qwen3-v4", spans=True)
    disk = disk_at(tmp_path)
    ids, pictures = placed(prompt(9), picture(1, 4, 8, sees_itself=True), prompt(40))
    plain = alone(model, ids, GREEDY, pictures=pictures).token_ids
    for name in ("before", "after"):
        harness, passes = Harness(model, disk=disk), len(tower_of(model).passes)
        assert harness.run(name, ids, GREEDY, pictures=pictures).token_ids == plain
        harness.loop.close()
    assert len(tower_of(model).passes) == passes
    assert harness.outcomes["after"].cached_tokens > 41


@pytest.mark.parametrize("case", ["mrope qwen3-v5", "qwen3_5_text-v5"])
def test_rope_positions_of_three_axes_are_those_of_the_whole_prompt(case: str) -> None:
    """Each step's positions, as the model gets them; one axis where all three are equal."""
    model = seeing(case)
    ids, pictures = placed(prompt(9), picture(1, 3, 5, mrope=True), prompt(30))
    expected = rope_positions(pictures, 0, len(ids) + 20)
    harness = Harness(model, prefill_chunk=16)
    forward, kept = harness.loop.runner.forward.cache.begin_step, []

    def watched(metadata: StepMetadata) -> None:
        kept.append((metadata.positions, metadata.rope_positions))
        forward(metadata)

    harness.loop.runner.forward.cache.begin_step = watched  # type: ignore[method-assign]
    harness.run("it", ids, SamplingParams(max_tokens=20), pictures=pictures)
    for places, positions in kept:
        np.testing.assert_array_equal(
            np.broadcast_to(positions, (3, len(places))), expected[:, places]
        )
        assert positions.ndim == (2 if ((places >= 9) & (places < 24)).any() else 1)


def test_pictures_that_cannot_run_are_refused() -> None:
    def refused(match: str, harness: Harness, ids: list[int], *pictures: PlacedPicture) -> None:
        with pytest.raises(InvalidRequestError, match=match):
            harness.add("it", ids, GREEDY, pictures=pictures)

    one = picture(1, 2, 2)
    sees, blind = Harness(seeing("qwen3-v4")), Harness(model_of("qwen3-v4"))
    ids, pictures = placed(prompt(5), one, prompt(5))
    refused("reads text alone", blind, ids, *pictures)
    refused("others stand there", sees, ids, PlacedPicture(one, 4))
    refused("others stand there", sees, ids, *pictures, *pictures)
    short = replace(one, token_ids=one.token_ids[:3])
    refused("4 features, and 3 tokens", sees, ids, PlacedPicture(short, 5))


@cache
def turning_biased() -> Model:
    """A model with M-RoPE and large biases of its keys, which turn slowly."""
    config = {**tiny_config("qwen2-v5")}
    config["rope_parameters"] = {
        **config["rope_parameters"],
        "mrope_section": [3, 3, 2],
        "rope_theta": 1e6,
    }
    arrays = {
        name: 30 * array if name.endswith("k_proj.bias") else array
        for name, array in arrays_of(config).items()
    }
    return load(write(Path(mkdtemp()), config, arrays))


@pytest.mark.parametrize("chunk", [16, 256])
def test_keys_of_pictures_are_stored_less_their_biases(chunk: int) -> None:
    """4 bits hold little beside such biases: 16 steps of them would change every answer."""
    asked = placed(prompt(9), picture(1, 3, 5, mrope=True), prompt(30))
    model = with_tower(turning_biased())
    expected = logits(model, asked)
    quantised = logits(model, asked, kv=KVOptions(bits=(4, None)), prefill_chunk=chunk)
    assert np.abs(quantised - expected).mean() < 0.1 * expected.std()


def test_key_ids_are_of_the_picture_and_no_token_ids() -> None:
    one, other = picture(1, 2, 3, breaks=True), picture(2, 2, 3, breaks=True)
    keys = []
    for part in (one, other):
        ids, pictures = placed([4, 5], part, [6])
        in_prompt = PromptPictures.of(
            Request("it", ids, GREEDY, pictures=pictures), sees_spans=True
        )
        keys.append(in_prompt.key_ids)
        assert len(in_prompt.key_ids) == len(ids)
        for token_id, key in zip(ids, in_prompt.key_ids, strict=True):
            assert 1 << 61 <= key < 1 << 62 if token_id == one.feature_id else key == token_id
    assert len({*keys[0], *keys[1]}) == 6 + 6 + 4


OTHERWISE = {  # the picture of the next test, changed in one field
    "tiles": {"tiles": picture(2, 2, 3).tiles, "digest": picture(2, 2, 3).digest},
    "token_ids": {"token_ids": (7, 7, 7, 8, 7, 7, 7)},
    "digest": {"digest": bytes(16)},
    "mrope_grid": {"mrope_grid": (3, 1)},
    "sees_itself": {"sees_itself": True},
    "times": {"times": (0, 5)},
}


def test_all_that_keys_and_values_of_a_picture_depend_on_is_in_its_key_ids() -> None:
    """A field that is new must be named: here, or below as one that keys and values do not know."""
    one = replace(picture(1, 2, 3, mrope=True), mrope_grid=(1, 3), times=(0, 1))

    def key_ids(shown: Picture) -> list[int]:
        ids, pictures = placed([4, 5], shown, [6])
        request = Request("it", ids, GREEDY, pictures=pictures)
        return PromptPictures.of(request, sees_spans=True).key_ids

    assert {*OTHERWISE, "feature_id"} == {field.name for field in fields(Picture)}
    keys = [key_ids(one), *[key_ids(replace(one, **change)) for change in OTHERWISE.values()]]
    assert len(set(map(tuple, keys))) == len(keys)


@pytest.mark.parametrize("case", MROPE)
def test_a_video_at_another_rate_is_another_video(case: str) -> None:
    """The same frames at other times: answers after the first video are those without it."""
    model, times = seeing(case), ((0, 2, 4), (0, 9, 18), (0, 1, 2))
    clip = replace(picture(1, 6, 3, mrope=True), mrope_grid=(2, 3))
    asked = [placed(prompt(5), replace(clip, times=one), prompt(40)) for one in times]
    harness = Harness(model)

    def chosen(outcome: Outcome) -> list[float]:
        return [one.logprob for one in outcome.logprobs]

    for name, (ids, pictures) in enumerate(asked):
        harness.add(str(name), ids, GREEDY, pictures=pictures)
        warm, cold = harness.drain()[str(name)], alone(model, ids, GREEDY, pictures=pictures)
        assert warm.token_ids == cold.token_ids
        np.testing.assert_allclose(*map(chosen, (warm, cold)), atol=1e-4)
    assert harness.loop.features.counts.seen == 1  # features know no time


def test_metrics_of_pictures_are_numbers_of_an_engine_that_sees() -> None:
    stats = Harness(seeing("qwen3-v4")).loop.stats()["pictures"]
    tables = [table for _, source, table in FAMILIES if source == "pictures"]
    keys = [key for table in tables for key, _ in table.values()]
    assert len(keys) == 4
    assert all(stats[key] == 0 for key in keys)


def test_features_and_kv_cache_share_max_memory() -> None:
    options = EngineOptions(max_memory="80MB")
    for model, features in ((seeing("qwen3-v4"), 10_000_000), (model_of("qwen3-v4"), 0)):
        sizes = options.config(model, None, options.kv_bytes(0))
        assert (sizes.feature_bytes, sizes.kv_budget_bytes) == (features, 80_000_000 - features)


def test_steps_hold_a_picture_that_one_step_computes_whatever_memory_there_is() -> None:
    sees, blind = seeing("gemma3_text-v4", spans=True), model_of("gemma3_text-v4")
    options = EngineOptions(max_memory="1MB")
    assert options.config(blind, None, 1_000_000).prefill_chunk == 256
    assert options.config(sees, None, 1_000_000).prefill_chunk == 288
    for num_bytes in (1_000_000, 1 << 30):
        plain = options.config(sees, None, num_bytes)
        for fixed in (16, 64, plain.prefill_chunk):  # how large a picture is depends on none
            sized = EngineOptions(prefill_chunk=fixed).config(sees, None, num_bytes)
            assert (sized.prefill_chunk, sized.prefill_fixed) == (plain.prefill_chunk, fixed)
        assert EngineOptions(prefill_chunk=16).config(blind, None, num_bytes).prefill_chunk == 16
