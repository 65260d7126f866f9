"""Greedy answers of transformers to prompts with pictures, for `python -m benchmarks pictures`.

Needs torch, torchvision and transformers, which nothing else here does:

    python tests/data/pictures/answers.py FOLDER

It gives random weights to a folder that has all but these. Then it reads a line of JSON for each
prompt, {"ids", "pictures", "count", "never"}, and writes the tokens that follow, and how far ahead
of the second each of them was, in log-probability.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageOps
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[2]))

from data.torch_models import loaded, read_config, saved_shapes
from models.random_weights import random_tensor

PROCESSORS = {"qwen3_5": Qwen2VLImageProcessorPil, "gemma4": Gemma4ImageProcessorPil}
COUNTS = ("num_soft_tokens_per_image",)


class Reference:
    """transformers in float32 with eager attention."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.image_id = config["image_token_id"]
        kind, read = transformers.AutoModelForImageTextToText, read_config(config, folder)
        less_one = config["model_type"].startswith("qwen3_5")
        with tempfile.TemporaryDirectory() as made:
            fresh = kind.from_config(read)
            shapes = saved_shapes(fresh, Path(made), save_original_format=False)
        tensors = {
            name: random_tensor(name, shape, 0, less_one=less_one and ".visual." not in name)
            for name, shape in shapes.items()
        }
        if config["tie_word_embeddings"]:  # large ones would make every answer repeat a token
            tensors["model.language_model.embed_tokens.weight"] *= 0.025
        self.model = loaded(kind, read, tensors, folder)
        (file,) = folder.glob("*processor_config.json")
        settings = json.loads(file.read_text())
        settings = settings.get("image_processor", settings)
        self.processor = PROCESSORS[config["model_type"]](**settings)

    def answer(
        self, ids: list[int], pictures: list[str], count: int, never: list[int]
    ) -> dict[str, list]:
        # transformers' own loading drops transparency, which its processors put on white
        images = [ImageOps.exif_transpose(Image.open(path)) for path in pictures]
        given = dict(self.processor(images, return_tensors="pt"))
        given = {name: value for name, value in given.items() if name not in COUNTS}
        row = torch.tensor([ids])
        with torch.no_grad():
            output = self.model.generate(
                input_ids=row,
                mm_token_type_ids=(row == self.image_id).long(),
                **given,
                max_new_tokens=count,
                do_sample=False,
                suppress_tokens=never,
                output_scores=True,
                return_dict_in_generate=True,
            )
        best = [scores[0].log_softmax(0).topk(2).values.tolist() for scores in output.scores]
        tokens = output.sequences[0, len(ids) :].tolist()
        return {"tokens": tokens, "leads": [one - two for one, two in best]}


def main() -> None:
    torch.set_num_threads(1)
    reference = Reference(Path(sys.argv[1]))
    print("true", flush=True)
    for line in sys.stdin:
        print(json.dumps(reference.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
