"""llguidance's table of a tokenizer's tokens. Knows which ids exist and which end an answer.

The table is built from tokenizer.json, as llguidance reads it; where it cannot, from the bytes of
each token. Ids that no token has, such as a model's padding, stand for nothing and never come.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import llguidance

from ..errors import UnsupportedModelError


class Tokens(Protocol):
    """What is needed of a tokenizer; `text.Tokenizer` is one."""

    vocab_size: int
    added_tokens: dict[int, Any]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def to_json(self) -> str:
        """tokenizer.json."""
        ...


def token_table(
    tokens: Tokens, *, vocab_size: int, end_ids: Iterable[int]
) -> "llguidance.LLTokenizer":
    """Build the table; takes seconds for a large vocabulary, and holds no lock of Python meanwhile.

    Args:
        tokens: of the model.
        vocab_size: of the model, which may be larger than the tokenizer's.
        end_ids: tokens that end an answer.

    Raises:
        UnsupportedModelError: the model has no end token that this tokenizer knows.
    """
    ends = sorted(i for i in end_ids if i < min(tokens.vocab_size, vocab_size))
    if not ends:
        raise UnsupportedModelError("A grammar needs a tokenizer with an end token.")
    size = max(vocab_size, tokens.vocab_size)
    try:
        return llguidance.LLTokenizer(tokens.to_json(), n_vocab=size, eos_token=ends)
    except ValueError:  # a tokenizer of a kind that it does not know
        wrapped = llguidance.TokenizerWrapper(_Bytes(tokens, ends[0], size))
        return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=ends)


class _Bytes:
    """A tokenizer as llguidance asks for it: every token as its bytes."""

    bos_token_id = None

    def __init__(self, tokens: Tokens, end_id: int, size: int) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = sorted(tokens.added_tokens)
        self.tokens = [tokens.token_bytes(i) for i in range(tokens.vocab_size)]
        self.tokens += [b""] * (size - tokens.vocab_size)
        self._tokens = tokens

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        if not isinstance(text, str):
            raise TypeError("only texts")
        return self._tokens.encode_plain(text)
