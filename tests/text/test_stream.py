"""One request's text: stops, reasoning and harmony channels, whatever pieces the tokens come in."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_data import DATA, KINDS, load_tokenizer, pieces, read_template, tokenizer_with

from mlxinfer.outputs import Delta, TextPart
from mlxinfer.text import ChatTemplate, ReasoningFormat, TextStream, Tokenizer, detect_reasoning
from mlxinfer.text.tokenizer import load_backend

THINK = ReasoningFormat("<think>", "</think>")
HARMONY = ReasoningFormat("", "", harmony=True)
MARKS = HARMONY.marks
parts = st.sampled_from([*MARKS, "analysis", "final", " to=f", "commentary", "a", " ", "<|", "to"])


def run(stream, ids, cuts=()):
    pushed = [stream.push(part) for part in pieces(ids, list(cuts))] + [stream.finish()]
    whole = Delta(parts=[part for parts in pushed for part in parts])
    return whole.text, whole.reasoning


def answer(tokenizer, text, **options):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return run(TextStream(tokenizer, **options), ids)


def split(splitter, parts):
    out = [splitter.push(part) for part in parts] + [splitter.finish()]
    return "".join(r for r, _ in out), "".join(t for _, t in out)


@pytest.fixture(scope="module")
def harmony():
    return tokenizer_with(tokens=MARKS)


WORDS = ["<think>", "</think>", "<", "</", "think>", "a", "ab", "STOP", "ST", "OP", "🙂", "é"]
words = st.sampled_from([*WORDS, " ", "\n"])


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.lists(words, max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
    reasoning=st.sampled_from([None, THINK]),
    min_tokens=st.sampled_from([0, 0, 5]),
)
def test_deltas_do_not_depend_on_the_pushes(kind, text, cuts, reasoning, min_tokens):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    options = {"stop": ["STOP", "Pa"], "min_tokens": min_tokens}
    one = TextStream(tokenizer, reasoning=reasoning, **options)
    two = TextStream(tokenizer, reasoning=reasoning, **options)
    assert run(one, ids) == run(two, ids, cuts)
    assert (one.stop_match, one.num_tokens) == (two.stop_match, two.num_tokens)
    if reasoning is None and one.stop_match is None:
        assert run(TextStream(tokenizer), ids)[0] == tokenizer.decode(ids)


def test_a_stop_string_across_tokens(tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    stream = TextStream(tokenizer, stop=["o th"])
    assert run(stream, ids, range(len(ids))) == ("one tw", "")
    assert stream.stopped
    assert stream.stop_match == "o th"
    assert "o th" in tokenizer.decode(ids[: stream.num_tokens])
    assert "o th" not in tokenizer.decode(ids[: stream.num_tokens - 1])
    assert not stream.push(ids)
    assert not stream.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_completed_by_token_number_min_tokens_counts(kind):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode("a b c d e", add_special_tokens=False)
    count = next(n for n in range(len(ids)) if "c" in tokenizer.decode(ids[:n]))
    at, after = (TextStream(tokenizer, stop=["c"], min_tokens=n) for n in (count, count + 1))
    assert run(at, ids)[0] == "a b "
    assert at.num_tokens == count
    assert run(after, ids)[0] == "a b c d e"


def test_only_leading_tags_are_reasoning() -> None:
    thoughts = [
        ("<think>\nhm\n</think>\n\nyes", ("yes", "hm")),
        ("<think></think>yes", ("yes", "")),
        ("\n<think>hm</think>yes", ("yes", "hm")),
        ("yes <think>hm</think>", ("yes <think>hm</think>", "")),
        ("<think>a</think>b<think>c</think>", ("b<think>c</think>", "a")),
        ("<think>endless", ("", "endless")),
        ("<think>half</thi", ("", "half</thi")),
        ("<thi", ("<thi", "")),
        ("  plain ", ("  plain ", "")),
        ("<think>a\n\n b\n</think>  c  ", ("c  ", "a\n\n b")),
        ("", ("", "")),
    ]
    for text, expected in thoughts:
        tokenizer = load_tokenizer("bytelevel")
        assert answer(tokenizer, text, reasoning=THINK) == expected


def test_the_prompt_may_have_opened_the_tag(tokenizer):
    def prompt(text):
        return tokenizer.encode(text, parse_special=True)

    opened, closed = prompt("x<think>\n"), prompt("x<think>\n\n</think>\n\n")
    text = "hm\n</think>\n\nyes"
    assert answer(tokenizer, text, reasoning=THINK, prompt_ids=opened) == ("yes", "hm")
    assert answer(tokenizer, text, reasoning=THINK, prompt_ids=closed)[1] == ""
    again = "<think>" + text  # some models repeat the tag
    assert answer(tokenizer, again, reasoning=THINK, prompt_ids=opened) == ("yes", "hm")


def test_tags_that_are_special_tokens_are_found_too():
    tokenizer = tokenizer_with(tokens=["[THINK]", "[/THINK]"])
    format = detect_reasoning(tokenizer)
    assert format == THINK  # the first pair that the tokenizer has
    tags = ReasoningFormat("[THINK]", "[/THINK]")
    assert answer(tokenizer, "[THINK]a[/THINK]b", reasoning=tags) == ("b", "a")
    assert answer(tokenizer, "[THINK]a[/THINK]b") == ("ab", "")


def test_stop_strings_are_looked_for_in_the_answer_only(tokenizer):
    text = "<think>a STOP b</think>yes STOP no"
    stream_text, reasoning = answer(tokenizer, text, reasoning=THINK, stop=["STOP"])
    assert (stream_text.strip(), reasoning) == ("yes", "a STOP b")


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"

CHANNELS = [
    (
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes<|return|>",
        ("yes", "hm"),
    ),
    ("<|channel|>final<|message|>yes", ("yes", "")),
    ("<|message|>yes", ("yes", "")),
    ("plain answer", ("plain answer", "")),
    ("<|channel|>analysis<|message|>cut off", ("", "cut off")),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assist", ("", "hm")),
    ("<|channel|>commentary<|message|>I look it up.<|end|>", ("I look it up.", "")),
    (CALL, ("<|start|>" + CALL, "")),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + CALL,
        ("<|start|>assistant" + CALL, "hm"),
    ),
    (" to=functions.f" + CALL.replace(" to=functions.f", ""), None),
]


def test_channels_of_harmony_are_reasoning_or_answer(harmony) -> None:
    for text, expected in CHANNELS:
        shown = answer(harmony, text, reasoning=HARMONY)
        if expected is None:  # the recipient may stand before the channel: all of it is kept
            assert shown == ("<|start|>" + text, "")
        else:
            assert shown == expected


@pytest.mark.parametrize("format", [THINK, HARMONY], ids=["tags", "harmony"])
def test_an_endless_repetition_is_linear(format):
    """Whatever a model repeats, the splitter does not scan all that came before once more."""
    began = time.process_time()
    for text in (" ", "\n", "<", "to=", "</think", "a", "<think>", "<|channel|>"):
        splitter = format.splitter()
        for _ in range(20_000):
            splitter.push(text)
        splitter.finish()
    assert time.process_time() - began < 10


def test_harmony_continues_the_header_in_the_prompt(harmony):
    prompt = harmony.encode(
        "<|start|>assistant<|channel|>analysis<|message|>hm, ", parse_special=True
    )
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert answer(harmony, text, reasoning=HARMONY, prompt_ids=prompt) == ("yes", "so")


@pytest.mark.parametrize("format", [THINK, HARMONY], ids=["tags", "harmony"])
@given(
    text=st.lists(parts | words, max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    tail=st.sampled_from(["", "x<think>\n", "<|start|>assistant<|channel|>analysis<|message|>"]),
)
def test_splitting_does_not_depend_on_the_pieces(format, text, cuts, tail):
    whole = split(format.splitter(tail), [text])
    assert split(format.splitter(tail), ["".join(p) for p in pieces(list(text), cuts)]) == whole
    assert split(format.splitter(tail), list(text)) == whole


def test_the_form_of_reasoning_is_read_off_the_tokenizer(harmony):
    assert detect_reasoning(harmony).harmony
    tagged = load_tokenizer("bytelevel")
    assert detect_reasoning(tagged) == THINK

    backend = load_backend(DATA / "bytelevel")
    spec = backend.to_str().replace("<think>", "<thunk>").replace("</think>", "</thunk>")
    plain = Tokenizer(type(backend).from_str(spec))
    assert detect_reasoning(plain) is None
    plain.template = ChatTemplate(read_template("bars_think"))
    assert detect_reasoning(plain) == THINK


def test_finishing_twice_gives_nothing_more(tokenizer):
    stream = TextStream(tokenizer, stop=["STOP"])
    stream.push(tokenizer.encode("S", add_special_tokens=False))
    assert stream.finish() == (TextPart("S"),)
    assert not stream.finish()
