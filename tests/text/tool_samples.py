"""Calls as the families write them: after their published chat templates, in our own words."""

import json
import re
from functools import partial

from tool_templates import rendered

from mlxinfer.text import samples
from mlxinfer.text.tools import ToolUse, tool_format
from mlxinfer.text.tools.infer import WrittenCalls, template_format
from mlxinfer.text.tools.marks import words_of
from mlxinfer.text.tools.use import AnswerGrammar

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "detail": {"type": "object"},
                    "units": {"enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def js(value):
    return json.dumps(value, ensure_ascii=False)


def mistral_list(calls):
    inner = ", ".join(
        f'{{"name": {js(name)}, "arguments": {js(args)}, "id": "abcdefgh{i}"}}'
        for i, (name, args) in enumerate(calls)
    )
    return f"[TOOL_CALLS] [{inner}]"


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{js(args)}" for name, args in calls)


def mistral_with_ids(calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{js(args)}" for name, args in calls)


def llama(calls):
    return "; ".join(f'{{"name": {js(n)}, "parameters": {js(a)}}}' for n, a in calls)


def llama_tagged(calls):
    return "<|python_tag|>" + llama(calls)


def python_list(calls):
    inner = ", ".join(
        f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls
    )
    return f"[{inner}]"


def lfm2(calls):
    return f"<|tool_call_start|>{python_list(calls)}<|tool_call_end|>"


def tool_code(calls):
    return f"```tool_code\n{python_list(calls)}\n```"


def gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        pairs = (f"{quote}{k}{quote}:{gemma_value(v, quote)}" for k, v in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(v, quote) for v in value)}]"
    return js(value)


def gemma4(calls, begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'):
    return "".join(
        f"{begin}call:{name}{{{','.join(f'{k}:{gemma_value(v, quote)}' for k, v in args.items())}}}"
        f"{end}"
        for name, args in calls
    )


def functiongemma(calls):
    return gemma4(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def harmony(calls):
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{js(args)}<|call|>"
        for name, args in calls
    )


def harmony_role(calls):
    return "".join(
        f"<|start|>assistant to=functions.{name}<|channel|>commentary<|message|>{js(args)}<|call|>"
        for name, args in calls
    )


def deepseek_fenced(calls):
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{js(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{js(args)}"
        "<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _format_of(name, writer):
    """The format by hand where there is one, else the one that the writer's own calls show."""
    if name in BY_HAND:
        return tool_format(BY_HAND[name])
    format = template_format(
        WrittenCalls(*(writer(c).strip() for c in (samples.ONE, samples.TWO)), IDS)
    )
    assert format is not None, writer
    return format


READ_OFF = (  # families whose templates write any call
    "command_r7b", "granite3", "phi4_mini", "nemotron", "seed_oss", "olmo3", "apriel",
    "functionary", "hunyuan", "hy3", "kimi_k3", "hermes", "qwen_xml", "glm", "glm_dense",
    "deepseek", "minimax", "deepseek_dsml",
)  # fmt: skip
BY_HAND = {
    "gemma4": "gemma4",
    "functiongemma": "functiongemma",
    "harmony": "harmony",
    "harmony_role": "harmony",
}
IDS = ("abcdefghi", *(f"abcdefgh{number}" for number in range(9)))
WRITERS = {
    writer.__name__: writer
    for writer in (
        *(mistral_list, mistral_named, mistral_with_ids),
        *(llama, llama_tagged, python_list, lfm2, tool_code, gemma4, functiongemma),
        *(harmony, harmony_role, deepseek_fenced, kimi),
    )
}
WRITERS |= {name: partial(rendered, name) for name in READ_OFF}
FORMATS = {name: _format_of(name, writer) for name, writer in WRITERS.items()}
CONTROL = sorted(  # the marks that are control tokens to the models
    {
        word
        for known in FORMATS.values()
        for text in known.marks
        for word in words_of(text)
        if re.fullmatch(r"<[^=]*>|\[[A-Z_]+\]", word)
    }
)


def grammar_of(
    how, tokenizer, format, tools, *, only=None, parallel=True, reasoning=None, prompt_ids=()
):
    """The grammar of an answer that uses these tools, by a method of AnswerGrammar."""
    use = ToolUse([], tools, format, True, only, parallel)
    return getattr(AnswerGrammar(tokenizer, reasoning, prompt_ids, use), how)()
