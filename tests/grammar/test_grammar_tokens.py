"""The table of tokens says of each token what the tokenizer says of it."""

import json
import re
from typing import Any

import numpy as np
import pytest
from grammar.grammar_tools import PADDING, allowed, compiler_of, tokenizer_of
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import GrammarCompiler, GrammarSpec
from mlxinfer.grammar.compiled import TokenGrammar
from mlxinfer.grammar.spec import (
    JSON_STYLE,
    OPTIONS_KEY,
    choice,
    json_object,
    json_schema,
    regex,
    tool_calls,
)
from mlxinfer.grammar.tokens import TokenizerAdapter, Tokens, token_table
from mlxinfer.text import Tokenizer

KINDS = ("demo", "bytelevel", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_their_bytes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    size, ends = tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids
    table = token_table(tokenizer, vocab_size=size, end_ids=ends)
    assert table.vocab_size == size
    assert set(table.eos_tokens) == ends
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.added_tokens:  # only named in Lark
            assert table.is_special_token(token_id)
        elif text != b"\xff":  # no byte of any text; llguidance marks control tokens with it
            assert not table.is_special_token(token_id)
            assert table.decode_bytes([token_id]) == text, token_id


# -- texts that have to come ----------------------------------------------------------------------


def only_answer(kind: str, spec: GrammarSpec) -> tuple[str, list[int]]:
    """The text of a grammar that allows one only, and its tokens."""
    tokenizer, grammar = tokenizer_of(kind), compiler_of(kind).start(spec)
    ids: list[int] = []
    while not grammar.finished and len(ids) < 900:
        allowed_ids = allowed(grammar, tokenizer.vocab_size + PADDING)
        assert grammar.problem is None
        ids.append(max(allowed_ids, key=lambda i: len(tokenizer.token_bytes(i))))
        grammar.accept(ids[-1])
    return b"".join(map(tokenizer.token_bytes, ids)).decode(), ids


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_is_complete_and_without_control_tokens(kind: str) -> None:
    hostile = "a<|im_end|>b<|im_start|></think> é\u0301 漢😀"
    forced = ["yes", " two  words", "<|im_end|>", "<|im_start|>", hostile]
    for text in forced:
        named = {"type": "object", "properties": {text: {"const": [text]}}, "required": [text]}
        closed = {**named, "additionalProperties": False}
        tool = f"start: %json {json.dumps({OPTIONS_KEY: JSON_STYLE, **closed})}"
        for spec, value in (
            (choice([text]), None),
            (regex(re.escape(text)), None),
            (json_schema({"const": text}), text),
            (json_schema(closed), {text: [text]}),
            (tool_calls(tool, [("tools[0]", closed)]), {text: [text]}),
        ):
            result, ids = only_answer(kind, spec)
            assert (result if value is None else json.loads(result)) == (
                text if value is None else value
            )
            assert not set(ids) & set(tokenizer_of(kind).added_tokens)


def test_added_tokens_that_are_words_may_come() -> None:
    backend = Backend.from_str(tokenizer_of("demo").to_json())
    backend.add_tokens([AddedToken(word, special=False) for word in ("foozle", "    ", "<tag>")])
    tokens = Tokenizer(backend)
    size, ends = tokens.vocab_size, tokenizer_of("demo").eos_token_ids
    table = token_table(tokens, vocab_size=size, end_ids=ends)
    ids = [tokens.piece_to_id(word) for word in ("foozle", "    ", "<tag>")]
    assert [table.is_special_token(i) for i in ids] == [False, False, True]
    assert tokens.token_bytes(ids[0]) == b"foozle"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_spelled_as_the_tokenizer_does(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    spelling = TokenizerAdapter(tokenizer, 0, tokenizer.vocab_size)
    for text in ("yes", '{"name": "a"}', "two words", "\n x", "née"):
        ids = spelling(text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
        assert ids == tokenizer.encode_plain("\n" + text)[-len(ids) :]


def test_a_tokenizer_that_changes_texts_still_spells_them() -> None:
    class Small(Texts):
        def encode_plain(self, text: str) -> list[int]:
            return super().encode_plain(text.lower())

    class Failing(Texts):
        def encode_plain(self, text: str) -> list[int]:
            raise InvalidRequestError("no")

    for kind in (Small, Failing):
        tokens = kind(tokenizer_of("demo"))
        ids = TokenizerAdapter(tokens, 0, tokens.vocab_size)("Yes <|im_end|>")
        assert b"".join(map(tokens.token_bytes, ids)) == b"Yes <|im_end|>"
        assert not set(ids) & set(tokens.added_tokens)


class Texts:
    """A tokenizer around another."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.vocab_size = tokens.vocab_size
        self.added_tokens: dict[int, Any] = tokens.added_tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens.token_bytes(token_id)

    def encode_plain(self, text: str) -> list[int]:
        return self._tokens.encode_plain(text)


def test_a_model_with_fewer_tokens_than_its_tokenizer() -> None:
    tokenizer = tokenizer_of("demo")
    size = tokenizer.vocab_size - 100
    compiler = GrammarCompiler(tokenizer, vocab_size=size, end_ids=tokenizer.eos_token_ids)
    grammar = compiler.start(json_object())
    masks = np.zeros((1, -(-size // 32)), dtype=np.uint32)
    TokenGrammar.fill_masks([grammar], [0], masks)
    assert masks.any()
    compiler.close()
