"""How each kind of byte-level BPE cuts a text into words, by llama.cpp's name for it.

The expressions are those of the models' own tokenizer.json; a name that is not here is refused,
since a wrong expression spoils the model without a sign.
"""

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """What tokenizer.json says beside vocabulary and merges."""

    pattern: str | None  # None: GPT-2's own
    whole_words: bool = False  # a word that is a token needs no merges
    normal_form: bool = False  # NFC first
    adds_bos: bool = False  # where the file does not say


_LLAMA = Pretokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN = Pretokenizer(_QWEN2, normal_form=True)

PRETOKENIZERS = {
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "gpt-4o": Pretokenizer(_GPT4O),
    "tekken": Pretokenizer(_TEKKEN, whole_words=True, adds_bos=True),
    "gpt-2": Pretokenizer(None),
}
