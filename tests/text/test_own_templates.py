"""The chat templates of models that publish none, against what their authors' scripts write."""

import json

import pytest
from talking import CALLS, SAID, THOUGHT, TOOLS, read, tokenizer_of, written_turn
from text_data import DATA, tokenizer_with

from mlxinfer.text import ChatTemplate
from mlxinfer.text.samples import facts_of, probe
from mlxinfer.text.tokenizer_files import OWN_TEMPLATES, read_tokenizer_files

KINDS = ("deepseek_v32", "deepseek_v4")
BEGIN, USER, ANSWER, END = (
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
)  # fmt: skip
BLOCKS = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}


def say(role, text, **more):
    return {"role": role, "content": text, **more}


def source_of(kind):
    return (OWN_TEMPLATES / f"{kind}.jinja").read_text()


def render(kind, *messages, **kwargs):
    return ChatTemplate(source_of(kind)).render(messages, **kwargs)


def called(kind):
    """A call as both models write it, within the block that each calls otherwise."""
    return (
        f"\n\n<｜DSML｜{BLOCKS[kind]}>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜{BLOCKS[kind]}>"
    )


HI, SYSTEM = say("user", "Hi"), say("system", "Be brief.")
HELLO = say("assistant", "Hello", reasoning_content="Hm")
CALL = say(
    "assistant",
    "Look.",
    reasoning_content="Need",
    tool_calls=[
        {"function": {"name": "f", "arguments": {"city": "Oslo", "days": [2]}}},
        {"function": {"name": "g", "arguments": {}}},
    ],
)
RESULTS = (say("tool", "r1"), say("tool", "r2"))


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_rendered_with_and_without_thinking(kind):
    asked = f"{BEGIN}Be brief.{USER}Hi{ANSWER}"
    assert render(kind, SYSTEM, HI) == f"{asked}<think>"
    assert render(kind, SYSTEM, HI, enable_thinking=False) == f"{asked}</think>"
    assert render(kind, SYSTEM, HI, thinking=False) == f"{asked}</think>"
    told = render(kind, SYSTEM, HI, HELLO, add_generation_prompt=False)
    assert told == f"{asked}<think>Hm</think>Hello{END}"
    again = render(kind, SYSTEM, HI, HELLO, HI)
    assert again == f"{asked}</think>Hello{END}{USER}Hi{ANSWER}<think>"
    assert render(kind, SYSTEM, HI, say("system", "Now.")).startswith(f"{BEGIN}Be brief.\n\nNow.")


