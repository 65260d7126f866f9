"""Grammars that force calls: llguidance takes them, and they allow calls and nothing else."""

import json

import llguidance
import pytest
from text_data import load_tokenizer, tokenizer_with
from tool_samples import CONTROL, FORMATS, TOOLS, WRITERS, grammar_of

from mlxinfer.text import ReasoningFormat
from mlxinfer.text.tools import Toolbox
from mlxinfer.text.tools.lark import MAX_CALLS

BOX = Toolbox.of(TOOLS)
THINK = ReasoningFormat()
ONE = [("get_weather", {"city": 'Par"is é'})]
ALL = [("get_weather", {"city": "x", "days": 3, "units": "C"})]
TWO = [*ONE, ("now", {})]
NAMES = [name for name in WRITERS if name != "harmony_role"]  # which is read, not written
every_format = pytest.mark.parametrize("name", NAMES)

TAGS = ("<tool_call>", "</tool_call>")  # added tokens already

SPECIAL = tokenizer_with(tokens=[mark for mark in CONTROL if mark not in TAGS])
TOKENIZERS = {"text": load_tokenizer("bytelevel"), "special": SPECIAL}
GUIDES = {kind: llguidance.LLTokenizer(t.to_json()) for kind, t in TOKENIZERS.items()}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MARKED = [n for n in NAMES if n != "harmony" and FORMATS[n].marks[0] in CONTROL]


def allowed(kind, grammar, text):
    """Whether the grammar allows all of a text, and whether it may end there."""
    matcher = llguidance.LLMatcher(GUIDES[kind], grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False, parse_special=True)
    whole = matcher.try_consume_tokens(ids) == len(ids)
    return whole and matcher.is_accepting()


def written(name, calls):
    """As the templates write it, less what stands between the prompt and the first call."""
    text = WRITERS[name](calls).strip()
    if name == "harmony":
        return text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    return text.replace("'", '"')


@pytest.mark.alike
@pytest.mark.parametrize("kind", TOKENIZERS)
@every_format
def test_calls_are_allowed_and_text_is_not(kind, name):
    grammar = grammar_of("forced", TOKENIZERS[kind], FORMATS[name], BOX)
    for calls in (ONE, ALL, TWO):
        if name in ("lfm2", "tool_code", "llama", "python_list") and calls is not ALL:
            calls = [("get_weather", {"city": "x"}), *calls[1:]]
        text = written(name, calls)
        assert allowed(kind, grammar, text), (text, grammar)
        assert not allowed(kind, grammar, text + " and more")
        assert not allowed(kind, grammar, text[:-4])
    for text in ("", "Hello", written(name, [("other", {})])):
        assert not allowed(kind, grammar, text)


@every_format
def test_what_the_schema_forbids_is_not_allowed(name):
    grammar = grammar_of("forced", TOKENIZERS["text"], FORMATS[name], BOX)
    for arguments in ({"city": "x", "days": "many"}, {"days": 3}, {"city": "x", "units": "K"}):
        text = written(name, [("get_weather", arguments)])
        assert not allowed("text", grammar, text), text


@pytest.mark.alike
@every_format
def test_one_tool_and_one_call(name):
    tokenizer, known = TOKENIZERS["special"], FORMATS[name]
    named = grammar_of("forced", tokenizer, known, BOX, only="now")
    assert allowed("special", named, written(name, [("now", {})]))
    assert not allowed("special", named, written(name, ALL))
    single = grammar_of("forced", tokenizer, known, BOX, parallel=False)
    assert allowed("special", single, written(name, ALL))
    assert not allowed("special", single, written(name, [*ALL, *ALL]))


@every_format
def test_forced_calls_come_to_an_end(name):
    """A model that repeats itself may do so MAX_CALLS times, and then it is at its end."""
    grammar = grammar_of("forced", TOKENIZERS["special"], FORMATS[name], BOX)
    for count, fits in ((MAX_CALLS, True), (MAX_CALLS + 1, False)):
        text = written(name, ALL * count)
        assert allowed("special", grammar, text) is fits


def test_reasoning_may_come_first():
    tokenizer = TOKENIZERS["text"]
    grammar = grammar_of("forced", tokenizer, FORMATS["hermes"], BOX, reasoning=THINK)
    assert allowed("text", grammar, CALL)
    assert allowed("text", grammar, f"<think>\nhm {{}} <tool\n</think>\n\n{CALL}")
    assert not allowed("text", grammar, f"<think>hm</think>ok{CALL}")


def test_reasoning_that_the_prompt_has_closed_is_not_opened_again():
    tokenizer = TOKENIZERS["text"]
    text = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    prompt = tokenizer.encode(text, parse_special=True)
    hermes = FORMATS["hermes"]
    forced = grammar_of("forced", tokenizer, hermes, BOX, reasoning=THINK, prompt_ids=prompt)
    assert allowed("text", forced, CALL)
    assert not allowed("text", forced, f"<think>hm</think>\n{CALL}")


