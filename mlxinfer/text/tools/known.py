"""The formats that are written by hand, and which format a model uses.

A format cannot be read off these published templates: gpt-oss writes the header of a call in
another order than its template. The values of Gemma 4 and FunctionGemma are no JSON. The template
of LFM2 writes no calls. Inkling names a tool twice. The template of Kimi K2 fails on calls in
jinja's sandbox. Hermes's form is for templates that ask for it and write no calls, as those of
several fine-tuned models.
"""

import re

from ...errors import TemplateError, wrong_value
from ..reader import Malformed, Parse, TextReader
from ..splitters import BLOCK_END, CALL_BLOCK, MODEL_BLOCK
from ..template import ChatTemplate
from ..tokenizer import Tokenizer
from .cores import (
    ARGUMENT_OBJECT,
    NAME,
    NamedCore,
    ObjectCore,
    ParameterCore,
    PythonCore,
    read_arguments,
)
from .format import CallWriter, ToolFormat
from .gemma import FUNCTION_GEMMA, GEMMA4
from .infer import template_format, written_calls
from .lark import Lark
from .marks import COUNT
from .nested import MINIMAX_M3
from .schema import Toolbox
from .template_format import CallSyntax, TemplateFormat

_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.:/-]+)")


class Harmony(ToolFormat):
    """gpt-oss: a message to=functions.f in the commentary channel, its body the arguments.

    The recipient may stand in the role or after the channel. HarmonySplitter passes such messages
    on with their header, beginning with <|start|>. <|call|> ends the answer and is seldom part of
    it. Source: OpenAI's description of the harmony response format (openai-harmony.md).
    """

    name = "harmony"
    begins = ("<|start|>",)
    ends = ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def read(self, reader: TextReader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one message; a message without a tool, or without JSON in its body, is text."""
        header = yield from reader.until("<|message|>", limit=1024)
        yield from reader.expect("<|message|>")
        recipient = _RECIPIENT.search(header.replace("<|channel|>", " <|channel|>"))
        if recipient is None:
            raise Malformed("a message without a tool")
        yield from read_arguments(reader, calls, recipient.group(1))
        yield from reader.space()
        if (yield from reader.accept("<|call|>", "<|end|>", "<|return|>")):
            reader.commit()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """One call, or several messages with one each; the prompt has begun the first message."""
        options = [
            f"{lark.text(f'<|channel|>commentary to=functions.{tool.name} ')} "
            f"{lark.text('<|constrain|>json<|message|>')} {lark.parameters(tool)}"
            for tool in tools
        ]
        between = "<|call|><|start|>assistant"
        return lark.repeated(lark.one_of(options), between, parallel=parallel)


def _hermes(name: str) -> TemplateFormat:
    """Return the form of Hermes 2 and 3, the one that most models have seen."""
    pattern = f'{{"name": "{NAME}", "arguments": {ARGUMENT_OBJECT}}}'
    syntax = CallSyntax(("", ""), ("<tool_call>\n", "\n</tool_call>"), "\n")
    return TemplateFormat(syntax, ObjectCore(pattern, "name", "arguments"), name)


class Muse(TemplateFormat):
    """Muse Glimmer and Spark: each call in a message to its tool, whose header names it again.

    The reasoning splitter drops the headers. Source: the chat template of Muse Glimmer.
    """

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Messages with one call each; the prompt has begun the first message."""
        options = []
        for tool in tools:
            call = super().grammar(lark, Toolbox([tool]), parallel=False)
            options.append(f"{lark.text(f' to={tool.name}<|message|>')} {call}")
        between = "<|eom|><|start|>assistant"
        return lark.repeated(lark.one_of(options), between, parallel=parallel)


class Inkling(TemplateFormat):
    """Inkling: the name of the tool before the mark of a call, and in the call again.

    The reasoning splitter drops the first. Source: tml-renderers 0.4.2.
    """

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Blocks with one call each; the prompt has begun the first block."""
        options = []
        for tool in tools:
            call = super().grammar(lark, Toolbox([tool]), parallel=False)
            options.append(f"{lark.text(tool.name)} {call}")
        return lark.repeated(lark.one_of(options), MODEL_BLOCK, parallel=parallel)


class Functionary(TemplateFormat):
    """Functionary v3.2: the name of the tool in a line, then its arguments.

    Source: its chat template. The prompt has the mark before the first name.
    """

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """One call, or several with the mark between them."""
        call = lark.rule(self.core.rule(lark, tools))
        return lark.repeated(call, self.syntax.call[0], parallel=parallel)


HARMONY = Harmony()
MUSE = Muse(
    CallSyntax(
        ("<atem:function_calls>\n", "</atem:function_calls>"),
        ('<atem:invoke name="', "</atem:invoke>\n"),
    ),
    ParameterCore(
        '">\n', '<atem:parameter name="', ('">', ""), "</atem:parameter>\n", ("</atem:invoke>",)
    ),
    "muse",
)
KIMI = TemplateFormat(
    CallSyntax(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>functions.", "<|tool_call_end|>"),
    ),
    NamedCore(f":{COUNT}<|tool_call_argument_begin|>"),
    "kimi",
)
LFM2 = TemplateFormat(
    CallSyntax(("<|tool_call_start|>[", "]<|tool_call_end|>"), ("", ""), ", "), PythonCore(), "lfm2"
)
KIMI_K3 = TemplateFormat(
    CallSyntax(
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ('<|open|>call tool="', "<|close|>call<|sep|>"),
    ),
    ParameterCore(
        f'" index="{COUNT}"<|sep|>',
        '<|open|>argument key="',
        ('" type="', '"<|sep|>'),
        "<|close|>argument<|sep|>",
        ("<|close|>",),
        ("string", "number"),
    ),
    "kimi_k3",
)
INKLING = Inkling(
    CallSyntax(("", ""), (CALL_BLOCK, BLOCK_END)),
    ObjectCore(f'{{"name":"{NAME}","args":{ARGUMENT_OBJECT}}}', "name", "args"),
    "inkling",
)
GRANITE = TemplateFormat(
    CallSyntax(("<|tool_call|>[", "]"), ("", ""), ", "),
    ObjectCore(f'{{"name": "{NAME}", "arguments": {ARGUMENT_OBJECT}}}', "name", "arguments"),
    "granite",
)
FUNCTIONARY = Functionary(CallSyntax(("", ""), (">>>", "")), NamedCore("\n"), "functionary")
GENERIC = _hermes("generic")
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY, FUNCTIONARY, GEMMA4, FUNCTION_GEMMA, KIMI, KIMI_K3, MINIMAX_M3, MUSE, LFM2, GRANITE,
    INKLING, _hermes("hermes"),
)  # fmt: skip
_BY_NAME = {format.name: format for format in (*FORMATS, GENERIC)}


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name. Raises InvalidRequestError: there is none."""
    if name not in _BY_NAME:
        names = ", ".join(sorted(_BY_NAME))
        raise wrong_value("tool_format", name, f"auto, {names}")
    return _BY_NAME[name]


def detect_tools(tokenizer: Tokenizer, name: str = "auto") -> ToolFormat:
    """Return the format in which the model writes calls.

    Args:
        name: of a format, for models that "auto" does not recognise.

    Raises:
        InvalidRequestError: there is no format of this name.
        TemplateError: the chat template does not end.
    """
    if name != "auto":
        return tool_format(name)
    template = tokenizer.template
    if template is None or not template.reads("tools"):
        return GENERIC
    literals = "\n".join(template.sources.values())
    tokens = {token.content for token in tokenizer.added_tokens.values()}
    if all(
        mark in tokens or mark in literals for mark in ("<|channel|>", "<|message|>", "<|call|>")
    ):
        return HARMONY
    if f"{FUNCTIONARY.begins[0]}all" in literals:
        return FUNCTIONARY
    if INKLING.begins[0] in tokens or INKLING.begins[0] in literals:
        return INKLING
    if {"<|open|>", "<|close|>", "<|sep|>"} <= tokens or "<|open|>" in literals:
        return KIMI_K3
    written = written_calls(tokenizer)
    derived = None if written is None else template_format(written)
    if derived is not None:
        return derived
    silent = [format for format in (LFM2, GRANITE) if format.begins[0] in tokens]
    if silent:
        return silent[0]
    source = literals + (written.one if written else "")
    return next((f for f in FORMATS[2:] if f.begins[0] in source), GENERIC)


def require_template(template: ChatTemplate | None, format: ToolFormat) -> None:
    """Raise TemplateError unless tools can be presented to the model."""
    if template is None:
        raise TemplateError(
            "The model has no chat template, which tools need; leave `tools` out, or use a model "
            "made for chat."
        )
    if format is not GENERIC and not template.reads("tools"):
        raise TemplateError(
            f"The model's chat template does not know tools, so it cannot ask for calls in the "
            f"form {format.name!r}; leave tool_format out for the generic form."
        )
