"""Templates of K2 Horizon's form: a thought in every answer, in tags that the effort chooses."""

import pytest
from talking import CALLS, SAID, THOUGHT, read, written_turn
from text_data import tokenizer_with

from mlxinfer.text import ChatTemplate
from mlxinfer.text.samples import facts_of

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
