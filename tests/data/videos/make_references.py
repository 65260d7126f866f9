"""Write what transformers makes of conversations with videos.

Needs torch, torchvision and transformers 5.24, which nothing else here does:

    python tests/data/videos/make_references.py FOLDER

FOLDER has the tiny models: `seeing_folder(FOLDER / name, name, videos=True)` for each of `NAMES`.
`references.npz` has for each family and each clip the token ids, the grid of patches, some of the
pixel values, and for one clip some logits of a tiny model in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from session.video_chats import CLIPS, NAMES, SAME_SIZE, chat, some  # noqa: E402

GEMMA = {"image_token": "<|image_pad|>", "boi_token": "<|vision_start|>"}
GEMMA |= {"eoi_token": "<|vision_end|>", "audio_token": "<|x|>"}
GEMMA |= {"boa_token": "<|y|>", "eoa_token": "<|z|>"}


def processor(name: str, folder: Path) -> Any:
    """The processor of a family, with a video processor for the sizes of tiny models."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<|im_end|>",
        extra_special_tokens=GEMMA if name.startswith("gemma4") else {},
    )
    if name.startswith("gemma4"):
        return transformers.Gemma4Processor(
            feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
            image_processor=Gemma4ImageProcessorPil(),
            tokenizer=made,
            video_processor=transformers.Gemma4VideoProcessor(do_normalize=False),
        )
    stated = json.loads((folder / "preprocessor_config.json").read_text())
    size = {"shortest_edge": stated.pop("min_pixels"), "longest_edge": stated.pop("max_pixels")}
    del stated["image_processor_type"]
    second = name.startswith("qwen2")
    kind = transformers.Qwen2VLVideoProcessor if second else transformers.Qwen3VLVideoProcessor
    more = {"cap_pixels_per_frame": False}
    if second:
        more |= {"do_sample_frames": False}
    videos = kind(**stated, size=size, **more)
    whole = {
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
    }.get(name, transformers.Qwen3VLProcessor)
    return whole(Qwen2VLImageProcessorPil(**stated, size=size), made, videos)


def inputs(name: str, made: Any, clip: Any, text: str) -> dict[str, Any]:
    frames = np.stack([np.asarray(frame) for frame in clip.part["frames"]])
    sampling: dict[str, Any] = {}
    if name.startswith("qwen2") and clip.count / clip.fps * 2 < clip.count:
        sampling = {"do_sample_frames": True, "fps": 2}
    if name.startswith("gemma4"):
        sampling = {"num_frames": min(32, clip.count)}
    metadata = {"fps": clip.fps, "total_num_frames": clip.count, "duration": clip.count / clip.fps}
    if not sampling and name.startswith("qwen2"):
        metadata["frames_indices"] = list(range(clip.count))
    return made(
        text=[text],
        videos=[torch.tensor(frames).permute(0, 3, 1, 2)],
        videos_kwargs={"video_metadata": [metadata], **sampling},
        return_tensors="pt",
        add_special_tokens=False,
    )


def main() -> None:
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    for name in NAMES:
        folder = Path(sys.argv[1]) / name
        made = processor(name, folder)
        template = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        for title, clip in CLIPS.items():
            messages = chat(clip)
            messages[0]["content"][1] = {"type": "video"}
            text = template.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            given = inputs(name, made, clip, text)
            key, ids = f"{name}.{title}", given["input_ids"][0].numpy()
            patches = given["pixel_values_videos"]
            if name.startswith("gemma4"):
                real = given["video_position_ids"][..., 0] >= 0
                patches = patches[real]
            grid = given.get("video_grid_thw", torch.tensor([[0]]))[0]
            arrays |= {
                f"{key}.ids": ids.astype(np.int32),
                f"{key}.shape": np.array([*patches.shape, *grid], np.int32),
                f"{key}.pixels": some(patches.reshape(-1).numpy()),
            }
            if title in SAME_SIZE[name]:
                with torch.no_grad():
                    logits = model(**given).logits[0]
                arrays[f"{key}.logits"] = logits[-8:].numpy().astype(np.float32)
            print(key, len(ids), tuple(patches.shape), grid.tolist(), flush=True)
    np.savez_compressed(HERE / "references.npz", **arrays)
    print((HERE / "references.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
