"""The benchmark of grammars, small: its numbers are there and its documents are what they claim."""

import jsonschema
import pytest

from tests.bench.bench_parts import check
from tests.bench.grammar import run
from tests.bench.grammar_cases import CASES, END, large_tokenizer


def test_documents_satisfy_their_schemas() -> None:
    for case in CASES:
        for document in case.documents:
            jsonschema.Draft202012Validator(case.schema).validate(document)


def test_a_large_tokenizer_has_its_size_and_round_trips() -> None:
    made = large_tokenizer(5000)
    assert made.get_vocab_size() == 5000
    for text in ('{"a": [1, 2]}', "Hé, 世界\n\n", "x" * 50):
        assert made.decode(made.encode(text).ids) == text
    assert made.encode(END).ids == [4999]


@pytest.mark.slow
def test_a_small_run() -> None:
    report = run(small=True, repeats=2)
    check(report)
    for times in report.data["mask_us"].values():
        assert 0 < times["later"]["p50"] <= times["later"]["p99"]
