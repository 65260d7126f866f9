"""Texts and pairs to the rows of a pooling request, with the prompts and templates of rerankers."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from ..errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
    check_token_ids,
    shown,
    wrong_value,
)
from ..pooling.config import Head, PoolingConfig
from ..pooling.request import TokenRow
from ..text import encode_chat
from ..text.tokenizer import Tokenizer, check_text, encoding_failures, exceeds_tokens
from .inputs import Text

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
        pairs: the second text of each row; None: there is none.
        truncate: a longer row loses tokens at its end, a pair at the end of its longer text;
            otherwise a longer row is refused.
        special: add the tokens that the tokenizer puts around a text or a pair.
    """
    count = tokenizer.num_special_tokens(pair=pairs is not None) if special else 0
    room = max_tokens - count
    if room < 1:
        raise InvalidRequestError(
            f"{max_tokens} tokens leave no room beside the {count} that stand around a text.",
            param=param,
        )
    for index, text in enumerate(() if truncate else texts):
        texts_of_pair = [text] if pairs is None else [text, pairs[index]]
        _check_length(tokenizer, texts_of_pair, max_tokens, f"{param} {index}", param)
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
    has = f"more than {max_tokens}" if num_tokens is None else f"{num_tokens}"
    return ContextLengthError(
        f"{what} has {has} tokens, and the model reads at most {max_tokens}; shorten it, or ask "
        "for it to be truncated.",
        param=param,
    )


def _check_length(
    tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, what: str, param: str
) -> None:
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
    for chunk in _chunks(texts, pairs):
        ones = _each_once(tokenizer, texts[chunk])
        seconds = [None] * len(ones) if pairs is None else _each_once(tokenizer, pairs[chunk])
        yield from zip(ones, seconds, strict=True)


def _each_once(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tokenizers.Encoding]:
    """Return what `_encodings` does; equal texts share one encoding, which must not be changed."""
    for text in texts:
        check_text(text)
    unique = list(dict.fromkeys(texts))
    by_text = dict(zip(unique, _encodings(tokenizer, unique), strict=True))
    return [by_text[text] for text in texts]


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
    encodings: list[tokenizers.Encoding] = []
    for text in texts:
        check_text(text)
    with encoding_failures():
        plain = tokenizer.literal_backend("")
        if all(tokenizer.literal_backend(text) is plain for text in texts):
            return list(plain.encode_batch(list(texts), add_special_tokens=False))
        for text in texts:
            backend = tokenizer.literal_backend(text)
            encodings += backend.encode_batch([text], add_special_tokens=False)
    return encodings


def _cut(
    first: tokenizers.Encoding, second: tokenizers.Encoding | None, room: int
) -> tuple[tokenizers.Encoding, tokenizers.Encoding | None]:
    """Return copies of `room` tokens together, the longer cut first: transformers' longest_first.

    Other rows may have the same encodings.
    """
    first, second = deepcopy(first), deepcopy(second)
    one, two = len(first.ids), 0 if second is None else len(second.ids)
    half = room - room // 2 if one > two else room // 2
    count = min(one, max(room - two, half if second is not None else room))
    first.truncate(count)
    if second is not None:
        second.truncate(min(two, room - count))
    return first, second


# -- prompts and templates ------------------------------------------------------------------------

QUERY, DOCUMENT = "query", "document"
# Of Qwen3-Reranker, as its model card has it; `yes` and `no` are what it may answer.
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
JUDGED = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def resolved(pooling: PoolingConfig, tokenizer: Tokenizer, name: str) -> PoolingConfig:
    """The config with the tokens that score: "yes" and "no", unless a file names others."""
    if pooling.head is not Head.TOKENS or pooling.token_ids is not None:
        return pooling
    yes, no = (tokenizer.piece_to_id(piece) for piece in ("yes", "no"))
    if yes is None or no is None or tokenizer.piece_to_id("<|im_start|>") is None:
        raise UnsupportedModelError(
            f"{name} gives scores by the logits of tokens, and no file says which: expected "
            "modules.json with a LogitScore, or the tokenizer of Qwen3-Reranker."
        )
    return replace(pooling, token_ids=(yes, no))


