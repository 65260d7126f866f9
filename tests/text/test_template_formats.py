"""Tool-call formats that are read off chat templates, known ones and others."""

import json
import os
from functools import cache, partial

import pytest
import text_data
from hypothesis import given, settings
from hypothesis import strategies as st
from text_data import read_template
from tool_samples import TOOLS
from tool_templates import CALLS as FAMILIES
from tool_templates import FRAME, each, gemma, template_of

from mlxinfer.outputs import ToolCallDelta, joined_calls, merged
from mlxinfer.text import GENERIC, ReasoningFormat, detect_tools
from mlxinfer.text.tools import Toolbox, ToolParser
from mlxinfer.text.tools.infer import reads_back, template_format, written_calls
from mlxinfer.text.tools.template_format import TemplateFormat

BOX = Toolbox.of(TOOLS)
HARMONY = ReasoningFormat("", "", harmony=True)
GEMMA = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}

tokenizer_with = partial(text_data.tokenizer_with, bos_token="", eos_token="")


@cache
def tokenizer_of(name):
    return tokenizer_with(template_of(name))


READ = {name: detect_tools(tokenizer_of(name)) for name in FAMILIES}


def test_formats_are_read_off_their_templates() -> None:
    for name in FAMILIES:
        written = written_calls(tokenizer_of(name))
        assert isinstance(READ[name], TemplateFormat)
        assert READ[name].name in ("template", name)
        assert reads_back(READ[name], written)


@pytest.mark.parametrize("template", ["chatml_tools", "brackets"])
def test_calls_that_committed_templates_write_are_read_back(template):
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


def parsed(format, text):
    parser = ToolParser(format, BOX)
    return merged([*parser.push(text), *parser.finish()])


def calls_of(parts):
    result = joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
    return [(call.name, json.loads(call.arguments)) for call in result]


MARKS = st.sampled_from(
    ["<call>", "</call>", "[", "]", '{"', '"', ": ", "\n", " ", "(", "=", "<b c="]
)
VALUES = st.sampled_from(
    [
        "{{- f.name }}", "{{- f.arguments | tojson }}", "{{- f.arguments }}", "{{- c.id }}",
        "{{- c | tojson }}", "{{- f | tojson }}", "{{- loop.index }}", "{{- '{' }}", "{{- '}' }}",
    ]
)  # fmt: skip
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
    format = detect_tools(tokenizer)
    written = written_calls(tokenizer)
    assert format is GENERIC or (written is not None and reads_back(format, written))
