"""Folders of models that see, of about 50 million parameters, but for their weights.

Every byte is a token, so an answer of letters becomes the same tokens again in the next turn.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen3_5",
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 8,
        "hidden_size": 512,
        "num_heads": 8,
        "intermediate_size": 2048,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 512,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
    },
    "tie_word_embeddings": False,
}
GEMMA = {
    "model_type": "gemma4",
    "text_config": {
        **_TEXT,
        "tie_word_embeddings": True,
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 10_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "global_head_dim": 64,
        "position_embedding_size": 1024,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "standardize": True,
    },
    "audio_config": None,
    "tie_word_embeddings": True,
}
QWEN_PROCESSOR = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
}
GEMMA_PROCESSOR = {
    "processor_config.json": {
        "processor_class": "Gemma4Processor",
        "image_processor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "max_soft_tokens": 70,
            "patch_size": 16,
            "pooling_kernel_size": 3,
        },
    }
}


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
        QWEN,
        QWEN_PROCESSOR,
        QWEN_MARKS,
        [f"{name}_token" for name in ("vision_start", "image", "vision_end", "video")],
        "".join(QWEN_MARKS[:3]),
    ),
    "Gemma 4-like": Seeing(
        GEMMA,
        GEMMA_PROCESSOR,
        GEMMA_MARKS,
        [f"{name}_token" for name in ("boi", "image", "eoi", "video", "audio", "boa", "eoa")],
        GEMMA_MARKS[1],
    ),
}
