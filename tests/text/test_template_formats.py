"""Tool-call formats that are read off chat templates, known ones and others."""

import json
import os
from functools import cache

import llguidance
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_data import load_tokenizer, pieces, read_template
from tool_samples import TOOLS, js
from tool_templates import FRAME, KNOWN, OTHERS, template_of

from mlxinfer.outputs import CallStatus, TextPart, ToolCallDelta, joined_calls, merged
from mlxinfer.text import GENERIC, ChatTemplate, Tokenizer, detect_tools, tool_format
from mlxinfer.text.tools import FORMATS, Toolbox, ToolParser, forced_grammar
from mlxinfer.text.tools.detect import read_format
from mlxinfer.text.tools.probe import reads_back, template_format, written_calls
from mlxinfer.text.tools.template_format import TemplateFormat

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
CALLS = [
    ("get_weather", {"city": 'São Paulo, "east"', "days": 3}),
    ("get_weather", {"city": "two\nlines <b>", "units": "C"}),
    ("now", {}),
]
BOX = Toolbox.of(TOOLS)


@cache
def tokenizer_of(name):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(load_tokenizer("bytelevel").to_json()))
    if name == "harmony":
        tokenizer._backend.add_special_tokens(list(HARMONY))
        tokenizer = Tokenizer(tokenizer._backend)
    tokenizer.template = ChatTemplate(template_of(name))
    return tokenizer


READ = {name: template_format(written_calls(tokenizer_of(name))) for name in OTHERS}


@pytest.mark.parametrize("name", KNOWN)
def test_each_known_format_is_found_from_its_template_alone(name):
    """By the calls that it writes: neither tokens nor words of the template are looked at."""
    written = written_calls(tokenizer_of(name))
    found = read_format(written, [])
    assert reads_back(tool_format(name), written)
    assert reads_back(found, written)
    others = [known.name for known in FORMATS if reads_back(known, written)]
    assert others == [name]
    assert detect_tools(tokenizer_of(name)).name == name


@pytest.mark.parametrize(
    ("template", "name"),
    [("chatml_tools", "hermes"), ("brackets", "mistral"), ("channels", "harmony")],
)
def test_committed_templates(template, name):
    tokenizer = tokenizer_of.__wrapped__("harmony" if name == "harmony" else "hermes")
    tokenizer.template = ChatTemplate(
        read_template(template), variables={"bos_token": "", "eos_token": ""}
    )
    assert reads_back(tool_format(name), written_calls(tokenizer))


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_read_off_their_templates(name):
    found = detect_tools(tokenizer_of(name))
    assert reads_back(found, written_calls(tokenizer_of(name)))
    if name != "bare_objects":  # Llama's, too
        assert isinstance(found, TemplateFormat)


def rendered(name, calls):
    """What the template writes for these calls."""
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    template = tokenizer_of(name).template
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    whole = template.render([user, answer], tools=TOOLS, add_generation_prompt=False)
    before = template.render([user], tools=TOOLS)
    return whole.removeprefix(before).removesuffix("<|im_end|>\n")


def parsed(name, text, cuts=()):
    parser = ToolParser(READ[name], BOX)
    texts = ["".join(piece) for piece in pieces(list(text), list(cuts))]
    return merged([*(p for text in texts for p in parser.push(text)), *parser.finish()])


def calls_of(parts):
    found = joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
    return [(call.name, json.loads(call.arguments)) for call in found]


def text_of(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 500), max_size=8), count=st.integers(1, 3))
def test_calls_are_read_in_any_pieces(name, cuts, count):
    calls = CALLS[:count]
    text = rendered(name, calls)
    parts = parsed(name, text, cuts)
    assert calls_of(parts) == calls, text
    assert not text_of(parts).strip().removeprefix("<|START_THINKING|><|END_THINKING|>")


