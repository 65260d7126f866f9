"""Where the tokens of a completion stand in its text, whatever the tokenizer does to spaces."""

import pytest
from text.text_data import KINDS, load_tokenizer

from mlxinfer.core import TokenLogprobs
from mlxinfer.server.apis.usage import CompletionLogprobs, LogprobsWriter

SURE = TokenLogprobs(0.0, ())


def written(kind: str, ids: list[int], offset: int = 0) -> CompletionLogprobs:
    writer = LogprobsWriter(load_tokenizer(kind), offset)
    for token_id in ids:
        writer.add(token_id, SURE)
    return writer.take()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["The cat sleeps", " The cat", "x", "cat\nsat", "é→ø"])
def test_tokens_of_an_echoed_prompt_stand_where_they_are(kind: str, text: str) -> None:
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(text)
    found = written(kind, ids)
    ends = [*found.text_offset[1:], len(text)]
    for token_id, spelled, begin, end in zip(
        ids, found.tokens, found.text_offset, ends, strict=True
    ):
        if token_id not in tokenizer.special_ids and not spelled.startswith("bytes:"):
            assert text[begin:end] == spelled[len(spelled) - (end - begin) :]
    assert all(begin <= end for begin, end in zip(found.text_offset, ends, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_where_the_prompt_ends(kind: str) -> None:
    tokenizer = load_tokenizer(kind)
    ids = [i for i in tokenizer.encode(" sleeps") if i not in tokenizer.special_ids]
    found = written(kind, ids, offset=7)
    assert found.text_offset[0] == 7
    text = "The cat" + "".join(found.tokens)
    assert found.text_offset[-1] + len(found.tokens[-1]) == len(text)
