"""Schemas that `bench grammar` compiles, as tools and forms have them; a large vocabulary.

Each schema comes with documents that satisfy it. The tokenizer is made on the spot, byte-level BPE
with the mix that today's models have: words are drawn from syllables, and every prefix of a word is
a token, as BPE training would leave it. Which tokens there are decides what a mask costs.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEXT = (
    "A page table says where the keys and values of a sequence lie; pages are handed out as the "
    "text grows and come back when the request ends. "
)


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and texts that an answer under it may be."""

    name: str
    schema: dict[str, Any]
    documents: tuple[Any, ...]

    @property
    def texts(self) -> list[str]:
        """The documents as models write them: on one line, and indented."""
        return [json.dumps(self.documents[0]), *[json.dumps(d, indent=2) for d in self.documents]]


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


_STRING = {"type": "string"}
_ADDRESS = _object(
    {
        "street": _STRING,
        "city": {"type": "string", "maxLength": 40},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "IN", "JP", "US"]},
    },
    "country",
)
CASES = (
    Case(
        "form",
        _object(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 60},
                "email": {"type": "string", "format": "email"},
                "born": {"type": "string", "format": "date"},
                "address": _ADDRESS,
                "newsletter": {"type": "boolean"},
                "notes": {"type": ["string", "null"]},
            },
            "notes",
        ),
        (
            {
                "name": "Grace Hopper",
                "email": "grace@example.org",
                "born": "1906-12-09",
                "address": {"street": "12 Harbour Road", "city": "New York", "zip": "10001"},
                "newsletter": False,
                "notes": TEXT,
            },
        ),
    ),
    Case(
        "tree with references",
        {
            "$defs": {
                "node": _object(
                    {
                        "kind": {"enum": ["folder", "file"]},
                        "name": _STRING,
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "children",
                )
            },
            "$ref": "#/$defs/node",
        },
        (
            {
                "kind": "folder",
                "name": "src",
                "children": [
                    {"kind": "file", "name": "main.py"},
                    {"kind": "folder", "name": "tests", "children": []},
                ],
            },
        ),
    ),
    Case(
        "one of many tools",
        {
            "anyOf": [
                _object(
                    {
                        "name": {"const": f"tool_{number}"},
                        "arguments": _object(
                            {"query": _STRING, "limit": {"type": "integer"}, f"flag_{number}": {}},
                            "limit",
                            f"flag_{number}",
                        ),
                    }
                )
                for number in range(24)
            ]
        },
        ({"name": "tool_17", "arguments": {"query": "pages of a tail", "limit": 5}},),
    ),
    Case("any object", {"type": "object"}, ({"a": [1, 2.5, None], "b": {"c": "x", "d": TEXT}},)),
)


END = "<|end|>"
SYLLABLES = [c + v + e for c in "bcdfghklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "st")]
PUNCTUATION = ['{"', '":', '",', '"}', "},", "],", '":"', '","', "()", "//", "==", "\n\n", ".\n"]
SCRIPTS = ((0x4E00, 0x9FA5), (0x0430, 0x044F), (0x3041, 0x3096), (0xAC00, 0xD7A3), (0x0627, 0x064A))


def large_tokenizer(size: int = 150_000, *, seed: int = 0) -> tokenizers.Tokenizer:
    """Byte-level BPE with `size` tokens, one of them special; END ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: place for place, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _words(random.Random(seed)):
        prefix = word[0]
        for char in word[1:]:
            longer = prefix + char
            if longer not in vocabulary:
                vocabulary[longer] = len(vocabulary)
                merges.append((prefix, char))
            prefix = longer
            if len(vocabulary) >= size - 1:
                return _assemble(vocabulary, merges)
    raise AssertionError("words without end")


def _assemble(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def _words(rng: random.Random) -> Iterator[str]:
    """Words without end, each spelled as byte-level BPE spells it."""
    yield _spelled(" " * 40)
    for text in PUNCTUATION:
        yield _spelled(text)
    while True:
        word = "".join(rng.choices(SYLLABLES, k=rng.choice([1, 2, 2, 3])))
        style = rng.random()
        if style < 0.5:
            yield _spelled(" " + word)
        elif style < 0.75:
            yield _spelled(word)
        elif style < 0.88:
            yield _spelled(rng.choice(["", " "]) + word.capitalize())
        else:
            low, high = rng.choice(SCRIPTS)
            yield _spelled("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 3))))


def _spelled(text: str) -> str:
    """The text in the byte-level alphabet."""
    ((spelled, _),) = _BYTE_LEVEL.pre_tokenize_str(text)
    return spelled


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