def test_results_of_tools_are_written_as_trained():
    kind = "deepseek_v32"
    text = (
        f"{BEGIN}{USER}Hi{ANSWER}<think>Need</think>Look.{called(kind)}{END}"
        "\n\n<function_results>\n<result>r1</result>\n<result>r2</result>\n</function_results>\n\n"
    )
    assert render(kind, HI, CALL, *RESULTS) == f"{text}<think>"
    further = (HI, CALL, *RESULTS, HELLO, HI)
    past = text.replace("<think>Need</think>", "</think>")
    assert render(kind, *further) == (
        f"{past}</think>Hello{END}{USER}Hi{ANSWER}<think>"
    )  # fmt: skip
    kind = "deepseek_v4"
    text = (
        f"{USER}Hi{ANSWER}<think>Need</think>Look.{called(kind)}{END}"
        f"{USER}<tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>"
    )
    rest = f"{ANSWER}<think>Hm</think>Hello{END}{USER}Hi{ANSWER}<think>"
    assert render(kind, *further, tools=TOOLS).endswith(text + rest)
    assert render(kind, HI, CALL, *RESULTS, HI, tools=TOOLS).endswith(
        f"{text}\n\nHi{ANSWER}<think>"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tools_are_described_after_the_system_text(kind):
    text = render(kind, SYSTEM, HI, tools=TOOLS)
    assert text.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    for tool in TOOLS:
        assert f"\n{json.dumps(tool['function'], ensure_ascii=False)}\n" in text
    assert f'<｜DSML｜{BLOCKS[kind]}>\n<｜DSML｜invoke name="$' in text
    ends = {"deepseek_v32": "\n</functions>\n", "deepseek_v4": "to invoke tool calls.\n"}
    assert f"{ends[kind]}{USER}Hi" in text


@pytest.mark.parametrize("kind", KINDS)
def test_levels_of_thinking_are_those_of_the_model(kind):
    thinking = probe(ChatTemplate(source_of(kind))).thinking
    efforts = {"deepseek_v32": (), "deepseek_v4": ("high", "max")}
    assert thinking.levels == ("off", "on", *efforts[kind])
    for effort in ("low", "medium", "high", "xhigh", "max"):
        variables, _ = thinking.variables(effort)
        text = render(kind, HI, **variables)
        assert text.endswith("<think>")
        is_most = efforts[kind] and effort in ("xhigh", "max")
        assert text.startswith(f"{BEGIN}Reasoning Effort: Abs" if is_most else BEGIN + USER)
    assert render(kind, HI, **thinking.variables("none")[0]).endswith("</think>")


@pytest.mark.alike
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("thought", [THOUGHT, ""])
def test_a_turn_is_read_back(kind, has_tokens, thought):
    tokenizer = tokenizer_of(source_of(kind), has_tokens=has_tokens)
    prompt, answer = written_turn(tokenizer, thought=thought)
    assert prompt.endswith("<think>" if thought else "</think>")
    for turn in read(tokenizer, prompt, answer):
        assert turn == (CALLS, SAID, thought)


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_which_template_a_checkpoint_has(tmp_path):
    def chosen():
        return dict(read_tokenizer_files(tmp_path).templates)

    assert chosen() == {}
    write(tmp_path, "config.json", {"model_type": "deepseek_v4"})
    assert chosen() == {"default": source_of("deepseek_v4")}
    write(tmp_path, "tokenizer_config.json", {"chat_template": "its own"})
    assert chosen() == {"default": "its own"}
    named = {"chat_template": "its own", "chat_template_type": "deepseek_v32"}
    write(tmp_path, "tokenizer_config.json", named)  # as mlx-lm writes
    assert chosen() == {"default": source_of("deepseek_v32")}
    for unknown in ("../templates/deepseek_v4", "muse_spark", 1, "*"):
        write(tmp_path, "tokenizer_config.json", {**named, "chat_template_type": unknown})
        assert chosen() == {"default": "its own"}
    given = DATA / "templates" / "chatml_tools.jinja"
    assert dict(read_tokenizer_files(tmp_path, given).templates) == {"default": given.read_text()}


SOURCE = """{%- set marks = {'medium': 'think_fast', 'low': 'think_faster'} -%}
{%- set mark = 'ifm|' ~ marks.get(reasoning_effort, 'think') -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- if m.reasoning_content is not defined -%}{{ raise_exception('no thinking') }}{%- endif -%}
  {{- '<|ifm|im_start|>assistant\\n<' ~ mark ~ '>\\n' -}}
  {{- m.reasoning_content ~ '\\n</' ~ mark ~ '>\\n' -}}
  {{- m.content -}}
  {%- if m.tool_calls -%}<ifm|tool_calls>
    {%- for call in m.tool_calls -%}
      {{- '<ifm|tool_call>' ~ call.function.name -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<ifm|arg_key>' ~ key ~ '</ifm|arg_key><ifm|arg_value>' -}}
        {{- (value if value is string else value | tojson) ~ '</ifm|arg_value>' -}}
      {%- endfor -%}</ifm|tool_call>
    {%- endfor -%}</ifm|tool_calls>
  {%- endif -%}
  {{- '<|ifm|im_end|>\\n' -}}
{%- else -%}
  {{- '<|ifm|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|ifm|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|ifm|im_start|>assistant\\n<' ~ mark ~ '>\\n' -}}
{%- endif -%}"""
MARK = "<ifm|think>"
TAGS = ("think", "think_fast", "think_faster")


def test_an_answer_without_a_thought_gets_an_empty_one():
    template = ChatTemplate(SOURCE)
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    forms = facts_of(template).forms
    assert forms.empty_thoughts
    text = template.render(forms.apply(chat, lambda calls: ""))
    assert f"{MARK}\n\n</ifm|think>\nb<" in text
    assert text.endswith(f"{MARK}\n")


@pytest.mark.parametrize("name", TAGS)
def test_a_turn_that_begins_inside_of_a_thought_is_read_back(name: str) -> None:
    """The format is read from the template once; each request has an effort of its own."""
    tokenizer = tokenizer_with(
        SOURCE, [f"<{slash}ifm|{tag}>" for tag in TAGS for slash in ("", "/")]
    )
    prompt, answer = (
        text.replace("ifm|think>", f"ifm|{name}>")
        for text in written_turn(tokenizer, thought=THOUGHT)
    )
    assert prompt.endswith(f"<ifm|{name}>\n")
    for turn in read(tokenizer, prompt, answer):
        assert turn == (CALLS, SAID, THOUGHT)
