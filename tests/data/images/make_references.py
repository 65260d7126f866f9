"""Write what transformers' image processors give: python make_references.py ROOT_OF_REPOSITORY.

Run by hand with transformers 5.24, torchvision and Pillow. Tests read `references.npz` without
them. It has for 500 sizes a family: the grid of the last tile, the number of features, 8 bytes of
the SHA-256 of the levels, and four of the final numbers. This script also compares every level and
number with those of this package, and writes the largest differences to `verdict.json`.
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # noqa: E402
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: E402
from transformers.models.gemma4_unified.image_processing_gemma4_unified import (  # noqa: E402
    Gemma4UnifiedImageProcessor,
)
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor  # noqa: E402
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from tests.images.cases import ALL, FAMILIES, Case, numbers_of, picture  # noqa: E402


def blocks(chw: np.ndarray, side: int) -> np.ndarray:
    """Rows (P, C * side * side) of (C, H, W)."""
    colours, height, width = chw.shape
    cut = chw.reshape(colours, height // side, side, width // side, side)
    return cut.transpose(1, 3, 0, 2, 4).reshape(-1, colours * side * side)


class Theirs:
    """A family's processor of transformers: rows, grids and features of one picture."""

    def __init__(self, name: str, settings: dict) -> None:
        self.name, self.settings = name, settings
        made = {
            "qwen2_vl": Qwen2VLImageProcessorPil, "qwen3_vl": Qwen2VLImageProcessorPil,
            "gemma3": Gemma3ImageProcessorPil, "gemma4": Gemma4ImageProcessorPil,
            "gemma4_unified": Gemma4UnifiedImageProcessor, "lfm2_vl": Lfm2VlImageProcessor,
            "pixtral": PixtralImageProcessorPil, "mistral3": PixtralImageProcessorPil,
        }[name]  # fmt: skip
        self.processor = made(**settings)

    def rows(self, image: Image.Image) -> tuple[np.ndarray, list, int]:
        return getattr(self, f"_{self.name}")(image)

    def _qwen2_vl(self, image):
        got = self.processor(image, return_tensors="np")
        grid = got["image_grid_thw"][0].tolist()
        return got["pixel_values"], [grid], grid[1] * grid[2] // 4

    _qwen3_vl = _qwen2_vl

    def _gemma3(self, image):
        got = self.processor(image, return_tensors="np")["pixel_values"][0]
        return blocks(got, 14), [[1, 64, 64]], 256

    def _gemma4(self, image):
        got = self.processor(image, return_tensors="np")
        number = got["num_soft_tokens_per_image"][0]
        places = got["image_position_ids"][0]
        columns, rows = (places.max(axis=0) + 1).tolist()
        return np.asarray(got["pixel_values"][0][: rows * columns]), [[1, rows, columns]], number

    def _gemma4_unified(self, image):
        got = self.processor(image, return_tensors="pt")
        number = int(got["num_soft_tokens_per_image"][0])
        columns, rows = (got["image_position_ids"][0].max(dim=0).values + 1).tolist()
        return got["pixel_values"][0][:number].float().numpy(), [[1, rows, columns]], number

    def _lfm2_vl(self, image):
        got = self.processor(image, return_tensors="pt")
        grids = [[1, *shape] for shape in got["spatial_shapes"].tolist()]
        counts = [rows * columns for _, rows, columns in grids]
        values = got["pixel_values"].float().numpy()
        rows = np.concatenate([tile[:n] for tile, n in zip(values, counts, strict=True)])
        return rows, grids, sum(-(-r // 2) * -(-c // 2) for _, r, c in grids)

    def _pixtral(self, image):
        side = 16 if self.name == "pixtral" else 28
        patch = 16 if self.name == "pixtral" else 14
        got = self.processor(
            image, return_tensors="np", patch_size={"height": side, "width": side}
        )["pixel_values"][0]
        rows, columns = got.shape[1] // patch, got.shape[2] // patch
        features = rows * columns * patch**2 // side**2
        return blocks(np.asarray(got), patch), [[1, rows, columns]], features

    _mistral3 = _pixtral


def compare(case: Case, theirs: Theirs, size: tuple[int, int]) -> dict | None:
    """One picture through both; None: transformers refuses it, and this package answers."""
    image = picture(*size)
    ours = case.processor.prepare(image, max_tokens=ALL)
    try:
        numbers, grids, features = theirs.rows(image)
    except (ValueError, ZeroDivisionError, RuntimeError):
        return None
    assert [list(tile.grid) for tile in ours.tiles] == grids, (size, grids, ours.tiles)
    assert ours.num_features == features, (size, features)
    levels = case.levels(numbers)
    difference = np.abs(case.levels(numbers_of(ours)).astype(int) - levels)
    distance = float(np.abs(numbers_of(ours) - numbers).max())
    return {
        "digest": hashlib.sha256(levels.tobytes()).digest()[:8],
        "levels": int(difference.max()),
        "share": float((difference > 1).mean()),
        "distance": distance,
        "grid": grids[-1],
        "tiles": len(grids),
        "features": features,
        "numbers": case.sample(numbers),
    }


def main() -> None:
    arrays, verdict = {}, {}
    for name, case in FAMILIES.items():
        theirs = Theirs(name, case.transformers)
        done = [compare(case, theirs, size) for size in case.sizes]
        actual = [run for run in done if run is not None]
        arrays |= {
            f"{name}.refused": np.array([run is None for run in done]),
            f"{name}.digests": np.frombuffer(b"".join(e["digest"] for e in actual), np.uint8),
            f"{name}.grids": np.array([[e["tiles"], *e["grid"][1:]] for e in actual], np.int32),
            f"{name}.features": np.array([e["features"] for e in actual], np.int32),
            f"{name}.numbers": np.array([e["numbers"] for e in actual], np.float32),
        }
        verdict[name] = {
            "sizes": len(done),
            "refused_by_transformers": len(done) - len(actual),
            "largest_difference_of_levels": max(e["levels"] for e in actual),
            "mean_share_of_levels_more_than_1_apart": sum(e["share"] for e in actual) / len(actual),
            "largest_difference_of_numbers": max(e["distance"] for e in actual),
        }
        print(name, verdict[name], flush=True)
    here = Path(__file__).parent
    np.savez_compressed(here / "references.npz", **arrays)
    (here / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n")


main()
