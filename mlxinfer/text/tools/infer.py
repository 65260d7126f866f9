"""Reads the tool-call format off a chat template, from conversations that the template renders.

The conversations of `samples.py` have one call, or two, or a plain answer instead. The difference
between their renderings is how the model writes its calls. The places of names, keys and values
show the marks around them. A format counts only if it reads the rendered calls back, names and
arguments alike.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...outputs import TextPart, ToolCallDelta, joined_calls
from ..forms import KEYS, NAMES, TOOLS
from ..reasoning import TAGS
from ..samples import ID_STYLES, ONE, PLAIN, RESULT, SHORT_IDS, TWO, Call, samples_of
from ..tokenizer import Tokenizer
from .cores import (
    ARGUMENT_OBJECT,
    NAME,
    CallCore,
    NamedCore,
    ObjectCore,
    ParameterCore,
    PythonCore,
    are_type_words,
)
from .format import ToolFormat, ToolParser
from .marks import COUNT, ID, first_word
from .schema import Toolbox
from .template_format import CallSyntax, TemplateFormat

_UNIT = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_/]{2,40}\]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls as a template writes them."""

    one: str  # the text of ONE
    two: str | None  # the text of TWO; None: the template writes no two calls in one message
    ids: tuple[str, ...]  # the ids of the calls
    short_ids: bool = False  # the template refuses ids of more than nine letters and digits

    def without_ids(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.ids)), ID, text)


def written_calls(tokenizer: Tokenizer) -> WrittenCalls | None:
    """Return how the tokenizer's chat template writes calls; None where it writes none."""
    assert tokenizer.template is not None
    samples = samples_of(tokenizer.template)
    plain = samples["plain"]
    if plain is None or PLAIN not in plain:
        return None
    for place, style in enumerate(ID_STYLES):
        one, two = (
            _call_text(tokenizer, plain, samples[f"{key}{place}"]) for key in ("one", "two")
        )
        if one is None or not _has(one, ONE):
            continue
        if RESULT not in (samples[f"result{place}"] or ""):
            return None
        if two is not None and not _has(two, TWO):
            two = None
        ids = tuple(style(name, index) for index, name in enumerate(NAMES))
        return WrittenCalls(one, two, ids, short_ids=place == SHORT_IDS)
    return None


def _call_text(tokenizer: Tokenizer, plain: str, whole: str | None) -> str | None:
    if whole is None:
        return None
    text = _difference(plain, whole).strip()
    for start, end in TAGS:  # some templates write an empty thought
        if text.startswith(start) and end in text:
            text = text.partition(end)[2]
    ends = [tokenizer.id_to_piece(i) for i in tokenizer.eos_token_ids]
    text = next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)
    return text.strip()


def reads_back(format: ToolFormat, written: WrittenCalls) -> bool:
    """Whether a format reads the rendered calls as they were, and finds no text beside them."""
    wanted = [(written.one, ONE), *([] if written.two is None else [(written.two, TWO)])]
    return all(_parsed(format, text) == calls for text, calls in wanted)


def template_format(written: WrittenCalls) -> TemplateFormat | None:
    """Return the format that these calls show; None where they show none of a kind known here."""
    for kind in (_object, _named, _python, _parameters):
        format = kind(written)
        if format is not None and reads_back(format, written):
            return format
    return None


def _difference(plain: str, whole: str) -> str:
    """Return the part of `whole` that `plain` does not have, in whole marks."""
    left, right = _UNIT.findall(plain), _UNIT.findall(whole)
    shorter = min(len(left), len(right))
    first = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    rest = shorter - first
    last = next((i for i in range(rest) if left[-1 - i] != right[-1 - i]), rest)
    return "".join(right[first : len(right) - last])


def _has(text: str, calls: Sequence[Call]) -> bool:
    words = [word for name, a in calls for word in (name, *map(str, a.values()))]
    return all(word in text for word in words)


def _parsed(format: ToolFormat, text: str) -> list[Call] | None:
    """Return the calls that a format finds in a text, None if it finds text beside them."""
    parser = ToolParser(format, Toolbox.of(TOOLS))
    parts = [*parser.push(text), *parser.finish()]
    if any(isinstance(part, TextPart) and part.text.strip() for part in parts):
        return None
    calls = joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
    return [(call.name, json.loads(call.arguments)) for call in calls if call.complete]


