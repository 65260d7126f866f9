"""Templates that ask for a thought in every answer get an empty one: the form of K2 Horizon."""

from talking import CALLS, SAID, THOUGHT, read, tokenizer_of, written_turn

from mlxinfer.text import ChatTemplate
from mlxinfer.text.samples import facts_of

SOURCE = """{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- if m.reasoning_content is not defined -%}{{ raise_exception('no thinking') }}{%- endif -%}
  {{- '<|ifm|im_start|>assistant\\n<ifm|think>\\n' ~ m.reasoning_content ~ '\\n</ifm|think>\\n' -}}
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
{%- if add_generation_prompt -%}{{ '<|ifm|im_start|>assistant\\n<ifm|think>\\n' }}{%- endif -%}"""
MARK = "<ifm|think>"


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


def test_a_turn_that_begins_inside_of_a_thought_is_read_back():
    tokenizer = tokenizer_of(SOURCE, has_tokens=True)
    prompt, answer = written_turn(tokenizer, thought=THOUGHT)
    for turn in read(tokenizer, prompt, answer):
        assert turn == (CALLS, SAID, THOUGHT)
