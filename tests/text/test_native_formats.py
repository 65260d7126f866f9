"""Thoughts and calls in formats that no template shows whole: any cut, one answer."""

import json

import jsonschema
import llguidance
import pytest
from models.runs import every
from text_data import answer_read, pieces, tokenizer_with

from mlxinfer.outputs import TextPart, ToolCallDelta, joined_calls
from mlxinfer.text import TextStream, ToolUse, detect_reasoning, detect_tools, tool_format
from mlxinfer.text.tokenizer_files import OWN_TEMPLATES
from mlxinfer.text.tools.use import AnswerGrammar
from tests.seeds import seeded

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}}
PROPERTIES["stops"] = {
    "type": "array",
    "items": {"type": "object", "properties": PROPERTIES.copy()},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("forecast", "book.train")
]
TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
MUSE_TOKENS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
MUSE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}"
    "{{ ' to=self' if m.reasoning_content }}<|message|>{{ m.content }}<|eom|><|eot|>{% endfor %}"
    "{# <atem:function_calls> #}"
)
CDATA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    '{{ m.content }}{% for c in m.tool_calls or [] %}<function name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}<param name="{{ k }}">{{ v }}</param>'
    "{% endfor %}</function>{% endfor %}<|end|>{% endfor %}"
)
K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
NS = "]<]minimax[>["
JSON_CALL = (
    '<tool_call>\n{"name": "forecast", "arguments": {"city": "Bergen", "days": 2}}\n</tool_call>'
)
BERGEN = ("forecast", {"city": "Bergen", "days": 2})


def atem(name, **values):
    given = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in values.items())
    return (
        f'<atem:function_calls>\n<atem:invoke name="{name}">\n{given}</atem:invoke>\n'
        "</atem:function_calls>"
    )


def frames(number, name, **values):
    given = "".join(
        f'<|open|>argument key="{k}" type="{"string" if isinstance(v, str) else "number"}"<|sep|>'
        f"{v}<|close|>argument<|sep|>"
        for k, v in values.items()
    )
    return f'<|open|>call tool="{name}" index="{number}"<|sep|>{given}<|close|>call<|sep|>'


def tag(key, value):
    return f"{NS}<{key}>{value}{NS}</{key}>"


def read(tokenizer, text, prompt="", tools=TOOLS):
    """Return (calls, text, thought), which are the same for every cut; the first is checked."""
    format, reasoning = detect_tools(tokenizer), detect_reasoning(tokenizer)
    use = ToolUse.plan(tokenizer, format, tools, "auto") if tools else None
    ids, prompt_ids = (
        tokenizer.encode(item, add_special_tokens=False, parse_special=True)
        for item in (text, prompt)
    )
    answers = []
    for cuts in (range(len(ids)), range(0, len(ids), 7), ()):
        parser = use.parser() if use else None
        stream = TextStream(tokenizer, reasoning=reasoning, tools=parser, prompt_ids=prompt_ids)
        answers.append(answer_read(stream, pieces(ids, list(cuts))))
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize("tokens", [MUSE_TOKENS, ()])
def test_muse_says_to_whom_each_message_is(tokens):
    tokenizer = tokenizer_with(MUSE, tokens)
    thought, start = " to=self<|message|>Rain?<|eom|>", "<|start|>assistant"
    said = f"{thought}{start} to=user<|message|>It rains.<|eot|>"
    assert read(tokenizer, said, start) == ([], "It rains.", "Rain?")
    assert read(tokenizer, said, start, tools=None) == ([], "It rains.", "Rain?")
    calls = (
        f"{thought}{start} to=forecast<|message|>{atem('forecast', city='Bergen', days=2)}<|eom|>"
        f"{start} to=book.train<|message|>{atem('book.train', code='0 < 1')}<|eot|>"
    )
    wanted = [BERGEN, ("book.train", {"code": "0 < 1"})]
    assert read(tokenizer, calls, start) == (wanted, "", "Rain?")


