"""A large tokenizer made on the spot: byte-level BPE with the mix that today's models have.

No text is needed: words are drawn from syllables, and every prefix of a word is a token, as BPE
training would leave it. Which tokens there are decides what a grammar's mask costs, nothing else.
"""

import random
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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
