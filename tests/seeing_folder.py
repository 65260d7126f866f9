"""A folder of a tiny model that sees, with tokenizer, chat template and processor."""

import json
from pathlib import Path

import numpy as np
from models.picture_cases import ALL_PICTURE_CASES, picture_tensors
from models.tiny import write
from PIL import Image
from text.text_data import DATA
from tokenizers import Tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PICTURE{% elif part.type == 'video' %}VIDEO"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 64 * 64,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
GEMMA4 = {"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3}


def seeing_folder(folder: Path, name: str = "qwen3_5", *, videos: bool = False) -> Path:
    """Write a tiny model of Qwen's families or Gemma 4, for texts of bytes, into `folder`.

    Returns it. With `videos` its vocabulary has a token for them.
    """
    is_gemma = name.startswith("gemma4")  # its processor, not its template, writes what is around
    tokenizer = Tokenizer.from_file(str(DATA / "bytelevel" / "tokenizer.json"))
    moving = "<|video|>" if is_gemma else "<|video_pad|>"
    tokenizer.add_special_tokens([*MARKS, moving] if videos else MARKS)
    vocab_size, marks = tokenizer.get_vocab_size(), [tokenizer.token_to_id(m) for m in MARKS]
    whole = ALL_PICTURE_CASES[name].config
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 4096, "eos_token_id": marks[1]}
    around = ("boi", "eoi") if is_gemma else ("vision_start", "vision_end")
    named = [f"{item}_token_id" for item in ("image", *around)]
    text = {**whole["text_config"], **sizes} if "text_config" in whole else None
    config = {**whole, **sizes} if text is None else {**whole, "text_config": text}
    config |= dict(zip(named, marks[2:], strict=True))
    config["video_token_id"] = tokenizer.token_to_id(moving)
    tensors, rng = picture_tensors(name), np.random.default_rng(0)
    for key, array in tensors.items():
        if "embed_tokens" in key or "lm_head" in key:
            tensors[key] = rng.normal(size=(vocab_size, *array.shape[1:])).astype(np.float32) * 0.3
    write(folder, config, tensors)
    tokenizer.save(str(folder / "tokenizer.json"))
    shown = MARKS[2] if is_gemma else f"{MARKS[3]}{MARKS[2]}{MARKS[4]}"
    template = TEMPLATE.replace("PICTURE", shown).replace("VIDEO", shown.replace(MARKS[2], moving))
    spelling = {"chat_template": template, "eos_token": MARKS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(spelling))
    processor = GEMMA4 if is_gemma else QWEN
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if videos and is_gemma:
        nested = {"video_processor": {"max_soft_tokens": 70, "num_frames": 32}}
        (folder / "processor_config.json").write_text(json.dumps(nested))
    return folder


def some_image(seed: int = 1) -> Image.Image:
    """Noise, 56 x 40 pixels: 35 tokens."""
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