def test_kimi_k3_writes_frames():
    tokenizer = tokenizer_with(TURNS, K3_TOKENS)
    prompt = "<|open|>think<|sep|>"
    response = "<|open|>response<|sep|>{}<|close|>response<|sep|>".format
    end = "<|close|>message<|sep|>"
    said = "Rain?<|close|>think<|sep|>" + response("It rains.")
    assert read(tokenizer, said + end, prompt) == ([], "It rains.", "Rain?")
    calls = frames(1, "forecast", city="Bergen", days=2) + frames(2, "book.train", code="x")
    section = f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>"
    wanted = [BERGEN, ("book.train", {"code": "x"})]
    assert read(tokenizer, said + section + end, prompt) == (wanted, "It rains.", "Rain?")
    told = "It rains.<|close|>response<|sep|>" + end  # without thinking the prompt opens the answer
    assert read(tokenizer, told, "<|open|>response<|sep|>") == ([], "It rains.", "")


def test_minimax_m3_nests_tags():
    template = TURNS.replace("think>", "mm:think>") + "{# " + NS + "<tool_call> #}"
    tokenizer = tokenizer_with(template, [NS])
    stops = tag(
        "stops",
        tag("item", tag("city", "Voss") + tag("days", "1")) + tag("item", tag("city", "Oslo")),
    )
    first = f'{NS}<invoke name="forecast">{tag("city", "Bergen")}{tag("days", 2)}{NS}</invoke>\n'
    second = f'{NS}<invoke name="book.train">{tag("code", "<b>1</b>")}{stops}{NS}</invoke>\n'
    section = f"{NS}<tool_call>\n{first}{second}{NS}</tool_call>"
    wanted = {"code": "<b>1</b>", "stops": [{"city": "Voss", "days": 1}, {"city": "Oslo"}]}
    answer = read(tokenizer, f"<mm:think>Rain?</mm:think>Look.{section}")
    assert answer == ([BERGEN, ("book.train", wanted)], "Look.", "Rain?")
    assert read(tokenizer, f"</mm:think>{section}")[0] == answer[0]
    cut = f"{NS}<tool_call>\n{first}{second}"[: -len(NS)]
    assert read(tokenizer, f"</mm:think>{cut}")[0] == [BERGEN]


def test_granite_lists_calls_that_its_template_does_not_write():
    text = '<|tool_call|>[{"name": "forecast", "arguments": {"city": "Bergen", "days": 2}}]'
    assert read(tokenizer_with(TURNS, ["<|tool_call|>"]), text) == ([BERGEN], "", "")


def test_a_thought_may_lack_its_start():
    tokenizer = tokenizer_with(TURNS)
    assert read(tokenizer, "Rain?\n</think>\n\nIt rains.") == ([], "It rains.", "Rain?")
    assert read(tokenizer, "It rains.") == ([], "It rains.", "")
    assert read(tokenizer, " It rains.<think>", "<think></think>")[0] == []


@pytest.mark.parametrize(
    ("thought", "is_call"),
    [
        (JSON_CALL, True),
        (f"{JSON_CALL}\n{JSON_CALL}\n", True),
        (JSON_CALL[:-30], False),
        (f"{JSON_CALL} would do.", False),
        (f"{JSON_CALL}</think>", False),
        ("The mark is <tool_call>", False),
        ("The mark is <tool_", False),
    ],
)
def test_a_call_in_a_thought_counts_where_the_answer_ends(thought, is_call):
    tokenizer = tokenizer_with(TURNS + "{# <tool_call> #}")
    calls, text, said = read(tokenizer, f"Rain? {thought}", "<think>\n")
    count = thought.count("<tool_call>") if is_call else 0
    assert (calls, text) == ([BERGEN] * count, "")
    mentioned = f"Rain? {thought}".removesuffix("</think>").strip()
    assert said.strip() == ("Rain?" if is_call else mentioned)


def test_numbers_between_quotes_become_numbers_at_any_depth():
    tokenizer = tokenizer_with(TURNS + "{# <tool_call> #}")
    given = {"code": "7", "stops": [{"city": "3", "days": "1"}, {"days": "two"}], "other": "4"}
    call = f"<tool_call>\n{json.dumps({'name': 'forecast', 'arguments': given})}\n</tool_call>"
    wanted = {**given, "stops": [{"city": "3", "days": 1}, {"days": "two"}]}
    assert read(tokenizer, call, "<think></think>") == ([("forecast", wanted)], "", "")


