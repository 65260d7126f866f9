"""Tiny models of families that see, with their own towers, and pictures for them."""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np
from engine.harness import QUANTIZED, Harness
from engine.harness import prompt as text
from models.picture_cases import ALL_PICTURE_CASES, IMAGE, picture_tensors, pixels, prompt
from models.test_towers import channels_last
from models.tiny import quantized, write

from mlxinfer.core import SamplingParams
from mlxinfer.images import Picture, PlacedPicture, Tile
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

CHANNELS_FIRST = ("llava", "mistral3", "gemma3")  # besides Qwen's


@cache
def seeing_model(name: str, *, packed: bool = False) -> Model:
    """The model of a case; `packed`: of its matrices those of the text are quantised."""
    config, tensors = dict(ALL_PICTURE_CASES[name].config), picture_tensors(name)
    arrays = {key: mx.array(value) for key, value in tensors.items()}
    if packed:
        text = {key: array for key, array in arrays.items() if "language_model" in key}
        arrays = {
            **{k: a for k, a in arrays.items() if k not in text},
            **quantized(text, QUANTIZED),
        }
        config["quantization"] = QUANTIZED
    return load(write(Path(mkdtemp()), config, arrays))


def own_picture(
    name: str, patches: Sequence[np.ndarray], grids: Sequence[tuple[int, int]]
) -> Picture:
    """A picture of a case.

    Args:
        name: of the case.
        patches: of each tile (P, patch), in raster order, numbers in the order (channel, y, x).
        grids: rows and columns of each.
    """
    case = ALL_PICTURE_CASES[name]
    kind = case.config["model_type"]
    is_qwen, (rows, columns) = kind.startswith("qwen"), grids[0]
    plain = is_qwen or kind in CHANNELS_FIRST
    tiles = [
        Tile(one if plain else channels_last(one), (1, *grid), case.num_features(grid))
        for one, grid in zip(patches, grids, strict=True)
    ]
    digest = blake2b(digest_size=16)
    for tile in tiles:
        digest.update(repr(tile.grid).encode() + tile.patches.tobytes())
    return Picture(
        tuple(tiles),
        (IMAGE,) * sum([tile.num_features for tile in tiles]),
        IMAGE,
        digest.digest(),
        (rows // case.features[0], columns // case.features[1]) if is_qwen else None,
        sees_itself=kind.startswith("gemma"),
    )


def own_prompt(name: str) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """The prompt of a case, which the reference's logits are of."""
    ids, places = prompt(name)
    parts = zip(places, pixels(name), ALL_PICTURE_CASES[name].pictures, strict=True)
    placed = [PlacedPicture(own_picture(name, *shown), place.start) for place, *shown in parts]
    return ids, tuple(placed)


def drawn_picture(name: str, seed: int) -> Picture:
    """A picture of random pixels, of one of the shapes of a case."""
    case, rng = ALL_PICTURE_CASES[name], np.random.default_rng(seed)
    grids = case.pictures[seed % len(case.pictures)]
    sizes = [(rows * columns, case.patch) for rows, columns in grids]
    return own_picture(name, [rng.random(size, dtype=np.float32) for size in sizes], grids)


def picture_logits(model: Model, name: str) -> list[np.ndarray]:
    """Logits (T, vocab) of the prompt of a case, twice: in chunks, beside each other and a text."""
    ids, pictures = own_prompt(name)
    harness = Harness(model, prefill_chunk=16, max_batch=3)
    harness.add("text", text(30), SamplingParams(max_tokens=40))
    for request in "ab":
        one = SamplingParams(max_tokens=3)
        harness.add(request, ids, one, prompt_logits=True, pictures=pictures)
    outcomes = harness.drain()
    assert outcomes["a"].error is outcomes["b"].error is None
    return [np.concatenate(outcomes[request].logits) for request in "ab"]
