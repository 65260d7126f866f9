"""A bound on the tokens of reasoning: what the masks allow, alone and around another grammar."""

import random

import numpy as np
import pytest
from grammar_tools import compiler_of, tokenizer_of
from text.text_data import tokenizer_with

from mlxinfer.grammar import spec
from mlxinfer.grammar.guidance import Guidance
from mlxinfer.grammar.reasoning_budget import BudgetRule, ReasoningBudget
from mlxinfer.outputs import Delta
from mlxinfer.text import ReasoningFormat, TextStream, Tokenizer

TAGS = ReasoningFormat()
HARMONY = ReasoningFormat("", "", harmony=True)
MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]


def masks_of(grammar: ReasoningBudget, size: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    masks = np.zeros((1, -(-size // 32)), dtype=np.uint32)
    ReasoningBudget.fill_masks([grammar], [0], masks)
    return np.unpackbits(masks.view(np.uint8), bitorder="little")[:size].astype(bool)


def answer(
    tokenizer: Tokenizer, grammar: ReasoningBudget, wanted: list[int], rng: random.Random, n: int
) -> list[int]:
    """Tokens of an answer that follows `wanted` as far as it may, then anything that is allowed."""
    ids: list[int] = []
    ends = tokenizer.eos_token_ids
    for _ in range(n):
        mask = masks_of(grammar, tokenizer.vocab_size)
        mask[list(tokenizer.special_ids)] &= mask.sum() < 3
        if wanted and mask[wanted[0]]:
            token = wanted.pop(0)
        else:
            token = rng.choice([i for i in np.flatnonzero(mask).tolist() if i not in ends])
        grammar.accept(token)
        fork = grammar.fork()
        assert (
            masks_of(fork, tokenizer.vocab_size) == masks_of(grammar, tokenizer.vocab_size)
        ).all()
        ids.append(token)
        if grammar.finished:
            break
    return ids


def split(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> Delta:
    stream = TextStream(tokenizer, reasoning=TAGS, prompt_ids=prompt)
    return Delta(parts=[*stream.push(ids), *stream.finish()])


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_ends_at_its_bound_and_the_answer_goes_on(opened: bool) -> None:
    limits = [1, 2, 7, 40]
    for limit in limits:
        tokenizer = tokenizer_of("demo")
        rng = random.Random(limit)
        rule = BudgetRule.of(tokenizer, TAGS)
        prefix = "<think>" if opened else ""
        grammar = ReasoningBudget(rule, limit, prefix, None)
        head = [] if opened else tokenizer.encode("<think>", add_special_tokens=False)
        thought = tokenizer.encode(" a b c d" * 20, add_special_tokens=False)
        ids = answer(tokenizer, grammar, [*head, *thought], rng, 60)
        prompt = tokenizer.encode(prefix, add_special_tokens=False)
        delta = split(tokenizer, prompt, ids)
        assert delta.text, "the answer follows"
        inside = ids[len(head) : len(head) + limit]
        assert delta.reasoning == tokenizer.decode(inside).strip()
        assert tuple(ids[len(head) + limit :][: len(rule.closing)]) == rule.closing


def test_a_shorter_thought_and_none_are_left_alone() -> None:
    tokenizer = tokenizer_of("demo")
    rule = BudgetRule.of(tokenizer, TAGS)
    for text in ("<think>a</think>Hello <think>again and again", "Hello there <think>and on"):
        grammar = ReasoningBudget(rule, 6, "", None)
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert masks_of(grammar, tokenizer.vocab_size).all()
            assert grammar.accepting
            grammar.accept(token)
    closed = ReasoningBudget(rule, 1, "<think></think>", None)
    for token in tokenizer.encode("any text at all", add_special_tokens=False):
        assert masks_of(closed, tokenizer.vocab_size).all()
        closed.accept(token)


@pytest.mark.parametrize("seed", range(4))
def test_the_grammar_of_the_answer_holds_after_the_bound(seed: int) -> None:
    tokenizer = tokenizer_of("demo")
    compiler = compiler_of()
    guidance = Guidance(tokenizer, TAGS, vocab_size=tokenizer.vocab_size, end_ids=())
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    form = spec.choice(["yes", "no"])
    inner = compiler.start(guidance.after_reasoning(form, prompt))
    grammar = guidance.bounded(inner, 5, prompt)
    assert isinstance(grammar, ReasoningBudget)
    thought = tokenizer.encode(" one two three four five six", add_special_tokens=False)
    ids = answer(tokenizer, grammar, thought, random.Random(seed), 80)
    assert split(tokenizer, prompt, ids).text in ("yes", "no"), f"seed {seed}"


def test_no_further_message_of_reasoning_begins_in_harmony() -> None:
    tokenizer = tokenizer_with(tokens=MARKS)
    rule = BudgetRule.of(tokenizer, HARMONY)
    grammar = ReasoningBudget(rule, 4, "<|start|>assistant", None)

    def push(text: str) -> None:
        for token in tokenizer.encode(text, add_special_tokens=False, parse_special=True):
            assert masks_of(grammar, tokenizer.vocab_size)[token], text
            grammar.accept(token)

    push("<|channel|>analysis<|message|>")
    for _ in range(4):
        grammar.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    (end,) = np.flatnonzero(masks_of(grammar, tokenizer.vocab_size))
    assert tokenizer.id_to_piece(int(end)) == "<|end|>"
    push("<|end|><|start|>assistant<|channel|>")
    mask = masks_of(grammar, tokenizer.vocab_size)
    assert not mask[rule.reopening]
    assert mask.sum() == tokenizer.vocab_size - 1
    push("final<|message|>It is said to be analysis.")
