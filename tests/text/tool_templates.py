"""Chat templates in our own words that write calls as the families' published templates do."""

from mlxinfer.text import ChatTemplate

FRAME = """
{%- if tools %}{{- '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.tool_calls %}{{- m.content }}CALLS{%- else %}{{- m.content }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """Write calls one after the other; `f` is the function, `c` the call."""
    return (
        f"{{{{- {before!r} }}}}{{%- for c in m.tool_calls %}}{{%- set f = c.function %}}{call}"
        f"{{%- if not loop.last %}}{{{{- {between!r} }}}}{{%- endif %}}{{%- endfor %}}"
        f"{{{{- {after!r} }}}}"
    )


def named(before: str, between: str, after: str) -> str:
    return f"{{{{- {before!r} ~ f.name ~ {between!r} ~ (f.arguments | tojson) ~ {after!r} }}}}"


def items(head: str, key: str, value: str, end: str, tail: str) -> str:
    """Write `head` NAME `key` K `value` V `end` ... `tail`; head ends before the name."""
    before, after = head.split("NAME")
    return (
        f"{{{{- {before!r} ~ f.name ~ {after!r} }}}}{{%- for k, v in f.arguments.items() %}}"
        f"{{{{- {key!r} ~ k ~ {value!r} ~ (v if v is string else v | tojson) ~ {end!r} }}}}"
        f"{{%- endfor %}}{{{{- {tail!r} }}}}"
    )


def python(literal: str = "(v | tojson)") -> str:
    return (
        "{{- f.name ~ '(' }}{%- for k, v in f.arguments.items() %}{{- k ~ '=' ~ "
        f"{literal} }}}}{{%- if not loop.last %}}{{{{- ', ' }}}}{{%- endif %}}{{%- endfor %}}"
        "{{- ')' }}"
    )


def gemma(begin: str, end: str, quote: str) -> str:
    return (
        f"{{{{- {begin + 'call:'!r} ~ f.name ~ '{{' }}}}{{%- for k, v in f.arguments | dictsort %}}"
        f"{{{{- k ~ ':' ~ ({quote!r} ~ v ~ {quote!r} if v is string else v | tojson) }}}}"
        "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}"
        f"{{{{- '}}' ~ {end!r} }}}}"
    )


OBJECT = """{{- '{"name": "' ~ f.name ~ '", "arguments": ' ~ (f.arguments | tojson) ~ '}' }}"""
PARAMETERS = OBJECT.replace('arguments"', 'parameters"')
ONE_ONLY = "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{%- endif %}"
XML = ("<tool_call>\n<function=NAME>\n", "<parameter=", ">\n", "\n</parameter>\n")
INVOKE = '<invoke name="NAME">\n'

HARMONY = """
{%- if tools %}{{- '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' }}
{{- (f.arguments | tojson) ~ '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' ~ m.content ~ '<|end|>' }}
{%- else %}{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{%- endif %}
{%- endfor %}"""

DSML_CALL = (
    "{{- '<｜DSML｜invoke name=\"' ~ f.name ~ '\">\n' }}{%- for k, v in f.arguments.items() %}"
    "{{- '<｜DSML｜parameter name=\"' ~ k ~ '\" string=\"' }}"
    "{{- ('true' if v is string else 'false') ~ '\">' ~ (v if v is string else v | tojson) }}"
    "{{- '</｜DSML｜parameter>\n' }}{%- endfor %}"
    "{{- '</｜DSML｜invoke>\n' }}"
)
XTML_CALL = (  # Kimi K3
    "{{- '<|open|>call tool=\"' ~ f.name ~ '\" index=\"' ~ loop.index ~ '\"<|sep|>' }}"
    "{%- for k, v in f.arguments.items() %}{{- '<|open|>argument key=\"' ~ k ~ '\" type=\"' ~ "
    "('string' if v is string else 'object' if v is mapping else 'array' if v is iterable else "
    "'number') ~ '\"<|sep|>' ~ (v if v is string else v | tojson) ~ '<|close|>argument<|sep|>' }}"
    "{%- endfor %}{{- '<|close|>call<|sep|>' }}"
)
ACTION = (  # Command R7B
    """{{- '\n    {"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' ~ f.name ~ '", """
    """"parameters": ' ~ (f.arguments | tojson) ~ '}' }}"""
)
WITH_ID = """{{- '{"id": "' ~ c.id ~ '", "name": "' ~ f.name ~ '", "arguments": ' ~ """ + (
    "(f.arguments | tojson) ~ '}' }}"
)

CALLS = {  # family -> the calls of its template
    "hermes": each(f"{{{{- '<tool_call>\n' }}}}{OBJECT}{{{{- '\n</tool_call>' }}}}", between="\n"),
    "qwen_xml": each(items(*XML, "</function>\n</tool_call>"), between="\n"),
    "glm": each(
        items("\n<tool_call>NAME\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "")
        + "{{- '</tool_call>' }}"
    ),
    "glm_dense": each(
        items("<tool_call>NAME", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "")
        + "{{- '</tool_call>' }}"
    ),
    "mistral": each(OBJECT, "[TOOL_CALLS][", "]", ", "),
    "llama": "{{- '<|python_tag|>' if false }}" + ONE_ONLY + each(PARAMETERS),
    "llama_pythonic": each(python(), "<|python_start|>[", "]<|python_end|>", ", "),
    "lfm2": each(
        python('("\'" ~ v ~ "\'" if v is string else v)'),
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
    ),
    "gemma3": each(python(), "```tool_code\n[", "]\n```", ", "),
    "deepseek": each(
        named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "minimax": each(
        items(INVOKE, '<parameter name="', '">', "</parameter>\n", "</invoke>\n"),
        "\n<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "deepseek_dsml": each(DSML_CALL, "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    "kimi": each(
        "{{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' ~ "
        "(f.arguments | tojson) ~ '<|tool_call_end|>' }}",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "command_r7b": each(
        ACTION, "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "\n]<|END_ACTION|>", ","
    ),
    "granite3": each(OBJECT, "<|tool_call|>[", "]", ", "),
    "phi4_mini": each(OBJECT, "<|tool_call|>[", "]<|/tool_call|>", ", "),
    "nemotron": each(OBJECT, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "seed_oss": each(
        items(
            "\n<seed:tool_call>\n<function=NAME>\n",
            "<parameter=",
            ">",
            "</parameter>\n",
            "</function>\n</seed:tool_call>",
        )
    ),
    "olmo3": each(python(), "<function_calls>", "</function_calls>", "\n"),
    "apriel": each(WITH_ID, "<tool_calls>[", "]</tool_calls>", ", "),
    "functionary": each(named("<function=", ">", "</function>")),
    "hunyuan": each(
        named("<tool_call>", "\n```json\n", "\n```\n</tool_call>"),
        "<tool_calls>\n",
        "\n</tool_calls>",
        "\n",
    ),
    "hy3": each(
        items(
            "<tool_call>NAME<tool_sep>\n",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>\n",
        ),
        "<tool_calls>\n",
        "</tool_calls>",
    ),
    "kimi_k3": each(XTML_CALL, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    "bare_objects": each(OBJECT, between="\n"),
    "text_arguments": each(
        """{{- '<call>{"name": "' ~ f.name ~ '", "arguments": ' ~ """
        "(f.arguments | tojson | tojson) ~ '}</call>' }}"
    ),
}


def template_of(name: str) -> str:
    return FRAME.replace("CALLS", CALLS[name])


def rendered(name: str, calls: list) -> str:
    """What the template writes for these calls."""
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    template = ChatTemplate(template_of(name))
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    whole = template.render([user, answer], tools=[{}], add_generation_prompt=False)
    text = whole.removeprefix(template.render([user], tools=[{}])).removesuffix("<|im_end|>\n")
    return text.removeprefix("<|START_THINKING|><|END_THINKING|>")
