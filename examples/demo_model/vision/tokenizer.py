"""The tokenizer of the demo that sees: small, and with the tokens that stand around pictures."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..tokenizer import END, END_OF_TEXT, SPECIAL, START
from .drawings import draw_scene
from .model import TEXT
from .questions import ask

BEGIN, CLOSE, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
VIDEO = "<|video_pad|>"  # this model sees none, but readers of checkpoints ask for the token
MARKS = (BEGIN, CLOSE, PAD, VIDEO)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}
{{- raise_exception('Roles are system, user and assistant, not ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(seed: int = 0) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT.vocab_size,
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed)), trainer)
    return tokenizer


def _texts(rng: Random, num_texts: int = 6000) -> Iterator[str]:
    for _ in range(num_texts):
        _, question, answer = ask(draw_scene(rng), rng)
        yield question
        yield answer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START, END, *MARKS],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