# -- marks --------------------------------------------------------------------------------------


def _split(head: str, gap: str | None, tail: str) -> CallSyntax:
    """Return the marks around calls."""
    if gap is None:
        return CallSyntax((head, tail), ("", ""), single=True)
    end = _common_start(tail, gap)
    rest = gap.removeprefix(end)
    begin = _common_end(head, rest)
    section = (head.removesuffix(begin), tail.removeprefix(end))
    return CallSyntax(section, (begin, end), rest.removesuffix(begin))


def _common_start(one: str, two: str) -> str:
    """Return the longest beginning of both that ends where a mark of `one` does."""
    size = _num_equal(one, two)
    while not _is_edge(one, size):
        size -= 1
    return one[:size]


def _common_end(one: str, two: str) -> str:
    """Return the longest end of both that begins where a mark of `one` does."""
    start = len(one) - _num_equal(one[::-1], two[::-1])
    while start < len(one) and not (start or one[0].isspace() or one[0] in "<["):
        start += 1
    while not _is_edge(one, start):
        start += 1
    return one[start:]


def _num_equal(one: str, two: str) -> int:
    shorter = min(len(one), len(two))
    return next((i for i in range(shorter) if one[i] != two[i]), shorter)


def _is_edge(text: str, place: int) -> bool:
    """Whether a mark can begin or end here: at a space, a bracket, or an end of the text."""
    if place in (0, len(text)):
        return True
    before, after = text[place - 1], text[place]
    return before.isspace() or after.isspace() or before in ">]" or after in "<["


# -- the kinds of calls -------------------------------------------------------------------------

Span = tuple[int, int]


def _spans(
    written: WrittenCalls, find: Callable[[str, Call], Span | None]
) -> tuple[list[tuple[str, Span]], CallSyntax] | None:
    """Return the text and the place of each call of the longest rendering, and what is around."""
    text, calls = (written.one, ONE) if written.two is None else (written.two, TWO)
    spans: list[Span] = []
    for call in calls:
        span = find(text, call)
        if span is None or (spans and span[0] < spans[-1][1]):
            return None
        spans.append(span)
    (first, *_, last) = (*spans, spans[-1])
    around = [text[: first[0]], text[first[1] : last[0]], text[last[1] :]]
    head, gap, tail = (written.without_ids(samples) for samples in around)
    return [(text, span) for span in spans], _split(head, gap if len(calls) > 1 else None, tail)


def _built(syntax: CallSyntax, core: CallCore, written: WrittenCalls) -> TemplateFormat | None:
    with suppress(ValueError):
        return TemplateFormat(syntax, core, short_ids=written.short_ids)
    return None


def _objects(text: str, start: int = 0) -> Iterator[tuple[Span, dict[str, Any]]]:
    decoder = json.JSONDecoder()
    for brace in re.compile(r"\{").finditer(text, start):
        with suppress(ValueError):
            value, end = decoder.raw_decode(text, brace.start())
            yield (brace.start(), end), value


def _is_arguments(value: object, arguments: dict[str, Any]) -> bool:
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    return value == arguments


def _object(written: WrittenCalls) -> TemplateFormat | None:
    def find(text: str, call: Call) -> Span | None:
        for span, value in _objects(text):
            if call[0] in value.values() and any(_is_arguments(v, call[1]) for v in value.values()):
                return span
        return None

    spans = _spans(written, find)
    if spans is None:
        return None
    places, syntax = spans
    patterns = [
        _pattern(text[a:b], call, written)
        for (text, (a, b)), call in zip(places, TWO, strict=False)
    ]
    if len(set(patterns)) > 1:  # a counter
        patterns = [re.sub(r'(?<=")\d+(?=")', ID, pattern) for pattern in patterns]
    text, (start, end) = places[0]
    value = json.loads(text[start:end])
    name_key = next(key for key, item in value.items() if item == ONE[0][0])
    key = next(key for key, item in value.items() if _is_arguments(item, ONE[0][1]))
    pattern = patterns[0]
    if len(set(patterns)) > 1 or ARGUMENT_OBJECT not in pattern:
        pattern = f'{{"{name_key}": "{NAME}", "{key}": {ARGUMENT_OBJECT}}}'
    return _built(syntax, ObjectCore(pattern, name_key, key), written)


