"""Folders of models that see, of about 50 million parameters, but for their weights.

Every byte is a token, so an answer of letters becomes the same tokens again in the next turn.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 272
QWEN_MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
GEMMA_MARKS = [
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|video|>",
    "<|audio|>",
    "<|audio>",
    "<audio|>",
]
ENDS = ["<unk>", "<|im_end|>", "<|im_start|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}<|im_start|>assistant "
)
TABLES = yaml.load(Path(__file__).with_suffix(".yml").read_text(), yaml.CSafeLoader)


@dataclass(frozen=True, slots=True)
class Seeing:
    """A model that sees.

    Attributes:
        config: of config.json, without token ids.
        processor: files about pictures.
        marks: tokens around and in place of pictures; the second one stands for a feature.
        names: of these tokens in the config and the tokenizer, in order.
        picture: text of a picture in a prompt.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    marks: list[str]
    names: list[str]
    picture: str

    @property
    def vocabulary(self) -> list[str]:
        """The text of every token, bytes as byte-level BPE spells them."""
        return [*ENDS, *self.marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]

    @property
    def never(self) -> list[int]:
        """Tokens that an answer must not have: all that are no letters."""
        letters = {self.vocabulary.index(letter) for letter in string.ascii_letters}
        return [token for token in range(VOCAB) if token not in letters]

    def write(self, folder: Path) -> Path:
        """Write all but the weights, and return the folder."""
        folder.mkdir(parents=True)
        vocabulary = self.vocabulary
        named = zip(self.names, self.marks, strict=True)
        ids = {f"{name}_id": vocabulary.index(mark) for name, mark in named}
        files = {
            "config.json": {**self.config, **ids, "eos_token_id": 1},
            **self.processor,
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": ENDS[1],
                "unk_token": ENDS[0],
                "pad_token": ENDS[0],
                "extra_special_tokens": dict(zip(self.names, self.marks, strict=True)),
                "chat_template": TEMPLATE.replace("PICTURE", self.picture),
            },
        }
        for name, value in files.items():
            (folder / name).write_text(json.dumps(value))
        tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([*ENDS, *self.marks])
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder


MODELS = {
    "Qwen 3.5-like": Seeing(
        TABLES["qwen"],
        TABLES["qwen_processor"],
        QWEN_MARKS,
        [f"{name}_token" for name in ("vision_start", "image", "vision_end", "video")],
        "".join(QWEN_MARKS[:3]),
    ),
    "Gemma 4-like": Seeing(
        TABLES["gemma"],
        TABLES["gemma_processor"],
        GEMMA_MARKS,
        [f"{name}_token" for name in ("boi", "image", "eoi", "video", "audio", "boa", "eoa")],
        GEMMA_MARKS[1],
    ),
}