class RowBuilder:
    """Builds rows for one model. Safe to use from several threads.

    Args:
        max_context: tokens of a row.
    """

    def __init__(self, tokenizer: Tokenizer, pooling: PoolingConfig, max_context: int) -> None:
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_context = max_context
        template = tokenizer.template
        source = "" if template is None else template.source_for(None)
        self._templated = f'"{DOCUMENT}"' in source or f"'{DOCUMENT}'" in source
        self._judges = pooling.head is Head.TOKENS and not self._templated

    def texts(
        self,
        texts: Sequence[Text],
        *,
        prompt: str = "",
        truncate: int | bool = False,
        param: str = "input",
    ) -> list[TokenRow]:
        """Rows of texts behind a prompt. Lists of token ids become rows without the prompt.

        `truncate`: cut rows to this number of tokens (True: the model's limit); False: refuse.
        """
        limit = self.limit(truncate)
        cut = truncate is not False
        plain = [prompt + self._read(text) for text in texts if isinstance(text, str)]
        encoded = iter(
            encode_rows(self.tokenizer, plain, max_tokens=limit, truncate=cut, param=param)
            if plain
            else []
        )
        skipped = 0 if self.pooling.pools_prompt or not prompt else self._num_prompt(prompt)
        rows = []
        for index, text in enumerate(texts):
            if isinstance(text, str):
                rows.append(_row(next(encoded), skipped))
                continue
            ids = self._ids(text, f"{param} {index}", param)
            if len(ids) > limit and not cut:
                raise too_long(f"{param} {index}", len(ids), limit, param)
            rows.append(TokenRow(ids[:limit]))
        return rows

    def pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool = False,
        param: str = "documents",
    ) -> list[TokenRow]:
        """Rows of a reranker: each query with its document.

        Args:
            instruction: what counts as a match, for models that read one; None: their own.
            truncate, param: see `texts`; the longer of the two loses tokens first.
        """
        limit, cut = self.limit(truncate), truncate is not False
        for text in (*queries, *documents):
            if not isinstance(text, str):
                raise InvalidRequestError(f"{param} holds {shown(text)}; expected texts.")
        if self._templated:
            return self._rendered(queries, documents, instruction, limit, cut, param)
        if self._judges:
            asked = INSTRUCTION if instruction is None else instruction
            bodies = [
                f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
                for query, document in zip(queries, documents, strict=True)
            ]
            return self._judged(bodies, limit, cut, param)
        if instruction is not None:
            raise InvalidRequestError(
                "This model reads no instruction; leave it out.", param="instruction"
            )
        rows = encode_rows(
            self.tokenizer, queries, documents, max_tokens=limit, truncate=cut, param=param
        )
        return [_row(row, 0) for row in rows]

    def limit(self, truncate: int | bool) -> int:
        if isinstance(truncate, bool):
            return self.max_context
        if type(truncate) is not int or truncate < 1:
            raise wrong_value("truncate", truncate, "a number of tokens, True or False")
        return min(truncate, self.max_context)

    def _judged(self, bodies: Sequence[str], limit: int, cut: bool, param: str) -> list[TokenRow]:
        """Qwen3-Reranker's question about each body, which alone may be cut."""
        encode = self.tokenizer.encode
        before = encode(JUDGE, add_special_tokens=False, parse_special=True)
        after = encode(JUDGED, add_special_tokens=False, parse_special=True)
        room = limit - len(before) - len(after)
        if room < 1:
            raise InvalidRequestError(
                f"{limit} tokens leave no room beside the {limit - room} of the model's own "
                "question.",
                param=param,
            )
        how: dict[str, Any] = {"truncate": cut, "param": param, "special": False}
        inner = encode_rows(self.tokenizer, bodies, max_tokens=room, **how)
        return [TokenRow([*before, *row.ids, *after]) for row in inner]

    def _rendered(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None,
        limit: int,
        cut: bool,
        param: str,
    ) -> list[TokenRow]:
        rows = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            messages: list[Mapping[str, Any]] = [
                {"role": QUERY, "content": query},
                {"role": DOCUMENT, "content": document},
            ]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            ids = encode_chat(self.tokenizer, messages)
            if len(ids) > limit:
                if not cut:
                    raise too_long(f"{param} {index}", len(ids), limit, param)
                over, shortened = len(ids) - limit, document
                while len(ids) > limit and shortened:
                    shortened = self._shortened(shortened, over)
                    messages[-1] = {"role": DOCUMENT, "content": shortened}
                    ids = encode_chat(self.tokenizer, messages)
                    over = max(len(ids) - limit, 1)
            rows.append(TokenRow(ids[:limit]))
        return rows

    def _shortened(self, text: str, num_tokens: int) -> str:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.decode(ids[: max(len(ids) - num_tokens, 0)])

    def _num_prompt(self, prompt: str) -> int:
        """Tokens of a prompt alone: as sentence-transformers counts them, without those behind."""
        (row,) = encode_rows(
            self.tokenizer, [prompt], max_tokens=self.max_context, truncate=True, param="prompt"
        )
        ends = self.tokenizer.special_ids
        return len(row.ids) - 1 if row.ids and row.ids[-1] in ends else len(row.ids)

    def _read(self, text: str) -> str:
        return text.lower() if self.pooling.lowercase else text

    def _ids(self, ids: Any, what: str, param: str) -> list[int]:
        if isinstance(ids, bytes) or not isinstance(ids, Sequence) or not ids:
            raise wrong_value(what, ids, "a text or a list of token ids", param)
        check_token_ids(ids, self.tokenizer.vocab_size, param=param)
        return list(ids)


def _row(row: EncodedRow, num_prompt: int) -> TokenRow:
    types = row.token_types if any(row.token_types) else None
    return TokenRow(row.ids, types, num_prompt)
