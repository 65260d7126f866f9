"""String methods that ignore marks equal the plain ones, and no mark is lost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.text.marked_text import call_ignoring_marks, ignores_marks, without_marks

MARKS = "\U000f0000\U000f0001\U000f0002"  # that opens, that closes, that keeps apart
marked = st.text("ab \n" + MARKS, max_size=12)
CALLS = [
    *((name, args) for name in ("strip", "lstrip", "rstrip") for args in ((), ("\n",), ("ab",))),
    *((name, args) for name in ("removeprefix", "removesuffix") for args in (("a",), ("ab",))),
    *((name, args) for name in ("startswith", "endswith") for args in (("ab",), (("a", " "),))),
    *((name, args) for name in ("split", "rsplit") for args in (("a",), ("ab",), ("\n", 1))),
]


@pytest.mark.parametrize(("name", "args"), CALLS)
@given(text=marked)
def test_a_method_overlooks_marks_and_keeps_them(name, args, text):
    result = call_ignoring_marks(MARKS, text, name, args)
    expected = getattr(without_marks(text, MARKS), name)(*args)
    if isinstance(expected, bool):
        assert result is expected
        return
    pieces = result if isinstance(result, list) else [result]
    assert [without_marks(p, MARKS) for p in pieces] == (
        expected if isinstance(expected, list) else [expected]
    )
    kept = [char for char in "".join(pieces) if char in MARKS]
    before = [char for char in text if char in MARKS]
    assert len(kept) == len(before)
    assert all(now in (char, MARKS[2]) for now, char in zip(kept, before, strict=True))


def test_a_mark_stays_with_what_it_touches():
    opened, closed, apart = MARKS
    tag = f"{opened}<t>{closed}"
    assert call_ignoring_marks(MARKS, f" {tag} ", "strip", ()) == tag
    assert call_ignoring_marks(MARKS, f"a\n{tag}\nb", "split", ("\n",)) == ["a", tag, "b"]
    assert call_ignoring_marks(MARKS, f"a{tag}\nb", "split", ("<t>\n",)) == [
        f"a{opened}",
        f"{closed}b",
    ]
    assert call_ignoring_marks(MARKS, f"a{tag}b{tag}", "split", ("<t>",)) == [
        f"a{apart}",
        f"{apart}b{apart}",
        apart,
    ]


def test_other_methods_are_left_alone():
    assert not ignores_marks("upper", ())
    assert not ignores_marks("split", ())
    assert not ignores_marks("split", (None, 1))


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_many_marks_take_no_longer_than_other_text(name, args):
    began = time.process_time()
    for text in (MARKS * 40_000 + "a", "a\n" + MARKS * 40_000, f"{MARKS}a\n" * 20_000):
        call_ignoring_marks(MARKS, text, name, args)
    assert time.process_time() - began < 20  # seconds, where squares would take many minutes
