"""What the tests of grammars share: compilers over small tokenizers, texts held against them."""

from functools import cache

import numpy as np
from text.text_data import load_tokenizer

from mlxinfer import hub
from mlxinfer.grammar import GrammarCompiler, GrammarSpec
from mlxinfer.grammar.compiled import TokenGrammar
from mlxinfer.text import Tokenizer

PADDING = 37  # ids that the model has and the tokenizer has not


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """ "demo", "bytelevel" or "sentencepiece"."""
    return Tokenizer.from_folder(hub.resolve("demo")) if kind == "demo" else load_tokenizer(kind)


@cache
def compiler_of(kind: str = "demo") -> GrammarCompiler:
    tokenizer = tokenizer_of(kind)
    return GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size + PADDING, end_ids=tokenizer.eos_token_ids
    )


def allowed(grammar: TokenGrammar, vocab_size: int) -> list[int]:
    """The tokens that its mask allows."""
    masks = np.full((2, -(-vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
    TokenGrammar.fill_masks([grammar], [1], masks)
    assert (masks[0] == 0xFFFFFFFF).all(), "a row that is not its own"
    return np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist()


def matches(spec: GrammarSpec, text: str, kind: str = "demo") -> bool:
    """Whether a text, spelled a character at a time where it must be, is a whole answer."""
    tokenizer, grammar = tokenizer_of(kind), compiler_of(kind).start(spec)
    size = tokenizer.vocab_size + PADDING
    rest = text.encode()
    while rest:
        if grammar.finished:
            return False
        candidates = [t for t in allowed(grammar, size) if is_next(tokenizer, t, rest)]
        if not candidates:
            return False
        token = max(candidates, key=lambda t: len(tokenizer.token_bytes(t)))
        grammar.accept(token)
        assert grammar.problem is None
        rest = rest[len(tokenizer.token_bytes(token)) :]
    return grammar.accepting


def is_next(tokenizer: Tokenizer, token_id: int, rest: bytes) -> bool:
    if token_id in tokenizer.special_ids:
        return False
    text = tokenizer.token_bytes(token_id)
    return bool(text) and rest.startswith(text)
