"""Stop strings against a plain definition of what they mean."""

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st
from text_data import pieces

from mlxinfer.text import StopMatcher

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 1000), max_size=10)


def expected(text, stops):
    """(visible text, stop string): the first to be complete, of those the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@given(text=texts, stops=stop_lists, cuts=cuts)
def test_stop_matching_equals_its_definition_for_any_pieces(text, stops, cuts):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push("".join(part)) for part in pieces(list(text), cuts))
    shown += matcher.finish()
    assert (shown, matcher.matched) == expected(text, stops)


@given(text=texts, stops=stop_lists)
def test_no_more_is_held_than_could_become_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for count, char in enumerate(text, 1):
        shown += matcher.push(char)
        if matcher.matched is not None:
            break
        held = text[len(shown) : count]
        assert text.startswith(shown)
        starts = [text[:count][-n:] for n in range(1, count + 1)]
        longest = max((len(s) for s in starts if any(x.startswith(s) for x in stops)), default=0)
        assert len(held) == longest


def test_a_match_does_not_count_while_it_is_disabled():
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", enabled=False) == "ab"[: 2 - len(matcher._held)]
    assert matcher.matched is None
    matcher.push("xa")
    matcher.push("b")
    assert matcher.matched == "ab"
    assert matcher.push("more") == ""


class CountedText(str):
    """A text that counts how often it is looked at."""

    looks: ClassVar = 0
    __hash__ = str.__hash__


def counting(method):
    def look(*args):
        CountedText.looks += 1
        return method(*args)

    return look


for name in ("__lt__", "__gt__", "__eq__", "__len__", "startswith"):
    setattr(CountedText, name, counting(getattr(str, name)))


def test_a_token_looks_at_few_of_many_stop_strings():
    matcher = StopMatcher([CountedText(f"stop {i}") for i in range(10_000)])
    CountedText.looks = 0
    for _ in range(10):
        assert matcher.push("a token") == "a token"
    assert matcher.push(" then stop 12345") == " then "
    assert matcher.matched == "stop 1"
    assert CountedText.looks < 2000
