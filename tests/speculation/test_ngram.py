"""N-gram proposals: what stood after the longest repetition, and nothing of other namespaces."""

import random

import numpy as np
import pytest
from engine.pictures import picture, placed
from hypothesis import given
from hypothesis import strategies as st
from speculation.following import following

from mlxinfer.engine.batch import Sequence
from mlxinfer.speculation import ngram
from mlxinfer.speculation.controller import Key
from mlxinfer.speculation.ngram import MIN_MATCH, NgramProposer, find_longest

texts = st.lists(st.integers(0, 3), min_size=3, max_size=60)


class Scores:
    """Collects scores."""

    def __init__(self) -> None:
        self.held: list[tuple[Key, bool]] = []

    def __call__(self, sequence: Sequence, key: Key, held: bool) -> None:
        self.held.append((key, held))


def with_scores(scores: Scores) -> NgramProposer:
    source = NgramProposer()
    source.score = scores
    return source


def proposer() -> NgramProposer:
    return with_scores(Scores())


def proposed(source: NgramProposer, sequence: Sequence, depth: int = 4) -> list[int]:
    return list(source.propose([sequence], [depth])[0].token_ids)


def longest_by_hand(text: list[int], suffix: list[int]) -> int:
    result = 0
    for place in range(1, len(text) + 1):
        length = 0
        while length < min(place, len(suffix)) and (
            text[place - length - 1] == suffix[-length - 1]
        ):
            length += 1
        result = max(result, length)
    return result


@given(text=texts, suffix=st.lists(st.integers(0, 3), min_size=1, max_size=16))
def test_the_longest_match_is_found(text: list[int], suffix: list[int]) -> None:
    place, length = find_longest(np.array(text, np.int32), np.array(suffix, np.int32))
    assert length == longest_by_hand(text, suffix)
    assert length == 0 or text[place - length : place] == suffix[-length:]


@pytest.mark.parametrize(
    ("ids", "answer", "found"),
    [
        ([5, 6, 7, 8, 9, 1, 2], [5, 6], [7, 8, 9, 1]),
        ([5, 6, 1, 5, 6, 2, 5, 6], [], [2, 5, 6, 2]),  # the last of equal matches
        ([4, 5, 6, 1, 9, 5, 6, 2, 4, 5, 6], [], [1, 9, 5, 6]),  # a longer one before a later one
        ([1, 2, 3, 1, 2, 3, 1, 2], [], [3, 1, 2, 3]),  # a repetition goes on beyond its end
        ([1, 2, 3, 4, 2], [], []),  # fewer tokens than the least match
    ],
)
def test_what_followed_is_proposed(ids: list[int], answer: list[int], found: list[int]) -> None:
    assert proposed(proposer(), following(ids, answer)) == found


def test_proposals_end_before_a_picture() -> None:
    ids, pictures = placed([5, 6, 1, 2], picture(1, 1, 2), [3, 4])
    source = proposer()
    assert proposed(source, following(ids, [5, 6], pictures=pictures)) == [1, 2]
    assert proposed(source, following(ids, [1, 2], pictures=pictures)) == []
    assert proposed(source, following(ids, [7, 7], pictures=pictures)) == [], "the ids of features"
    assert proposed(source, following([*ids, 7, 7])) == [3, 4, 7, 7], "the same as text"


@given(text=texts, seed=st.integers(0, 99))
def test_following_equals_beginning_anew_where_a_match_goes_on(text: list[int], seed: int) -> None:
    """Any pieces; a kept match may be shorter than the longest one, and its tokens agree."""
    rng, source = random.Random(seed), proposer()
    sequence = following(text[:2])
    while len(sequence.token_ids) < len(text):
        sequence.token_ids += text[len(sequence.token_ids) :][: rng.randint(1, 5)]
        tokens = proposed(source, sequence)
        match = source._followed[sequence]
        if not tokens:
            assert longest_by_hand(sequence.token_ids[:-1], sequence.token_ids[-16:]) < MIN_MATCH
            continue
        assert match.length
        place, ids = match.place, sequence.token_ids
        assert ids[place - MIN_MATCH : place] == ids[-MIN_MATCH:]
        assert tokens[0] == ids[place]


@given(st.data())
def test_guesses_are_scored_by_what_came(data: st.DataObject) -> None:
    text = data.draw(texts)
    scores = Scores()
    source = with_scores(scores)
    sequence = following(text[:2])
    expected = []
    for token_id in text[2:]:
        guess = proposed(source, sequence, 1)
        sequence.token_ids.append(token_id)
        expected += [guess[0] == token_id] if guess else []
    proposed(source, sequence)
    assert [held for _, held in scores.held] == expected


def test_tokens_in_flight_are_taken_as_guessed() -> None:
    source = proposer()
    sequence = following([5, 6, 7, 8, 9, 5, 6])
    keys = source.outlook([sequence], 2)[sequence]
    sequence.num_pending = 1
    assert len(source.outlook([sequence], 2)[sequence]) == 2
    assert source.outlook([sequence], 2)[sequence][0][1] >= keys[0][1]


@pytest.mark.parametrize(
    ("owner", "salt", "shared"),
    [("a", None, True), ("b", None, False), (None, None, False), ("a", "x", False)],
)
def test_answers_are_proposed_to_the_same_owner_and_namespace_alone(
    owner: str | None, salt: str | None, shared: bool
) -> None:
    source = proposer()
    source.end(following([1], [40, 41, 42, 43, 44], owner="a"))
    other = following([2, 40, 41], owner=owner, salt=salt)
    assert proposed(source, other) == ([42, 43, 44] if shared else [])


def test_of_others_whole_answers_alone_are_proposed() -> None:
    """No prompts, nothing across the end of an answer, and nothing that was not to be kept."""
    source = proposer()
    for prompt, answer, speculate in (
        ([1], [40, 41, 42], True),
        ([1], [50, 51, 52], True),
        ([60, 61, 62, 63], [1, 2, 3], True),
        ([1], [70, 71, 72, 73], False),
    ):
        source.end(following(prompt, answer, speculate=speculate))
    for ids, result in (([41, 42], []), ([40, 41], [42]), ([60, 61], []), ([70, 71], [])):
        assert proposed(source, following([3, *ids])) == result, ids


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "KEPT", 100)
    monkeypatch.setattr(ngram, "NAMESPACES", 3)
    source = proposer()
    for owner in "abcde":
        for i in range(20):
            source.end(following([1], range(100 * i, 100 * i + 30), owner=owner))
    assert source.stats()["tokens_kept"] <= 3 * 2 * 100 + 31
    assert proposed(source, following([1, 1900, 1901], owner="e")) == [1902, 1903, 1904, 1905]
    assert proposed(source, following([1, 0, 1], owner="e")) == []
    assert proposed(source, following([1, 1900, 1901], owner="a")) == []


def test_a_search_goes_back_so_far_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "SEARCHED", 10)
    far = following([1, 2, 3, *range(50, 70), 1, 2])
    near = following([*range(50, 70), 1, 2, 3, 1, 2])
    assert proposed(proposer(), far) == []
    assert proposed(proposer(), near, 1) == [3]


def test_searches_of_one_step_are_bounded() -> None:
    source = NgramProposer(searches=2)
    rows = [following([5, 6, 7, 5, 6]) for _ in range(5)]
    result = [list(ids) for ids, _ in source.propose(rows, [1] * 5)]
    assert result == [[7], [7], [], [], []]
    result = [list(ids) for ids, _ in source.propose(rows, [1] * 5)]
    assert result == [[7], [7], [7], [7], []]
