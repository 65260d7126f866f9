"""Texts and pairs of texts as the rows that an embedding model or a reranker reads."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import tokenizers

from ..errors import ContextLengthError, InvalidRequestError
from .tokenizer import Tokenizer, check_text, encoding_failures, exceeds_tokens

CHUNK_CHARS = 1 << 20  # of texts that are encoded together: encodings take far more than ids


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """The token ids of a row, and for each token which text of a pair it belongs to (0 or 1)."""

    ids: list[int]
    token_types: list[int]


def encode_rows(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_tokens: int,
    truncate: bool,
    param: str = "input",
    special: bool = True,
) -> list[EncodedRow]:
    """Return texts or pairs as rows. Special tokens that are spelled in a text are text.

    Args:
        tokenizer: of the model.
        texts: one for each row.
        pairs: the second text of each row; None: there is none.
        max_tokens: of a row.
        truncate: a longer row loses tokens at its end, a pair at the end of its longer text;
            otherwise a longer row is refused.
        param: names the texts in errors.
        special: add the tokens that the tokenizer puts around a text or a pair.

    Raises:
        ContextLengthError: a row is too long.
        InvalidRequestError: a text is no text, or the tokenizer fails.
    """
    count = tokenizer.num_special_tokens(pair=pairs is not None) if special else 0
    room = max_tokens - count
    if room < 1:
        raise InvalidRequestError(
            f"{max_tokens} tokens leave no room beside the {count} that stand around a text.",
            param=param,
        )
    for index, text in enumerate(() if truncate else texts):
        both = [text] if pairs is None else [text, pairs[index]]
        _check_length(tokenizer, both, max_tokens, f"{param} {index}", param)
    rows: list[EncodedRow] = []
    for index, (first, second) in enumerate(_encoded(tokenizer, texts, pairs)):
        total = len(first.ids) + (0 if second is None else len(second.ids))
        if total > room and not truncate:
            raise too_long(f"{param} {index}", total + count, max_tokens, param)
        if total > room:
            first, second = _cut(first, second, room)
        whole = tokenizer.with_special_tokens(first, second) if special else first
        rows.append(EncodedRow(whole.ids, whole.type_ids))
    return rows


def too_long(what: str, num_tokens: int | None, max_tokens: int, param: str) -> ContextLengthError:
    """Return the error of a text that is too long."""
    has = f"more than {max_tokens}" if num_tokens is None else f"{num_tokens}"
    return ContextLengthError(
        f"{what} has {has} tokens, and the model reads at most {max_tokens}; shorten it, or ask "
        "for it to be truncated.",
        param=param,
    )


def _check_length(
    tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, what: str, param: str
) -> None:
    """Raise for texts that are certain to be too long, before all of them is encoded."""
    for text in texts:
        check_text(text)
    if exceeds_tokens(lambda text: _encodings(tokenizer, [text])[0].ids, texts, max_tokens):
        raise too_long(what, None, max_tokens, param)


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None
) -> Iterator[tuple[tokenizers.Encoding, tokenizers.Encoding | None]]:
    """Yield the encodings of each row's text and of its second text, some rows at a time.

    A long query that stands in thousands of rows is encoded and held once for each chunk.
    """
    for some in _chunks(texts, pairs):
        ones = _each_once(tokenizer, texts[some])
        others = [None] * len(ones) if pairs is None else _each_once(tokenizer, pairs[some])
        yield from zip(ones, others, strict=True)


def _each_once(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tokenizers.Encoding]:
    """Return what `_encodings` does; equal texts share one encoding, which must not be changed."""
    for text in texts:
        check_text(text)
    unique = list(dict.fromkeys(texts))
    found = dict(zip(unique, _encodings(tokenizer, unique), strict=True))
    return [found[text] for text in texts]


def _chunks(texts: Sequence[str], pairs: Sequence[str] | None) -> Iterator[slice]:
    """Yield slices of rows with at most CHUNK_CHARS characters together, or one longer row."""
    first = num_chars = 0
    for index, text in enumerate(texts):
        size = len(text) + (0 if pairs is None else len(pairs[index]))
        if index > first and num_chars + size > CHUNK_CHARS:
            yield slice(first, index)
            first, num_chars = index, 0
        num_chars += size
    yield slice(first, len(texts))


def _encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tokenizers.Encoding]:
    """Return the encodings of texts without special tokens. Releases the GIL."""
    found: list[tokenizers.Encoding] = []
    for text in texts:
        check_text(text)
    with encoding_failures():
        plain = tokenizer.literal_backend("")
        if all(tokenizer.literal_backend(text) is plain for text in texts):
            return list(plain.encode_batch(list(texts), add_special_tokens=False))
        for text in texts:
            backend = tokenizer.literal_backend(text)
            found += backend.encode_batch([text], add_special_tokens=False)
    return found


def _cut(
    first: tokenizers.Encoding, second: tokenizers.Encoding | None, room: int
) -> tuple[tokenizers.Encoding, tokenizers.Encoding | None]:
    """Return copies of `room` tokens together, the longer cut first: transformers' longest_first.

    Other rows may have the same encodings.
    """
    first, second = deepcopy(first), deepcopy(second)
    one, two = len(first.ids), 0 if second is None else len(second.ids)
    half = room - room // 2 if one > two else room // 2
    kept = min(one, max(room - two, half if second is not None else room))
    first.truncate(kept)
    if second is not None:
        second.truncate(min(two, room - kept))
    return first, second