def _pattern(text: str, call: Call, written: WrittenCalls) -> str:
    """Return the text of a JSON object with its name, its arguments and its id replaced."""
    for span, value in _objects(text, 1):
        if value == call[1]:
            text = text[: span[0]] + ARGUMENT_OBJECT + text[span[1] :]
            break
    return written.without_ids(text).replace(call[0], NAME)


def _named(written: WrittenCalls) -> TemplateFormat | None:
    def find(text: str, call: Call) -> Span | None:
        start = text.find(call[0])
        ends = [span[1] for span, value in _objects(text, start) if value == call[1]]
        return (start, ends[0]) if start >= 0 and ends else None

    spans = _spans(written, find)
    if spans is None:
        return None
    places, syntax = spans
    pairs = zip(places, TWO, strict=False)
    after = [text[a + len(call[0]) : text.index("{", a)] for (text, (a, _)), call in pairs]
    return _built(syntax, NamedCore(_counted(*map(written.without_ids, after))), written)


def _counted(one: str, two: str | None = None) -> str:
    """Return the text after a name, with COUNT where numbers differ between the two calls."""
    if two is None or one == two:
        return one
    return re.sub("[0-9]+", COUNT, one)


def _python(written: WrittenCalls) -> TemplateFormat | None:
    def find(text: str, call: Call) -> Span | None:
        spans = re.search(rf"{call[0]}\(\s*{KEYS[0]}\s*=[^()]*\)", text)
        return None if spans is None else spans.span()

    spans = _spans(written, find)
    return None if spans is None else _built(spans[1], PythonCore(), written)


def _parameters(written: WrittenCalls) -> TemplateFormat | None:
    marks = _parameter_marks(written.one)
    if marks is None:
        return None
    after_name, begin, middle, end, types = marks
    after_name = written.without_ids(after_name)
    if written.two is not None:
        at = written.two.index(TWO[1][0]) + len(TWO[1][0])
        other = written.two[at : written.two.index(KEYS[0], at)].removesuffix(begin)
        after_name = _counted(after_name, written.without_ids(other))

    def find(text: str, call: Call) -> Span | None:
        start = text.find(call[0])
        value = text.find(str(call[1][KEYS[1]]), start)
        after = value + len(str(call[1][KEYS[1]]))
        return (start, after + len(end)) if text.startswith(end, after) else None

    spans = _spans(written, find)
    if spans is None:
        return None
    syntax = spans[1]
    stops = (first_word(syntax.call[1], syntax.between, syntax.call[0]), syntax.section[1])
    words = tuple(word for word in (stops[0], first_word(stops[1])) if word)
    if not words or not all(map(first_word, (begin, middle[0], end))):
        return None
    core = ParameterCore(after_name, begin, middle, end, words, types)
    return _built(syntax, core, written)


def _parameter_marks(text: str) -> tuple[str, str, tuple[str, str], str, tuple[str, str]] | None:
    """Return the texts after a name, before a key, after it, after a value; the words for types."""
    name, arguments = ONE[0]
    words = [name, *(str(word) for pair in arguments.items() for word in pair)]
    pieces = []
    place = 0
    for word in words:
        start = text.find(word, place)
        if start < 0:
            return None
        pieces.append(text[place:start])
        place = start + len(word)
    _, head, middle, gap, other = pieces
    begin = _common_end(head, gap)
    begin = begin[max(begin.rfind("<"), begin.rfind("["), 0) :]  # its last mark alone
    end = gap.removesuffix(begin)
    after_name = head.removesuffix(begin)
    if middle == other:
        return after_name, begin, (middle, ""), end, ("", "")
    start = _num_equal(middle, other)
    stop = _num_equal(middle[::-1], other[::-1])
    while start and middle[start - 1].isalpha():
        start -= 1
    while stop and middle[-stop].isalpha():
        stop -= 1
    string, number = middle[start : len(middle) - stop], other[start : len(other) - stop]
    if not are_type_words(string, number):
        return None
    middles = (middle[:start], middle[len(middle) - stop :])
    return after_name, begin, middles, end, (string, number)