@pytest.mark.parametrize("name", [n for n in OTHERS if n != "bare_objects"])
def test_text_around_calls_stays(name):
    text = rendered(name, CALLS[:1]).removeprefix("<|START_THINKING|><|END_THINKING|>")
    parts = parsed(name, f"Let me look.\n{text}\nDone.")
    assert calls_of(parts) == CALLS[:1]
    assert text_of(parts).split() == ["Let", "me", "look.", "Done."]


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=40)
@given(
    text=st.text(alphabet='<>|_{}[]":,\n azNAME=/', max_size=80),
    cuts=st.lists(st.integers(0, 80)),
)
def test_whatever_comes_nothing_is_lost(name, text, cuts):
    begin = (*READ[name].begins, *READ[name].bare)[0]
    parts = parsed(name, begin + text, cuts)
    if not any(isinstance(part, ToolCallDelta) for part in parts):
        assert text_of(parts).split() == (begin + text).split()
    assert parts == parsed(name, begin + text)


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_is_cut_off_is_no_text(name):
    text = rendered(name, CALLS[:1])
    parts = parsed(name, text[: text.index("Paulo")])
    pieces = [part for part in parts if isinstance(part, ToolCallDelta)]
    if name != "text_arguments":  # its arguments are known when they are complete
        assert pieces[-1].status is CallStatus.CUT
        assert not text_of(parts).strip().removeprefix("<|START_THINKING|><|END_THINKING|>")


MARKS = st.sampled_from(
    ["<call>", "</call>", "[", "]", '{"', '"', ": ", "\n", " ", "(", "=", "<b c="]
)
VALUES = st.sampled_from(
    [
        *("{{- f.name }}", "{{- f.arguments | tojson }}", "{{- f.arguments }}", "{{- c.id }}"),
        *(
            "{{- c | tojson }}",
            "{{- f | tojson }}",
            "{{- loop.index }}",
            "{{- '{' }}",
            "{{- '}' }}",
        ),
    ]
)
PAIRS = st.tuples(MARKS, MARKS, MARKS).map(
    lambda m: (
        f"{{%- for k, v in f.arguments.items() %}}{m[0]}{{{{- k }}}}{m[1]}{{{{- v }}}}{m[2]}"
        "{%- endfor %}"
    )
)
FRAGMENTS = st.lists(MARKS | VALUES | PAIRS, max_size=8).map("".join)
LITERALS = st.lists(MARKS, max_size=3).map("".join)


@settings(max_examples=int(os.environ.get("MLXINFER_TEMPLATES", "30")))
@given(before=LITERALS, calls=FRAGMENTS, after=LITERALS)
def test_every_template_has_a_format(before, calls, after):
    """However calls are written: the format found reads them, or it is one for any template."""
    loop = f"{{%- for c in m.tool_calls %}}{{%- set f = c.function %}}{calls}{{%- endfor %}}"
    tokenizer = tokenizer_of.__wrapped__("hermes")
    tokenizer.template = ChatTemplate(FRAME.replace("CALLS", before + loop + after))
    found = detect_tools(tokenizer)
    written = written_calls(tokenizer)
    assert found is GENERIC or (written is not None and reads_back(found, written))


GUIDE = llguidance.LLTokenizer(load_tokenizer("bytelevel").to_json())


def allows(grammar, tokenizer, text):
    matcher = llguidance.LLMatcher(GUIDE, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", OTHERS)
def test_a_forced_call_is_written_as_the_template_writes_it(name):
    tokenizer = tokenizer_of(name)
    grammar = forced_grammar(tokenizer, READ[name], BOX)
    text = rendered(name, [CALLS[0]]).removeprefix("<|START_THINKING|><|END_THINKING|>").strip()
    assert not allows(grammar, tokenizer, "Hello")
    if name == "text_arguments":
        text = f'<call>{{"name": "get_weather", "arguments": {js(CALLS[0][1])}}}</call>'
    assert allows(grammar, tokenizer, text), text
    assert not allows(grammar, tokenizer, text.replace("get_weather", "get_whatever"))
