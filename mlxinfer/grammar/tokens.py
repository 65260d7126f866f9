"""llguidance's table of a tokenizer's tokens, built from the bytes of each token.

An id without a token, such as a model's padding, has no bytes and is never allowed.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol

import llguidance

from ..errors import InvalidRequestError, UnsupportedModelError

STARTS = ("", "\n")  # before a text: some tokenizers put a space there, which is cut off again


class Tokens(Protocol):
    """The methods of a tokenizer that the table needs; `text.Tokenizer` has them."""

    vocab_size: int
    added_tokens: dict[int, Any]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which no control token is matched."""


def token_table(
    tokens: Tokens, *, vocab_size: int, end_ids: Iterable[int]
) -> "llguidance.LLTokenizer":
    """Return the table; 262,144 tokens take some 3 CPU seconds.

    llguidance could read tokenizer.json itself, but would then spell a forced text, such as a
    choice, with control tokens wherever it contains their text.

    Args:
        vocab_size: of the model, which may be larger than the tokenizer's.

    Raises:
        UnsupportedModelError: the model has no end token that this tokenizer knows.
    """
    ends = sorted(i for i in end_ids if i < min(tokens.vocab_size, vocab_size))
    if not ends:
        raise UnsupportedModelError("A grammar needs a tokenizer with an end token.")
    size = max(vocab_size, tokens.vocab_size)
    wrapped = llguidance.TokenizerWrapper(TokenizerAdapter(tokens, ends[0], size))
    return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=ends)


class TokenizerAdapter:
    """A tokenizer with llguidance's interface: every token as its bytes, every text as ids."""

    bos_token_id = None

    def __init__(self, tokens: Tokens, end_id: int, size: int) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = sorted(i for i, t in tokens.added_tokens.items() if _is_control(t))
        self.tokens = [tokens.token_bytes(i) for i in range(tokens.vocab_size)]
        self.tokens += [b""] * (size - tokens.vocab_size)
        self._tokens = tokens

    def __call__(self, text: str) -> list[int]:
        """Return ids that spell exactly this text, those of the tokenizer where they do."""
        if not isinstance(text, str):
            raise TypeError("only texts")
        data = text.encode()
        for start in STARTS:
            try:
                ids = self._last(self._tokens.encode_plain(start + text), len(data))
            except InvalidRequestError:
                break
            if b"".join([self.tokens[i] for i in ids]) == data:
                return ids
        return self._greedy(data)

    def _last(self, ids: list[int], num_bytes: int) -> list[int]:
        """Return the last ids, which stand for `num_bytes` or a few more."""
        first = len(ids)
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(self.tokens[ids[first]])
        return ids[first:]

    def _greedy(self, data: bytes) -> list[int]:
        """Return ids of the longest tokens that fit one after the other, up to bytes without a
        token.

        For texts that the tokenizer normalises (to another form of Unicode, to lower case).
        """
        ids: list[int] = []
        at = 0
        while at < len(data):
            longest = self._longest_from.get(data[at : at + 2], 1)
            parts = (data[at : at + n] for n in range(longest, 0, -1))
            piece = next((part for part in parts if part in self._id_of), None)
            if piece is None:
                return ids
            ids.append(self._id_of[piece])
            at += len(piece)
        return ids

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {part: i for i, part in enumerate(self.tokens) if part and i not in special}

    @cached_property
    def _longest_from(self) -> dict[bytes, int]:
        """{first two bytes: length of the longest token that begins with them}."""
        longest: dict[bytes, int] = {}
        for part in self._id_of:
            longest[part[:2]] = max(longest.get(part[:2], 1), len(part))
        return longest


def _is_control(token: Any) -> bool:
    """Whether an added token is no text of an answer; others are words, or runs of spaces."""
    is_tag = token.content.startswith("<") and token.content.endswith(">")
    return bool(token.special or is_tag)