@pytest.mark.parametrize("thought", ["\n", "\nOkay, the user", "so far " * 80])
def test_reasoning_that_is_continued_comes_to_its_end(thought):
    tokenizer = TOKENIZERS["text"]
    text = f"<|im_start|>assistant\n<think>{thought}"
    prompt = tokenizer.encode(text, parse_special=True)
    hermes = FORMATS["hermes"]
    forced = grammar_of("forced", tokenizer, hermes, BOX, reasoning=THINK, prompt_ids=prompt)
    given = {"reasoning": THINK, "prompt_ids": prompt}
    either = grammar_of("calls_or_main", tokenizer, hermes, BOX, **given)
    for grammar in (forced, with_main(either)):
        assert allowed("text", grammar, f" hm</think>\n{CALL}")
        assert not allowed("text", grammar, CALL)
    answer = with_main(grammar_of("main", tokenizer, hermes, BOX, **given))
    assert allowed("text", answer, " hm</think>\nyes")
    assert not allowed("text", answer, "yes")


def with_main(grammar):
    return grammar.replace("@main", '"yes"')


@pytest.mark.parametrize("said", ["", "so far", "so far " * 80])
def test_harmony_continues_in_the_channel_of_the_prompt(said):
    header = "<|start|>assistant<|channel|>{}<|message|>"
    tokenizer, harmony = TOKENIZERS["special"], FORMATS["harmony"]
    channel = {
        name: tokenizer.encode(header.format(name) + said, parse_special=True)
        for name in ("analysis", "final")
    }
    reasoning = ReasoningFormat("", "", harmony=True)
    ended, final = "hm<|end|><|start|>assistant", "<|channel|>final<|message|>yes"

    def made(how, name):
        given = {"reasoning": reasoning, "prompt_ids": channel[name]}
        grammar = grammar_of(how, tokenizer, harmony, BOX, **given)
        return grammar and with_main(grammar)

    for how in ("main", "calls_or_main", "offered"):
        assert allowed("special", made(how, "analysis"), ended + final)
        assert not allowed("special", made(how, "analysis"), final)
    for how in ("main", "calls_or_main"):
        assert allowed("special", made(how, "final"), "yes")
        assert not allowed("special", made(how, "final"), final)
    assert made("offered", "final") is None


def test_harmony_reasons_in_its_channel():
    harmony = ReasoningFormat("", "", harmony=True)
    grammar = grammar_of(
        "forced", TOKENIZERS["special"], FORMATS["harmony"], BOX, reasoning=harmony
    )
    head = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert allowed("special", grammar, head + call)
    assert allowed("special", grammar, call)
    assert not allowed("special", grammar, head)


def test_json_is_written_in_one_way():
    grammar = grammar_of("forced", TOKENIZERS["text"], FORMATS["hermes"], BOX)
    spaced = CALL.replace("{}", json.dumps({}) + " ")
    assert allowed("text", grammar, CALL)
    assert not allowed("text", grammar, spaced)


@pytest.mark.parametrize("name", MARKED)
def test_strict_tools_leave_text_free_and_calls_not(name):
    grammar = grammar_of("offered", TOKENIZERS["special"], FORMATS[name], BOX, reasoning=THINK)
    call = written(name, ALL)
    for text in (
        "Hello {[<",
        call,
        f"I look.\n{call}",
        f"{call} Done.",
        f"<think>hm</think>{call}",
    ):
        assert allowed("special", grammar, text), text
    wrong = written(name, [("get_weather", {"city": "x", "days": "many"})])
    for text in (wrong, f"I look. {wrong}", written(name, [("other", {})])):
        assert not allowed("special", grammar, text), text


def test_strict_tools_in_harmony():
    harmony = ReasoningFormat("", "", harmony=True)
    grammar = grammar_of(
        "offered", TOKENIZERS["special"], FORMATS["harmony"], BOX, reasoning=harmony
    )
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    answer = "<|channel|>final<|message|>Hello"
    for text in (call, thought + call, thought + said + call, thought + answer, answer):
        assert allowed("special", grammar, text), text
    assert not allowed("special", grammar, call.replace("{}", '{"x": 1}'))


def test_strict_cannot_be_where_calls_have_no_token():
    for name in ("llama", "tool_code"):
        assert grammar_of("offered", TOKENIZERS["special"], FORMATS[name], BOX) is None
    assert grammar_of("offered", TOKENIZERS["text"], FORMATS["lfm2"], BOX) is None


def test_many_parameters_make_no_huge_grammar():
    properties = {f"p{i}": {"type": "boolean"} for i in range(300)}
    tools = Toolbox.of([{"name": "f", "parameters": {"properties": properties}}])
    for name in ("qwen_xml", "python_list"):
        grammar = grammar_of("forced", TOKENIZERS["text"], FORMATS[name], tools)
        assert len(grammar) < 300_000
        text = written(name, [("f", {"p7": True, "p200": False})])
        text = text.replace("True", "true").replace("False", "false")
        assert allowed("text", grammar, text)
