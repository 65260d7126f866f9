"""Ids to text piece by piece: what one decode of all gives, and never half a character."""

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from text_data import KINDS, load_tokenizer
from tokenizers import decoders, models

from mlxinfer.text import Tokenizer
from mlxinfer.text.stream import MAX_HELD, Detokenizer

PIECES = [
    "▁", "▁a", "b▁", "▁▁", " ", "c", "é", "##d", "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<s>",
    "Ġ", "Ċ", "Ã", "©", "日", "</w>", "", "<0xZZ>",
]  # fmt: skip
FUSED = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "llama": decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([*FUSED]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace and bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "strip each": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]),
    "replace fused": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    "pattern": decoders.Replace(tokenizers.Regex("[bc]"), "!"),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
}


def make(decoder) -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


def joined(detokenizer, ids):
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.integers(0, len(PIECES) + 1) | st.sampled_from([9, 10, 11]), max_size=12))
def test_detokenized_pieces_join_to_the_decoding(name, ids):
    tokenizer = make(DECODERS[name])
    whole = tokenizer.decode(ids)
    assert joined(Detokenizer(tokenizer), ids) == whole or "\ufffd" in whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_of_a_real_tokenizer(kind, data):
    tokenizer = load_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole, result = tokenizer.decode(ids), joined(Detokenizer(tokenizer), ids)
    assert result == whole or (kind == "sentencepiece" and "\ufffd" in whole)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(min_size=1))
def test_no_replacement_character_for_what_is_still_coming(kind, text):
    tokenizer = load_tokenizer(kind)
    text = text.replace("\ufffd", "").replace("▁", "")  # which SentencePiece takes for a space
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == text


def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("one boat lies on the water", add_special_tokens=False)
    for count, token_id in enumerate(ids, 1):
        detokenizer_shows = detokenizer.push(token_id)
        assert detokenizer_shows or tokenizer.decode(ids[:count]) == ""


def test_an_answer_that_goes_on_with_the_prompt_keeps_its_space():
    tokenizer = load_tokenizer("sentencepiece")
    prompt, answer = tokenizer.encode("The cat"), tokenizer.encode("sleeps")[1:]
    assert joined(Detokenizer(tokenizer), answer) == "sleeps"
    assert joined(Detokenizer(tokenizer, prompt_ids=prompt), answer) == " sleeps"


@pytest.mark.parametrize("name", DECODERS)
@given(
    prompt=st.lists(st.integers(0, len(PIECES) - 1), max_size=8),
    answer=st.lists(st.integers(0, len(PIECES) - 1), max_size=8),
)
def test_prompt_and_answer_texts_join_to_the_decoding(name, prompt, answer):
    tokenizer = make(DECODERS[name])
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    assume(whole.startswith(before))
    assume("\ufffd" not in whole)  # else bytes of both may be one character, or each be one
    assert joined(Detokenizer(tokenizer, prompt_ids=prompt), answer) == whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_an_answer_completes_the_character_that_the_prompt_began(kind, data):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(data.draw(st.text("a é→😀", max_size=8)), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:cut], ids[cut:]
    echoed = tokenizer.decode(prompt).rstrip("\ufffd")
    said = joined(Detokenizer(tokenizer, prompt_ids=prompt), answer)
    assert echoed + said == tokenizer.decode(ids)


def test_special_tokens_that_are_to_be_kept(tokenizer):
    start, end = map(tokenizer.piece_to_id, ("<|im_start|>", "<|im_end|>"))
    assert joined(Detokenizer(tokenizer, keep_ids=[end]), [start, end]) == "<|im_end|>"


@pytest.mark.parametrize("name", DECODERS)
def test_a_detokenizer_holds_a_bounded_window(name):
    """A window of ids is decoded for each, whatever a model repeats, and no more."""
    tokenizer = make(DECODERS[name])
    for pattern in ([9], [0], [5, 2], [9, 10, 11], [16]):
        detokenizer = Detokenizer(tokenizer)
        for number in range(200):
            detokenizer.push(pattern[number % len(pattern)])
            assert len(detokenizer._ids) <= 2 * MAX_HELD
