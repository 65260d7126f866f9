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
from tool_templates import CALLS as FAMILIES
from tool_templates import FRAME, each, gemma, template_of

from mlxinfer.outputs import CallStatus, TextPart, ToolCallDelta, joined_calls, merged
from mlxinfer.text import GENERIC, ChatTemplate, ReasoningFormat, Tokenizer, detect_tools
from mlxinfer.text.tools import Toolbox, ToolParser, forced_grammar
from mlxinfer.text.tools.infer import reads_back, template_format, written_calls
from mlxinfer.text.tools.template_format import TemplateFormat

CALLS = [
    ("get_weather", {"city": 'São Paulo, "east"', "days": 3}),
    ("get_weather", {"city": "two\nlines <b>", "units": "C"}),
    ("now", {}),
]
BOX = Toolbox.of(TOOLS)
HARMONY = ReasoningFormat("", "", harmony=True)
GEMMA = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}


def tokenizer_with(source, tokens=()):
    backend = tokenizers.Tokenizer.from_str(load_tokenizer("bytelevel").to_json())
    backend.add_special_tokens(list(tokens))
    tokenizer = Tokenizer(backend)
    tokenizer.template = ChatTemplate(source, variables={"bos_token": "", "eos_token": ""})
    return tokenizer


@cache
def tokenizer_of(name):
    return tokenizer_with(template_of(name))


READ = {name: detect_tools(tokenizer_of(name)) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_are_read_off_their_templates(name):
    written = written_calls(tokenizer_of(name))
    assert isinstance(READ[name], TemplateFormat)
    assert READ[name].name == "template"
    assert reads_back(READ[name], written)


@pytest.mark.parametrize("template", ["chatml_tools", "brackets"])
def test_committed_templates(template):
    tokenizer = tokenizer_with(read_template(template))
    assert reads_back(detect_tools(tokenizer), written_calls(tokenizer))


# -- formats by hand: on these published templates reading fails -----------------------------------


def test_gpt_oss_writes_headers_that_its_template_does_not():
    tokenizer = tokenizer_with(read_template("channels"), HARMONY.marks)
    assert detect_tools(tokenizer).name == "harmony"
    text = "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert calls_of(parsed(template_format(written_calls(tokenizer)), text)) == []
    assert calls_of(parsed(detect_tools(tokenizer), text)) == [("now", {})]


@pytest.mark.parametrize(("name", "marks"), GEMMA.items())
def test_the_values_of_gemmas_calls_are_no_json(name, marks):
    tokenizer = tokenizer_with(FRAME.replace("CALLS", each(gemma(*marks))))
    assert template_format(written_calls(tokenizer)) is None
    assert detect_tools(tokenizer).name == name


def test_the_template_of_lfm2_writes_no_calls():
    tokenizer = tokenizer_with(FRAME.replace("CALLS", ""), ["<|tool_call_start|>"])
    assert written_calls(tokenizer) is None
    assert detect_tools(tokenizer).name == "lfm2"


def test_the_template_of_kimi_k2_fails_on_calls():
    """It appends to a list, which the sandbox forbids, as transformers does."""
    calls = "{%- set all = [] %}{%- set _ = all.append(1) %}" + FAMILIES["kimi"]
    tokenizer = tokenizer_with(FRAME.replace("CALLS", calls))
    assert written_calls(tokenizer) is None
    assert detect_tools(tokenizer).name == "kimi"


def test_a_template_may_ask_for_calls_and_write_none():
    tokenizer = tokenizer_with(FRAME.replace("CALLS", "") + "{# <tool_call> #}")
    assert detect_tools(tokenizer).name == "hermes"


def rendered(name, calls):
    """What the template writes for these calls."""
    made = [
        {"id": f"functions.{n}:{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    template = tokenizer_of(name).template
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    whole = template.render([user, answer], tools=TOOLS, add_generation_prompt=False)
    before = template.render([user], tools=TOOLS)
    return whole.removeprefix(before).removesuffix("<|im_end|>\n")


def parsed(format, text, cuts=()):
    parser = ToolParser(format, BOX)
    texts = ["".join(piece) for piece in pieces(list(text), list(cuts))]
    return merged([*(p for text in texts for p in parser.push(text)), *parser.finish()])


def calls_of(parts):
    found = joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
    return [(call.name, json.loads(call.arguments)) for call in found]


def text_of(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 500), max_size=8), count=st.integers(1, 3))
def test_calls_are_read_in_any_pieces(name, cuts, count):
    calls = CALLS[: 1 if name == "llama" else count]
    text = rendered(name, calls)
    parts = parsed(READ[name], text, cuts)
    assert calls_of(parts) == calls, text
    assert not text_of(parts).strip().removeprefix("<|START_THINKING|><|END_THINKING|>")


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("bare_objects", "llama")])
def test_text_around_calls_stays(name):
    text = rendered(name, CALLS[:1]).removeprefix("<|START_THINKING|><|END_THINKING|>")
    parts = parsed(READ[name], f"Let me look.\n{text}\nDone.")
    assert calls_of(parts) == CALLS[:1]
    assert text_of(parts).split() == ["Let", "me", "look.", "Done."]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(
    text=st.text(alphabet='<>|_{}[]":,\n azNAME=/', max_size=80),
    cuts=st.lists(st.integers(0, 80)),
)
def test_whatever_comes_nothing_is_lost(name, text, cuts):
    begin = (*READ[name].begins, *READ[name].bare)[0]
    parts = parsed(READ[name], begin + text, cuts)
    if not any(isinstance(part, ToolCallDelta) for part in parts):
        assert text_of(parts).split() == (begin + text).split()
    assert parts == parsed(READ[name], begin + text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_off_is_no_text(name):
    text = rendered(name, CALLS[:1])
    parts = parsed(READ[name], text[: text.index("Paulo")])
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
    tokenizer = tokenizer_with(FRAME.replace("CALLS", before + loop + after))
    found = detect_tools(tokenizer)
    written = written_calls(tokenizer)
    assert found is GENERIC or (written is not None and reads_back(found, written))


GUIDE = llguidance.LLTokenizer(load_tokenizer("bytelevel").to_json())


def allows(grammar, tokenizer, text):
    matcher = llguidance.LLMatcher(GUIDE, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_is_written_as_the_template_writes_it(name):
    tokenizer = tokenizer_of(name)
    grammar = forced_grammar(tokenizer, READ[name], BOX)
    text = rendered(name, [CALLS[0]]).removeprefix("<|START_THINKING|><|END_THINKING|>").strip()
    if name == "lfm2":  # its template writes Python's strings, and the grammar JSON's
        text = text.replace(f"'{CALLS[0][1]['city']}'", js(CALLS[0][1]["city"]))
    assert not allows(grammar, tokenizer, "Hello")
    if name == "text_arguments":
        text = f'<call>{{"name": "get_weather", "arguments": {js(CALLS[0][1])}}}</call>'
    assert allows(grammar, tokenizer, text), text
    assert not allows(grammar, tokenizer, text.replace("get_weather", "get_whatever"))
