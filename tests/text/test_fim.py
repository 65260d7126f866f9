"""Prompts with a gap: which tokens divide them, and in which order the texts stand."""

from text_data import load_tokenizer, tokenizer_with

from mlxinfer.text import fim_tokens
from mlxinfer.text.fim import _MARKS


def test_the_gap_is_at_the_end_of_the_prompt() -> None:
    for marks in _MARKS:
        tokenizer = tokenizer_with(tokens=[*(mark for mark in marks if mark), "<|fim_pad|>"])
        prefix, suffix, middle = marks
        tokens = fim_tokens(tokenizer)
        ids = tokens.prompt_ids(tokenizer, "def f(x):", "return y\n")
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if middle is None:
            assert text == f"{suffix}return y\n{prefix}def f(x):"
        else:
            assert text == f"{prefix}def f(x):{suffix}return y\n{middle}"
        assert tokenizer.piece_to_id("<|fim_pad|>") in tokens.end_ids
        assert tokenizer.eos_token_ids <= tokens.end_ids


def test_control_tokens_in_the_texts_stay_text():
    tokenizer = tokenizer_with(tokens=_MARKS[0])
    tokens = fim_tokens(tokenizer)
    ids = tokens.prompt_ids(tokenizer, "a<|fim_suffix|>b", "c<|im_end|>")
    assert [i for i in ids if i in tokenizer.special_ids] == [
        tokens.prefix,
        tokens.suffix,
        tokens.middle,
    ]
    assert "a<|fim_suffix|>b" in tokenizer.decode(ids, skip_special_tokens=False)


def test_empty_texts_and_other_files():
    tokenizer = tokenizer_with(tokens=[*_MARKS[1], "<file_sep>"])
    tokens = fim_tokens(tokenizer)
    assert tokens.prompt_ids(tokenizer, "", "", files=[("a.py", "A<file_sep>")]) == [
        tokenizer.piece_to_id("<file_sep>"), *tokenizer.encode_plain("a.py\nA<file_sep>\n"),
        tokens.prefix, tokens.suffix, tokens.middle,
    ]  # fmt: skip


def test_models_without_marks_of_a_gap_fill_none():
    assert fim_tokens(load_tokenizer("bytelevel")) is None
    assert fim_tokens(tokenizer_with(tokens=["<|fim_prefix|>", "<|fim_suffix|>"])) is None
