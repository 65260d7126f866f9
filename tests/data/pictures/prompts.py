"""Write the prompts that processors of transformers make of conversations with pictures.

Needs torch, torchvision and transformers, which nothing else here does:

    python tests/data/pictures/prompts.py

`prompts.json` has for each family the files of a checkpoint without weights, with a small tokenizer
that merges newlines as the published ones do, and the token ids of each conversation.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from session.picture_chats import CHATS  # noqa: E402

FILES = ("tokenizer.json", "tokenizer_config.json")
CORPUS = [
    "What is this?\n\nA cat.\n\n\nA dog\n", "user\nassistant\n\n\n\nHere is one\n and two\n\n",
    "x\n\n\n\ny\n\nz\n\n\nw", "\n\n", "\n\n\n", "\n\n\n\n", "user\n\n\n",
    "What is on it? Look at it and compare",
] * 30  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789?.,!▁\n "
TEMPLATE = (
    "{% for m in messages %}TURN{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}DONE\n{% endfor %}"
    "{% if add_generation_prompt %}TURNassistant\n{% endif %}"
)
Made = tuple[
    Any, dict[str, Any], dict[str, Any]
]  # processor, config.json, preprocessor_config.json


def tokenizer(marks: list[str], *, of_bytes: bool, **named: str) -> Any:
    """A small tokenizer with marks, some of which transformers' processors find by name."""
    made = Tokenizer(models.BPE())
    alphabet = list(LETTERS)
    if of_bytes:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(CORPUS, trainer)
    every = ["<pad>", "<bos>", "<eos>", *marks]
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in every])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        extra_special_tokens=named,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )


def template(turn: str, mark: str, done: str, *, trims: bool = False) -> str:
    text = TEMPLATE.replace("TURN", turn).replace("MARK", mark).replace("DONE", done)
    for name in ("m.content", "p.text"):
        text = text.replace(f"{{{{ {name} }}}}", f"{{{{ {name} | trim }}}}") if trims else text
    return text


def ids(made: Any, names: Mapping[str, str]) -> dict[str, int]:
    return {key: made.convert_tokens_to_ids(mark) for key, mark in names.items()}


def gemma3() -> Made:
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    made = tokenizer(["<start_of_turn>", "<end_of_turn>", *named.values()], of_bytes=False, **named)
    settings = {"size": {"height": 56, "width": 56}}
    processor = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(**settings),
        made,
        chat_template=template("<start_of_turn>", "<start_of_image>", "<end_of_turn>", trims=True),
        image_seq_length=16,
    )
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": 16,
        "vision_config": {"image_size": 56, "patch_size": 7},
        **ids(made, {f"{name}_index": mark for name, mark in named.items()}),
    }
    return processor, config, settings


def gemma4(mark: str) -> Made:
    named = {
        **{"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
        **{"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"},
        "video_token": "<|video|>",
    }
    made = tokenizer(["<|turn>", "<turn|>", *named.values()], of_bytes=False, **named)
    processor = transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessorPil(max_soft_tokens=70),
        tokenizer=made,
        video_processor=transformers.Gemma4VideoProcessor(),
        chat_template=template("<|turn>", mark, "<turn|>", trims=True),
    )
    names = {f"{name}_id": named[name] for name in ("image_token", "boi_token", "eoi_token")}
    config = {"model_type": "gemma4", "text_config": {}, "vision_config": {"patch_size": 16}}
    return processor, {**config, **ids(made, names)}, {"max_soft_tokens": 70}


def lfm2_vl() -> Made:
    named = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    }
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = ["<|im_start|>", "<|im_end|>", *named.values(), *tiles]
    made = tokenizer(marks, of_bytes=True, **named)
    settings = {
        **{"encoder_patch_size": 16, "tile_size": 64},
        **{"min_image_tokens": 2, "max_image_tokens": 4},
        **{"min_tiles": 2, "max_tiles": 4},
    }
    processor = transformers.Lfm2VlProcessor(
        Lfm2VlImageProcessor(**settings),
        made,
        chat_template=template("<|im_start|>", "<image>", "<|im_end|>"),
    )
    config = {"model_type": "lfm2_vl", "vision_config": {"patch_size": 16}}
    return processor, {**config, **ids(made, {"image_token_id": "<image>"})}, settings


def pixtral(kind: str, patch: int, merge: int) -> Made:
    made = tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], of_bytes=True)
    size = {"size": {"longest_edge": 112}}
    processor = transformers.PixtralProcessor(
        PixtralImageProcessorPil(**size, patch_size={"height": patch, "width": patch}),
        made,
        patch_size=patch,
        spatial_merge_size=merge,
        chat_template=template("[INST]", "[IMG]", "[/INST]"),
    )
    config = {
        "model_type": kind,
        "spatial_merge_size": merge,
        "vision_config": {"model_type": "pixtral", "patch_size": patch, "image_size": 112},
        **ids(made, {"image_token_index": "[IMG]"}),
    }
    return processor, config, {**size, "patch_size": patch}


FAMILIES: dict[str, Callable[[], Made]] = {
    "gemma3": gemma3,
    "gemma4": lambda: gemma4("<|image|>"),
    "gemma4, lines around": lambda: gemma4("\n\n<|image|>\n\n"),
    "lfm2_vl": lfm2_vl,
    "mistral3": lambda: pixtral("mistral3", 14, 2),
    "llava": lambda: pixtral("llava", 16, 1),
}


def prompts(processor: Any) -> dict[str, list[int]]:
    """Token ids of each conversation."""
    prompts = {}
    for title, chat in CHATS.items():
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        parts = [part for m in chat if isinstance(m["content"], list) for part in m["content"]]
        images = [part["image"] for part in parts if part["type"] == "image"]
        given = processor(text=[text], images=[images], add_special_tokens=False)
        prompts[title] = [int(token) for token in given["input_ids"][0]]
    return prompts


def main() -> None:
    lines = []
    for name, make in FAMILIES.items():
        processor, config, settings = make()
        with tempfile.TemporaryDirectory() as folder:
            processor.tokenizer.save_pretrained(folder)
            files = {file: json.loads((Path(folder) / file).read_text()) for file in FILES}
        files |= {"config.json": config, "preprocessor_config.json": settings}
        files["tokenizer_config.json"]["chat_template"] = processor.chat_template
        whole = {"files": files, "prompts": prompts(processor)}
        print(name, {title: len(one) for title, one in whole["prompts"].items()})
        lines.append(f"{json.dumps(name)}: {json.dumps(whole, ensure_ascii=False)}")
    (HERE / "prompts.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