@pytest.mark.parametrize("more", ["", "\n", '\n{"name": "book.train", "arguments": {}}'])
def test_json_calls_without_marks(more):
    tokenizer = tokenizer_with(TURNS + "{# <tool_call> #}")
    call = '{"name": "forecast", "arguments": {"city": "Bergen", "days": "2"}}'
    wanted = [BERGEN, ("book.train", {})] if more.strip() else [BERGEN]
    assert read(tokenizer, call + more, "<think></think>") == (wanted, "", "")
    other = '{"name": "nobody", "arguments": {}}'
    assert read(tokenizer, other, "<think></think>") == ([], other, "")


def test_values_between_cdata_marks():
    tokenizer = tokenizer_with(CDATA)
    value = "if a < b:\n  </param>"
    text = (
        f'<function name="forecast"><param name="code"><![CDATA[{value}]]></param>'
        '<param name="days"><![CDATA[2]]></param></function>'
    )
    assert read(tokenizer, text) == ([("forecast", {"code": value, "days": 2})], "", "")


DSML = {
    kind: (OWN_TEMPLATES / f"{kind}.jinja").read_text() for kind in ("deepseek_v32", "deepseek_v4")
}
FUNCTIONARY = TURNS.replace("{{ m.content }}", "{{ '>>>all\n' ~ m.content }}")
FORCED = {  # name: (template, control tokens, the end of the prompt)
    "muse": (MUSE, MUSE_TOKENS, "<|start|>assistant"),
    "kimi_k3": (TURNS, K3_TOKENS, "<|open|>think<|sep|><|close|>think<|sep|>"),
    "minimax_m3": (TURNS + "{# " + NS + "<tool_call> #}", [NS], "</mm:think>"),
    "granite": (TURNS, ["<|tool_call|>"], ""),
    "functionary": (FUNCTIONARY, (), ">>>"),
    "cdata": (CDATA, (), "<|assistant|>"),
    **{kind: (source, ("｜DSML｜", "<｜Assistant｜>"), "<｜Assistant｜></think>")
       for kind, source in DSML.items()},
}  # fmt: skip
CHOICES = {
    "city": {"enum": ["Bergen", "Ål <b>", '"']},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "wet": {"type": "boolean"},
}
CHOSEN = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": CHOICES, "required": [*CHOICES],
        "additionalProperties": False,
    }}}
    for name in ("forecast", "book.train")
]  # fmt: skip


def generated(tokenizer, grammar, rng):
    """Tokens that a grammar allows, at random, up to an end that it allows."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.to_json()), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = []
    while not matcher.is_accepting() or rng.random() < 0.5:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [i for i in range(tokenizer.vocab_size) if mask >> i & 1]
        allowed = [i for i in allowed if i not in tokenizer.eos_token_ids]
        if not allowed:
            break
        ids.append(rng.choice(allowed))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return ids


@pytest.mark.alike
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", every(2, FORCED))
def test_forced_calls_are_read_back(name, has_tokens):
    source, tokens, prompt = FORCED[name]
    tokenizer = tokenizer_with(source, tokens if has_tokens or name == "kimi_k3" else ())
    format, reasoning = detect_tools(tokenizer), detect_reasoning(tokenizer)
    if not has_tokens and name == "granite":
        format = tool_format(name)
    use = ToolUse.plan(tokenizer, format, CHOSEN, "required")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
    grammar = AnswerGrammar(tokenizer, None, (), use).forced()
    rng = seeded()
    for _ in range(10):
        ids = generated(tokenizer, grammar, rng)
        stream = TextStream(
            tokenizer, reasoning=reasoning, tools=use.parser(), prompt_ids=prompt_ids
        )
        parts = [*(part for i in ids for part in stream.push([i])), *stream.finish()]
        calls = joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert calls, text
        for call in calls:
            assert call.complete, text
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, CHOSEN[0]["function"]["parameters"])
        said = "".join(part.text for part in parts if isinstance(part, TextPart))
        assert not said.strip(), text
