"""Ids to text piece by piece: exactly what one decode of all gives, and never half a character."""

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from text_data import KINDS, load_tokenizer
from tokenizers import decoders, models

from mlxinfer.text import Detokenizer, Tokenizer
from mlxinfer.text.stream import decoder_steps

PIECES = [
    "▁",
    "▁a",
    "b▁",
    "▁▁",
    " ",
    "c",
    "é",
    "##d",
    "<0x41>",
    "<0xE2>",
    "<0x82>",
    "<0xAC>",
    "<s>",
]
PIECES += ["Ġ", "Ċ", "Ã", "©", "日", "</w>", "", "<0xZZ>"]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "llama": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace and bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "strip each": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]),
    "strip the end": decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 0, 2)]),
    "replace fused": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    "replace across": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁c", "!")]),
    "pattern": decoders.Replace(tokenizers.Regex("[bc]"), "!"),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
}
HELD = {"replace across", "pattern", "word pieces", "suffixes"}


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
@given(
    ids=st.lists(st.integers(0, len(PIECES) + 1) | st.sampled_from([9, 10, 11]), max_size=12),
    skip=st.booleans(),
)
def test_detokenized_pieces_join_to_the_decoding(name, ids, skip):
    tokenizer = make(DECODERS[name])
    if name == "strip the end":  # the library panics where there is less to strip from
        ids = [PIECES.index("é"), PIECES.index("c"), *ids]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert joined(detokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", DECODERS)
def test_which_decoders_have_an_incremental_form(name):
    assert (decoder_steps(make(DECODERS[name]).decoder_spec) is None) == (name in HELD)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_of_a_real_tokenizer(kind, data):
    tokenizer = load_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert joined(Detokenizer(tokenizer), ids) == tokenizer.decode(ids)


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
    if name == "strip the end":
        prompt = [*prompt, PIECES.index("é")]  # of what it strips, some could be the prompt's
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    assume(whole.startswith(before))
    assume("\ufffd" not in whole)  # else bytes of both may be one character, or each be one
    assert joined(Detokenizer(tokenizer, prompt_ids=prompt), answer) == whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_echoed_prompt_and_answer_join_to_the_text_of_all_ids(kind, data):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(data.draw(st.text("a é→😀", max_size=8)), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:cut], ids[cut:]
    detokenizer = Detokenizer(tokenizer)
    echoed = "".join(map(detokenizer.push, prompt)) + detokenizer.end_prompt()
    assert "\ufffd" not in echoed
    said = joined(Detokenizer(tokenizer, prompt_ids=prompt), answer)
    assert echoed + said == joined(Detokenizer(tokenizer), ids)


def test_special_tokens_that_are_to_be_kept(tokenizer):
    start, end = map(tokenizer.piece_to_id, ("<|im_start|>", "<|im_end|>"))
    assert joined(Detokenizer(tokenizer, keep_ids=[end]), [start, end]) == "<|im_end|>"


@pytest.mark.parametrize("name", ["byte level", "llama", "metaspace", "none", "strip the end"])
def test_work_is_linear(name, monkeypatch):
    """Each token is looked up once and no step ever sees more text than came in."""
    tokenizer = make(DECODERS[name])
    looked_up = []
    monkeypatch.setattr(tokenizer, "id_to_piece", lambda i: looked_up.append(i) or PIECES[i])
    monkeypatch.setattr(tokenizer, "decode", None)
    detokenizer = Detokenizer(tokenizer)
    sizes = []
    for step in detokenizer._steps:
        feed = step.feed
        monkeypatch.setattr(step, "feed", lambda t, feed=feed: sizes.append(len(t)) or feed(t))
    count = 2000
    for pattern in ([9], [0], [5, 2], [9, 10, 11]):
        looked_up.clear(), sizes.clear()
        for number in range(count):
            detokenizer.push(pattern[number % len(pattern)])
        assert len(looked_up) == count
        assert sum(sizes) <= 8 * count * len(detokenizer._steps)
