"""Write references of models that see: transformers in float32 with eager attention.

Needs torch and transformers, which nothing else here does:

    python tests/data/pictures/generate.py [NAME ...]

Weights and pixels come from `tests/models/picture_cases.py`, by name. A file holds the features of
all tiles (N, hidden), one after the other, and the logits (T, vocab) of the prompt.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.torch_models import loaded, read_config, record, saved_shapes  # noqa: E402
from models.picture_cases import (  # noqa: E402
    ALL_PICTURE_CASES,
    DATA,
    IMAGE,
    Case,
    picture_tensors,
    pixels,
    prompt,
)

TENSORS = DATA / "tensors.json"


def hub_model(name: str) -> torch.nn.Module:
    """transformers' model of a case, through a folder as on the hub."""
    kind = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        read = read_config(ALL_PICTURE_CASES[name].config, folder)
        record(
            TENSORS,
            name,
            saved_shapes(
                kind.from_config(read), folder, save_original_format=name == "inkling2_loop"
            ),
        )
        return loaded(kind, read, picture_tensors(name), folder)


def channels_last(patches: np.ndarray) -> np.ndarray:
    """(P, C * p * p) -> (P, p * p * C)."""
    side = int((patches.shape[1] // 3) ** 0.5)
    return patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1).reshape(len(patches), -1)


def picture(patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(P, C * p * p) in raster order -> (C, height, width)."""
    side = int((patches.shape[1] // 3) ** 0.5)
    parts = patches.reshape(*grid, 3, side, side).transpose(2, 0, 3, 1, 4)
    return parts.reshape(3, grid[0] * side, grid[1] * side)


def padded(arrays: list[np.ndarray], value: float) -> torch.Tensor:
    """Arrays of several lengths or sizes as one."""
    most = np.max([array.shape for array in arrays], axis=0)
    wide = [
        np.pad(a, [(0, m - n) for m, n in zip(most, a.shape, strict=True)], constant_values=value)
        for a in arrays
    ]
    return torch.tensor(np.stack(wide))


def places(grid: tuple[int, int]) -> np.ndarray:
    """(P, 2) x and y of patches in raster order."""
    return np.stack(np.meshgrid(np.arange(grid[1]), np.arange(grid[0])), -1).reshape(-1, 2)


def inputs(case: Case, tiles: list[np.ndarray], grids: list[tuple[int, int]]) -> dict:
    """What a processor gives to this model."""
    kind = case.config["model_type"]
    if kind in ("gemma4", "gemma4_unified"):
        return {
            "pixel_values": padded([channels_last(tile) for tile in tiles], 0.0),
            "image_position_ids": padded([places(grid) for grid in grids], -1),
        }
    if kind == "lfm2_vl":
        return {
            "pixel_values": padded([channels_last(tile) for tile in tiles], 0.0),
            "spatial_shapes": torch.tensor(grids),
            "pixel_attention_mask": padded([np.ones(len(tile), np.int64) for tile in tiles], 0),
        }
    if kind == "inkling2_loop":  # squares of 2 x 2 patches, colours last
        cells = [
            picture(tile, grid)
            .reshape(3, grid[0] // 2, 8, grid[1] // 2, 8)
            .transpose(1, 3, 2, 4, 0)
            .reshape(-1, 8, 8, 3)
            for tile, grid in zip(tiles, grids, strict=True)
        ]
        return {
            "pixel_values": torch.tensor(np.concatenate(cells)),
            "image_grid_thw": torch.tensor([(1, grid[0] // 2, grid[1] // 2) for grid in grids]),
        }
    if kind.startswith("qwen"):  # the patches of a feature lie together
        return {
            "pixel_values": torch.tensor(np.concatenate(tiles)),
            "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
        }
    pictures = [picture(tile, grid) for tile, grid in zip(tiles, grids, strict=True)]
    sizes = {} if kind == "gemma3" else {"image_sizes": [one.shape[1:] for one in pictures]}
    return {
        "pixel_values": padded(pictures, 0.0),
        **{key: torch.tensor(value) for key, value in sizes.items()},
    }


def reference(name: str, model: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, hidden) and logits (T, vocab_size)."""
    case = ALL_PICTURE_CASES[name]
    tiles = [tile for tiles in pixels(name) for tile in tiles]
    grids = [grid for grids in case.pictures for grid in grids]
    given = inputs(case, tiles, grids)
    ids = torch.tensor(prompt(name)[0])[None]
    types = {"gemma3": "token_type_ids"}.get(case.config["model_type"], "mm_token_type_ids")
    seen = (ids == IMAGE).long()
    with torch.no_grad():
        features = model.get_image_features(**given, return_dict=True).pooler_output
        features = torch.cat([one.reshape(-1, one.shape[-1]) for one in features])
        if case.config["model_type"].startswith(("gemma", "qwen")):
            given[types] = seen
        if case.config["model_type"] == "gemma4_unified":
            given["attention_mask"] = unified_masks(model, ids, seen)
        logits = model(input_ids=ids, **given).logits[0]
    return features.numpy(), logits.numpy()


def unified_masks(model: torch.nn.Module, ids: torch.Tensor, seen: torch.Tensor) -> dict:
    """What each token sees. The model's own `forward` shows spans to layers that see everything,
    and beyond windows, which its masks for `generate` do not.
    """
    embeddings = model.get_input_embeddings()(ids)
    return model.create_masks_for_generate(
        model.config,
        embeddings,
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=seen,
    )


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ALL_PICTURE_CASES:
        features, logits = reference(name, hub_model(name))
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, features=features, logits=logits.astype(np.float32))
        print(
            f"{name:16} features {features.shape} std {features.std():.2f}  logits {logits.shape} "
            f"std {logits.std():.2f}  {path.stat().st_size} bytes"
        )


if __name__ == "__main__":
    main()
