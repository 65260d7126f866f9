"""Write the greedy answers of models that see: transformers in float32, processors and all.

Needs torch, torchvision and transformers, which nothing else here does:

    python tests/data/pictures/converse.py [NAME ...]

Pictures go through the image processors of transformers. Every token is the most probable one of a
whole forward pass without a cache, whose masks are those that `generate` uses.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from generate import hub_model, padded, unified_masks
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
    Gemma4UnifiedImageProcessor,
)
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from models.picture_cases import ALL_PICTURE_CASES, BEGIN, END, IMAGE  # noqa: E402
from models.picture_conversations import (  # noqa: E402
    BREAK,
    CONVERSATIONS,
    NEVER,
    NUM_TOKENS,
    SETTINGS,
    TOKENS,
    VIEW,
    picture,
)

FILE = HERE / "conversations.json"
MIN_GAP = 5e-4  # between the two most probable tokens
PROCESSORS = {
    "gemma3": Gemma3ImageProcessorPil,
    "gemma4": Gemma4ImageProcessorPil,
    "gemma4_unified": Gemma4UnifiedImageProcessor,
    "lfm2_vl": Lfm2VlImageProcessor,
    "mistral3": PixtralImageProcessorPil,
    "llava": PixtralImageProcessorPil,
    "qwen": Qwen2VLImageProcessorPil,
}


class Hub:
    """A model of transformers with its image processor."""

    def __init__(self, name: str) -> None:
        self.config = ALL_PICTURE_CASES[name].config
        self.kind = self.config["model_type"]
        if self.kind.startswith("qwen"):
            self.kind = "qwen"
        self.model = hub_model(name)
        settings = dict(SETTINGS[name])
        if "patch_size" in settings and self.kind in ("mistral3", "llava"):
            side = settings["patch_size"] * self.config.get("spatial_merge_size", 1)
            settings["patch_size"] = {"height": side, "width": side}
        self.processor = PROCESSORS[self.kind](**settings)

    def read(self, number: int) -> tuple[dict[str, Any], list[int]]:
        """What the processor gives for a picture, and the tokens that stand for it."""
        more = {"return_row_col_info": True} if self.kind == "lfm2_vl" else {}
        given = dict(self.processor(picture(number), return_tensors="pt", **more))
        return given, getattr(self, f"_{self.kind}")(given)

    def _gemma3(self, given: dict[str, Any]) -> list[int]:
        given.pop("num_crops")
        return [BEGIN, *[IMAGE] * self.config["mm_tokens_per_image"], END]

    def _gemma4(self, given: dict[str, Any]) -> list[int]:
        return [BEGIN, *[IMAGE] * int(given.pop("num_soft_tokens_per_image")[0]), END]

    _gemma4_unified = _gemma4

    def _lfm2_vl(self, given: dict[str, Any]) -> list[int]:
        counts = [int(rows * columns) // 4 for rows, columns in given["spatial_shapes"]]
        rows, columns = (int(given.pop(f"image_{part}")[0]) for part in ("rows", "cols"))
        given.pop("image_sizes")
        ids = [BEGIN]
        for index, count in enumerate(counts):
            if len(counts) > 1 and index < rows * columns:
                row, column = divmod(index, columns)
                ids.append(TOKENS[f"<|img_row_{row + 1}_col_{column + 1}|>"])
            elif len(counts) > 1:
                ids.append(VIEW)
            ids += [IMAGE] * count
        return [*ids, END]

    def _mistral3(self, given: dict[str, Any]) -> list[int]:
        side = self.config["vision_config"]["patch_size"] * self.config.get("spatial_merge_size", 1)
        rows, columns = (int(one) // side for one in given["image_sizes"][0])
        ids = ([IMAGE] * columns + [BREAK]) * rows
        return [*ids[:-1], END]

    _llava = _mistral3

    def _qwen(self, given: dict[str, Any]) -> list[int]:
        return [BEGIN, *[IMAGE] * (int(given["image_grid_thw"].prod()) // 4), END]

    def prompt(self, parts: Sequence[int | list[int]]) -> tuple[list[int], dict[str, Any]]:
        """Token ids and pixels."""
        ids: list[int] = []
        pictures = []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            given, turn_ids = self.read(part)
            pictures.append(given)
            ids += turn_ids
        keys = pictures[0].keys()
        fill = {"image_position_ids": -1}
        return ids, {
            key: padded([row for one in pictures for row in one[key].numpy()], fill.get(key, 0))
            for key in keys
        }

    def answer(self, ids: list[int], pixels: dict[str, Any]) -> list[int]:
        """The most probable tokens."""
        collected: list[int] = []
        for _ in range(NUM_TOKENS):
            logits = self.logits(torch.tensor([*ids, *collected])[None], pixels)
            logits[list(NEVER)] = -torch.inf
            best, second = logits.topk(2).values.tolist()
            assert best - second > MIN_GAP, f"a near tie: {best - second}"
            collected.append(int(logits.argmax()))
        return collected

    def logits(self, ids: torch.Tensor, pixels: dict[str, Any]) -> torch.Tensor:
        """(vocab_size,) of the last token."""
        given, seen = dict(pixels), (ids == IMAGE).long()
        if self.kind == "gemma3":
            given["token_type_ids"] = seen
        elif self.kind.startswith(("gemma4", "qwen")):
            given["mm_token_type_ids"] = seen
        if self.kind == "gemma4_unified":
            given["attention_mask"] = unified_masks(self.model, ids, seen)
        with torch.no_grad():
            return self.model(input_ids=ids, **given).logits[0, -1]


def converse(name: str) -> dict[str, list[dict[str, list[int]]]]:
    """Prompt and answer of each turn of each conversation."""
    hub, by_name = Hub(name), {}
    for title, turns in CONVERSATIONS.items():
        said: list[int | list[int]] = []
        by_name[title] = []
        for parts in turns:
            said += parts
            ids, pixels = hub.prompt(said)
            answer = hub.answer(ids, pixels)
            by_name[title].append({"prompt": ids, "answer": answer})
            said.append(answer)
    return by_name


def main() -> None:
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or SETTINGS:
        known[name] = converse(name)
        sizes = [len(turn["prompt"]) for turns in known[name].values() for turn in turns]
        print(name, sizes, [turn["answer"] for turns in known[name].values() for turn in turns])
        lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
