"""Masks are filled on the engine's thread: a slow grammar ends its answer, and no other."""

import random
import time

import numpy as np
import pytest
from grammar.grammar_tools import PADDING, allowed, compiler_of, matches, tokenizer_of

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import GrammarSpec, compiled
from mlxinfer.grammar.compiled import (
    ALLOWED_S,
    MAX_EXCESS_FIXED_S,
    MAX_EXCESS_S,
    CompiledGrammar,
    MaskTimeLimit,
    TokenGrammar,
)
from mlxinfer.grammar.spec import choice, json_object, json_schema, lark, regex

SIZE = tokenizer_of("demo").vocab_size + PADDING
AMBIGUOUS = ("start: s\ns: s s s | s s | /./ |", "start: s\ns: s s s s | s s s | s s | /[a-z ]/ |")
ARITHMETIC = 'start: e\ne: e "+" t | e "-" t | t\nt: t "*" f | f\nf: /[0-9]+/ | "(" e ")"'
MANY_OPTIONAL = json_schema(
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(1000)},
        "additionalProperties": False,
    }
)


def test_excess_mask_time_shrinks_with_fast_masks() -> None:
    limit = MaskTimeLimit()
    for _ in range(1000):
        limit.add(ALLOWED_S)
    assert not limit.is_timed_alone
    limit.add(MAX_EXCESS_S)  # a slow one, as at the beginning of a large schema
    assert limit.is_timed_alone
    assert limit.problem is None
    for _ in range(20):
        limit.add(0.0)
    assert not limit.is_timed_alone


def test_an_exceeded_mask_time_limit_stays_exceeded() -> None:
    for seconds, count in ((MAX_EXCESS_S + 2 * ALLOWED_S, 1), (3 * ALLOWED_S, 6)):
        limit = MaskTimeLimit()
        for _ in range(count):
            assert not limit.is_exceeded
            limit.add(seconds)
        for _ in range(1000):
            limit.add(0.0)
        assert "make it simpler" in str(limit.problem)


def random_answer(spec: GrammarSpec, seed: int, limit: int = 60) -> tuple[float, str | None]:
    """CPU seconds of the slowest mask or token of a drawn answer, and why it failed."""
    rng, slowest = random.Random(seed), 0.0
    try:
        grammar = compiler_of().start(spec)
    except InvalidRequestError as error:
        return 0.0, str(error)
    for _ in range(limit):
        began_s = time.thread_time()
        ids = allowed(grammar, SIZE)
        slowest = max(slowest, time.thread_time() - began_s)
        if grammar.problem is not None or not ids:
            break
        began_s = time.thread_time()
        grammar.accept(rng.choice(ids))
        slowest = max(slowest, time.thread_time() - began_s)
        if grammar.finished:
            break
    return slowest, grammar.problem


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_grammar_is_refused_or_ends_before_it_is_slow(text: str) -> None:
    for seed in range(3):
        slowest, problem = random_answer(lark(text), seed)
        assert slowest < 0.1
        assert "oo many items" in str(problem)


@pytest.mark.parametrize(
    "spec",
    [
        MANY_OPTIONAL,
        json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}),
        lark(ARITHMETIC),
        choice([f"{i} of {i % 7}" for i in range(10_000)]),
    ],
    ids=["optional", "open", "arithmetic", "choice"],
)
def test_what_is_only_large_is_answered(spec: GrammarSpec) -> None:
    for seed in range(3):
        _, problem = random_answer(spec, seed)
        assert problem is None


def test_any_character_may_be_in_a_choice() -> None:
    for text in ("a\x7f", "\x00b", '"\\', "\u2028", "\ufeff"):
        assert matches(choice([text]), text)


def test_all_of_many_choices_are_possible() -> None:
    texts = [f"{i}th" for i in range(10_000)]
    assert all(matches(choice(texts), text) for text in ("0th", "77th", "777th", "9999th"))
    assert not matches(choice(texts), "10000th")


def masks_of(grammars: list[TokenGrammar]) -> np.ndarray:
    masks = np.zeros((len(grammars), -(-SIZE // 32)), dtype=np.uint32)
    TokenGrammar.fill_masks(grammars, range(len(grammars)), masks)
    return masks


def test_an_answer_that_took_too_long_gets_no_more_time() -> None:
    slow, other = (compiler_of().start(spec) for spec in (json_object(), regex("[ab]+")))
    before = masks_of([slow, other])
    slow._mask_time.add(2 * MAX_EXCESS_FIXED_S)
    after = masks_of([slow, other])
    assert "CPU time" in str(slow.problem)
    assert other.problem is None
    assert before[0].any()
    assert not after[0].any(), "filled for nothing"
    assert (before[1] == after[1]).all()


@pytest.mark.parametrize("count", [2, 2 * compiled.PARALLEL_FROM])
def test_the_time_of_masks_counts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Masks filled in parallel have no time of their own: the next ones are filled one by one."""
    monkeypatch.setattr(compiled, "ALLOWED_S", 0.0)
    monkeypatch.setattr(compiled, "TIMED_ALONE_FROM_S", 0.0)
    grammars = [compiler_of().start(json_object()) for _ in range(count)]
    masks = masks_of(grammars)
    assert all(grammar._mask_time.is_timed_alone for grammar in grammars)
    assert (masks_of(grammars) == masks).all()
    assert all(grammar._mask_time.excess_s > 0.0 for grammar in grammars)
    assert all(grammar.problem is None for grammar in grammars)


def test_the_time_of_following_a_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ALLOWED_S", 0.0)
    grammar = compiler_of().start(regex("a+"))
    grammar.accept(tokenizer_of("demo").encode_plain("a")[0])
    assert grammar._mask_time.excess_s > 0.0


def test_a_lexer_of_its_own_is_made_only_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CompiledGrammar(compiler_of().table(), lark(AMBIGUOUS[0]))
    grammar, built = made.start(), []
    monkeypatch.setattr(made, "matcher", lambda: built.append(1))
    for _ in range(60):
        ids = allowed(grammar, SIZE)
        if grammar.problem is not None:
            break
        grammar.accept(ids[-1])
    assert "oo many items" in str(grammar.problem)
    assert built == [], "compiled again on the engine's thread, to fail in the same way"


def test_a_lexer_that_takes_long_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CompiledGrammar(compiler_of().table(), regex("[ab]+"))
    grammar = made.start()
    monkeypatch.setattr(compiled, "LEXER_ERROR", "satisfy")
    monkeypatch.setattr(made, "matcher_s", 1.0)
    monkeypatch.setattr(made, "matcher", lambda: pytest.fail("it takes a second"))
    grammar.accept(tokenizer_of("demo").encode_plain("x")[0])
    assert grammar.problem is not None
