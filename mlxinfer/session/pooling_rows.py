"""Texts to the rows of a pooling request: prompts, pairs and templates of rerankers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core import check_token_ids
from ..errors import InvalidRequestError, UnsupportedModelError, shown
from ..pooling.config import Head, PoolingConfig
from ..pooling.request import TokenRow
from ..text import Tokenizer, encode_chat
from ..text.rows import EncodedRow, encode_rows, too_long
from .inputs import Text

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
    """The same with the tokens that score: "yes" and "no", where no file names others.

    Raises:
        UnsupportedModelError: the tokenizer has no such tokens.
    """
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
        tokenizer: of the model.
        pooling: how it reads texts.
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

        Args:
            texts: texts or lists of token ids.
            prompt: stands before each text.
            truncate: cut rows to so many tokens, or (True) to the model's limit; False: refuse.
            param: names the texts in errors.

        Raises:
            InvalidRequestError: an item is no text, or has token ids beyond the vocabulary.
            ContextLengthError: a text is too long, and `truncate` is False.
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
            queries, documents: as many of each.
            instruction: what counts as a match, for models that read one; None: their own.
            truncate, param: as of `texts`; the longer of the two loses tokens first.

        Raises:
            InvalidRequestError: as of `texts`, or the model reads no instruction.
            ContextLengthError: as of `texts`.
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
        found = encode_rows(
            self.tokenizer, queries, documents, max_tokens=limit, truncate=cut, param=param
        )
        return [_row(row, 0) for row in found]

    def limit(self, truncate: int | bool) -> int:
        """Tokens that a row may have; raises InvalidRequestError for what is no number of them."""
        if isinstance(truncate, bool):
            return self.max_context
        if type(truncate) is not int or truncate < 1:
            raise InvalidRequestError(
                f"truncate is {shown(truncate)}; expected a number of tokens, True or False.",
                param="truncate",
            )
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
        """By the model's own template, which knows the roles of query and document."""
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
                over, kept = len(ids) - limit, document
                while len(ids) > limit and kept:
                    kept = self._shortened(kept, over)
                    messages[-1] = {"role": DOCUMENT, "content": kept}
                    ids = encode_chat(self.tokenizer, messages)
                    over = max(len(ids) - limit, 1)
            rows.append(TokenRow(ids[:limit]))
        return rows

    def _shortened(self, text: str, num_tokens: int) -> str:
        """A text without about so many tokens at its end."""
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
            raise InvalidRequestError(
                f"{what} is {shown(ids)}; expected a text or a list of token ids.", param=param
            )
        check_token_ids(ids, self.tokenizer.vocab_size, param=param)
        return list(ids)


def _row(row: EncodedRow, num_prompt: int) -> TokenRow:
    types = row.token_types if any(row.token_types) else None
    return TokenRow(row.ids, types, num_prompt)
