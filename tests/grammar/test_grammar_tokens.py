"""The table of tokens says of each token what the tokenizer says of it."""

from typing import Any

import numpy as np
import pytest
from grammar.grammar_tools import PADDING, allowed, tokenizer_of

from mlxinfer.grammar import GrammarCompiler
from mlxinfer.grammar.compiled import TokenGrammar
from mlxinfer.grammar.spec import json_object, regex
from mlxinfer.grammar.tokens import Tokens, token_table

KINDS = ("demo", "bytelevel", "sentencepiece")


class Strange:
    """A tokenizer whose JSON nobody knows."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.vocab_size = tokens.vocab_size
        self.added_tokens: dict[int, Any] = tokens.added_tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens.token_bytes(token_id)

    def encode_plain(self, text: str) -> list[int]:
        return self._tokens.encode_plain(text)

    def to_json(self) -> str:
        return '{"version": "unheard of"}'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [True, False])
def test_tokens_are_their_bytes(kind: str, known: bool) -> None:
    tokenizer = tokenizer_of(kind)
    size, ends = tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids
    table = token_table(tokenizer if known else Strange(tokenizer), vocab_size=size, end_ids=ends)
    assert table.vocab_size == size
    assert set(table.eos_tokens) == ends
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.added_tokens:  # text that nobody spells: of use to Lark alone
            assert table.is_special_token(token_id)
        elif text != b"\xff":  # no byte of any text; llguidance marks control tokens with it
            assert not table.is_special_token(token_id)
            assert table.decode_bytes([token_id]) == text, token_id


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_is_not_known_gives_the_same_masks(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    masks = []
    for tokens in (tokenizer, Strange(tokenizer)):
        compiler = GrammarCompiler(
            tokens, vocab_size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids
        )
        grammar = compiler.start(regex("[a-z ]+[0-9]"))
        found = [allowed(grammar, tokenizer.vocab_size)]
        for token in tokenizer.encode_plain("ab"):
            if token in found[-1]:
                grammar.accept(token)
                found.append(allowed(grammar, tokenizer.vocab_size))
        masks.append(found)
        compiler.close()
    assert masks[0] == masks[1]


def test_a_model_with_fewer_tokens_than_its_tokenizer() -> None:
    tokenizer = tokenizer_of("demo")
    size = tokenizer.vocab_size - 100
    compiler = GrammarCompiler(tokenizer, vocab_size=size, end_ids=tokenizer.eos_token_ids)
    grammar = compiler.start(json_object())
    masks = np.zeros((1, -(-size // 32)), dtype=np.uint32)
    TokenGrammar.fill_masks([grammar], [0], masks)
    assert masks.any()
    compiler.close()
