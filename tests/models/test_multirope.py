"""M-RoPE: three positions of a token, by which its pairs rotate; text has three that are equal."""

import json

import mlx.core as mx
import numpy as np
import pytest
from models.picture_cases import QWEN_CASES

from mlxinfer.errors import CheckpointError
from mlxinfer.images import Picture, PlacedPicture, rope_delta, rope_positions
from mlxinfer.layers.rope import RopeSpec, inverse_frequencies, rope_of
from mlxinfer.models.config import normalise, read_rope
from mlxinfer.models.jsonfields import Fields

SPECS = {
    "sections": (RopeSpec(dims=16, sections=(2, 3, 3)), [0, 0, 1, 1, 1, 2, 2, 2]),
    "in turn": (RopeSpec(dims=16, sections=(4, 2, 2), interleaved=True), [0, 1, 2, 0, 1, 2, 0, 0]),
    "partial": (RopeSpec(dims=8, sections=(2, 1, 1), interleaved=True), [0, 1, 2, 0]),
}


@pytest.mark.parametrize("name", SPECS)
def test_pairs_turn_by_the_positions_of_their_axes(name):
    spec, axes = SPECS[name]
    assert spec.pair_axes() == axes
    rng = np.random.default_rng(5)
    positions = rng.integers(0, 900, (3, 7)).astype(np.int32)
    x = rng.normal(size=(7, 2, 24)).astype(np.float32)
    rope = rope_of(spec, 24, mx.float32)
    actual = np.array(rope(mx.array(x), rope.prepare(mx.array(positions))))
    angles = positions[axes].T * np.array(inverse_frequencies(spec))  # (T, pairs)
    half = spec.dims // 2
    rotated = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([rotated.real, rotated.imag, x[..., 2 * half :]], axis=-1)
    assert np.abs(actual - expected).max() < 1e-3  # angles are float32


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_equal_positions_turn_as_one(name, dtype):
    rope = rope_of(SPECS[name][0], 24, dtype)
    x = mx.random.normal((5, 3, 24), key=mx.random.key(3)).astype(dtype)
    once = mx.array([0, 3, 4, 90, 7000], mx.int32)
    thrice = mx.broadcast_to(once, (3, 5))
    result = [rope(x, rope.prepare(positions)) for positions in (once, thrice)]
    assert mx.array_equal(*result)


def test_sections_are_read_and_must_be_all_pairs():
    def read(**stated):
        stated = {"rope_theta": 1e4, "mrope_section": [2, 1, 1], **stated}
        return read_rope(Fields({"rope_parameters": stated}, "config.json"), "full", head_dim=8)

    assert read() == RopeSpec(dims=8, sections=(2, 1, 1))
    assert read(rope_type="mrope", mrope_interleaved=True).interleaved
    assert read(rope_type="yarn", factor=2.0, original_max_position_embeddings=64).sections
    for wrong in ([2, 2, 1], [4], [2, 1, "1"], [3, 2, -1]):
        with pytest.raises(CheckpointError, match="mrope_section"):
            read(mrope_section=wrong)


@pytest.mark.parametrize("name", QWEN_CASES)
def test_axes_take_turns_in_qwen3_whatever_the_config_says(name):
    config = json.loads(json.dumps(QWEN_CASES[name].config))
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text["rope_scaling"]
    rope.pop("mrope_interleaved", None)
    specs = [spec for spec in normalise(config).ropes if spec]
    assert {spec.interleaved for spec in specs} == {name.startswith("qwen3")}


def picture(rows: int, columns: int, *, frames: int = 1, framed: int = 0) -> Picture:
    """Features (7) in grids, with `framed` tokens of text (5) around each."""
    grid = [5] * framed + [7] * (rows * columns) + [5] * framed
    return Picture((), tuple(grid * frames), 7, b"", mrope_grid=(rows, columns))


def test_positions_of_a_video_say_the_time_of_each_frame():
    video = Picture((), (7,) * 12, 7, b"", mrope_grid=(2, 2), times=(0, 3, 50))
    placed = [PlacedPicture(video, 2), PlacedPicture(picture(1, 3), 15)]
    times = [0, 1, *[2] * 4, *[5] * 4, *[52] * 4, 4, *[5] * 3, 8, 9]
    rows = [0, 1, *[2, 2, 3, 3] * 3, 4, *[5] * 3, 8, 9]
    columns = [0, 1, *[2, 3, 2, 3] * 3, 4, *[5, 6, 7], 8, 9]
    expected = np.array([times, rows, columns])
    assert (rope_positions(placed, 0, 20) == expected).all()
    for start in range(20):
        assert (rope_positions(placed, start, 20) == expected[:, start:]).all()
    assert rope_delta(placed) == 9 - 19


def counted(pictures: list[PlacedPicture], num_tokens: int) -> list[list[int]]:
    """Token by token, as the paper says it."""
    cells: dict[int, tuple[int, int, int, int]] = {}
    for one, start in pictures:
        rows, columns = one.mrope_grid
        places = [start + i for i, token in enumerate(one.token_ids) if token == one.feature_id]
        for number, place in enumerate(places):
            cell = number % (rows * columns)
            last = cell == rows * columns - 1
            cells[place] = (cell // columns, cell % columns, max(rows, columns), last)
    collected, position = [], 0
    for place in range(num_tokens):
        row, column, size, last = cells.get(place, (0, 0, 1, True))
        collected.append([position, position + row, position + column])
        position += size if last else 0
    return np.array(collected, np.int32).T.tolist()


def test_positions_of_pictures_between_texts():
    placed = [
        PlacedPicture(picture(2, 3), 3),
        PlacedPicture(picture(1, 1), 11),
        PlacedPicture(picture(5, 2, frames=2, framed=2), 12),
        PlacedPicture(Picture((), (7, 7, 7), 7, b""), 45),
    ]
    expected = np.array(counted(placed[:3], 52))
    assert (rope_positions(placed, 0, 52) == expected).all()
    for start in range(52):
        stop = min(start + 9, 52)
        assert (rope_positions(placed, start, stop) == expected[:, start:stop]).all()
    assert rope_delta(placed) == expected[0, -1] - 51
    assert (rope_positions([], 4, 7) == np.tile([4, 5, 6], (3, 1))).all()


def test_positions_of_random_pictures():
    seed = 11
    rng = np.random.default_rng(seed)
    for _ in range(100):
        placed, at = [], 0
        for _ in range(rng.integers(0, 4)):
            at += int(rng.integers(0, 5))
            one = picture(*rng.integers(1, 6, 2).tolist(), framed=int(rng.integers(0, 2)))
            placed.append(PlacedPicture(one, at))
            at = placed[-1].stop
        total = at + 3
        expected = np.array(counted(placed, total))
        start, stop = sorted(rng.integers(0, total + 1, 2).tolist())
        actual = rope_positions(placed, start, stop)
        assert (actual == expected[:, start:stop]).all(), f"seed {seed}"
        assert rope_delta(placed) == expected[0, -1] - (total - 1), f"seed {seed}"
