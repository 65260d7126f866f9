"""Texts far past a context are found without encoding all of them; texts that fit never are."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer import hub
from mlxinfer.text import Tokenizer, tokenizer
from mlxinfer.text.tokenizer import exceeds_tokens

TOKENIZER = Tokenizer.from_folder(hub.resolve("demo"))


class Counting:
    """An encoder that notes how much it was given."""

    def __init__(self) -> None:
        self.chars = 0

    def encode_plain(self, text: str) -> list[int]:
        self.chars += len(text)
        return TOKENIZER.encode_plain(text)


@pytest.fixture(autouse=True, scope="module")
def no_text_is_short_enough_to_be_counted() -> Iterator[None]:
    before, tokenizer.EXACT_CHARS = tokenizer.EXACT_CHARS, 0
    yield
    tokenizer.EXACT_CHARS = before


@given(
    texts=st.lists(st.text("ab é🙂\n ", min_size=1, max_size=40), min_size=1, max_size=3),
    times=st.integers(1, 300),
    room=st.integers(1, 300),
)
def test_a_text_that_fits_is_never_called_too_long(texts: list[str], times: int, room: int) -> None:
    long = [text * times for text in texts]
    if least := exceeds_tokens(TOKENIZER.encode_plain, long, room):
        assert sum(len(TOKENIZER.encode_plain(text)) for text in long) >= least > room


def test_the_rest_of_an_endless_text_is_not_looked_at() -> None:
    encoder = Counting()
    assert exceeds_tokens(encoder.encode_plain, ["a b " * 1_000_000], 1000)
    assert encoder.chars < 100_000


def test_a_usual_text_is_not_looked_at_at_all() -> None:
    encoder = Counting()
    assert not exceeds_tokens(encoder.encode_plain, ["a b " * 1000], 1000)
    assert encoder.chars == 0


def test_control_tokens_count_as_what_they_become() -> None:
    """A text of them is long, and fits all the same."""
    encoder = Counting()
    text = "<|im_start|>" * 1900

    def encode(text: str) -> list[int]:
        encoder.chars += len(text)
        return TOKENIZER.encode(text, add_special_tokens=False, parse_special=True)

    assert not exceeds_tokens(encode, [text], 1000)
    assert encoder.chars == len(text)
    assert exceeds_tokens(encode, [text], 900)
