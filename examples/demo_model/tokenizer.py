"""The tokenizer of the demo models: trains it, renders ChatML, writes its files. No mlx."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Message, conversation, document
from .sums import Exchange
from .tools.conversations import tool_conversation

VOCAB_SIZE = 2048
START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (END_OF_TEXT, START, END)  # ids 0, 1, 2
QUESTION_WEIGHT = 0.1  # how much the model learns to ask, against to answer

CHAT_TEMPLATE = """\
{%- macro kind(schema) %}
{%- if schema is mapping and schema.enum %}
{{- schema.enum | join('|') }}
{%- elif schema is mapping and schema.type is string %}
{{- schema.type }}
{%- else %}
{{- 'any' }}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- messages[0].content ~ '\\n\\n' }}
{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}
{%- set function = tool.function or tool %}
{%- set schema = function.parameters or {} %}
{{- '\\n' ~ function.name ~ '(' }}
{%- for name, given in (schema.properties or {}).items() %}
{{- ', ' if not loop.first }}{{ name }}
{{- '?' if name not in (schema.required or []) }}: {{ kind(given) }}
{%- endfor %}
{{- '): ' ~ (function.description or function.name) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('Roles are system, user, assistant and tool, not ' ~ message.role) }}
{%- endif %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Return a byte-level BPE tokenizer of VOCAB_SIZE tokens; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed)), trainer)
    return tokenizer


def _texts(rng: Random, num_texts: int = 20_000) -> Iterator[str]:
    for _ in range(num_texts):
        make = tool_conversation if rng.random() < 0.3 else conversation
        yield from (message.content for message in make(rng))
        if rng.random() < 0.1:
            yield document(rng)


def render_chat(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[float]]:
    """Return a conversation as token ids and the weight of each token in the loss.

    An end token behind it, which does not count, tells it from the next text in the row.
    """
    ids: list[int] = []
    weights: list[float] = []
    for role, content in messages:
        answered = role == "assistant"
        for text, weight in (
            (f"{START}{role}\n", QUESTION_WEIGHT),
            (content, 1.0 if answered else QUESTION_WEIGHT),
            (f"{END}\n", 1.0 if answered else QUESTION_WEIGHT),
        ):
            piece = tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
    return [*ids, _end_id(tokenizer)], [*weights, 0.0]


def render_document(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[float]]:
    """Return a page of prose as token ids and weights."""
    ids = tokenizer.encode(text + END_OF_TEXT).ids
    return ids, [1.0] * len(ids)


def render_drill(tokenizer: Tokenizer, lines: list[Exchange]) -> tuple[list[int], list[float]]:
    """Return exercises, one a line, as token ids and weights: only their solutions count fully."""
    ids: list[int] = []
    weights: list[float] = []
    for exercise, solution in lines:
        for text, weight in ((exercise, QUESTION_WEIGHT), (solution + "\n", 1.0)):
            piece = tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
    return [*ids, _end_id(tokenizer)], [*weights, 1.0]


def _end_id(tokenizer: Tokenizer) -> int:
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None, f"the tokenizer has no {END_OF_TEXT}"
    return end_id


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START, END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
