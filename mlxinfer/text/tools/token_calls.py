"""A name between control tokens, then its arguments in JSON: Kimi K2, DeepSeek, gpt-oss."""

import re
from collections.abc import Callable

from .format import CallWriter, Clues, ToolFormat
from .json_calls import read_arguments
from .lark import Lark
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Toolbox

KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_CALL_END = "<|tool_call_end|>"
_KIMI_ID = re.compile(r"\s*(?:functions\.)?([\w.:/-]+?)(?::[0-9]+)?\s*")
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.:/-]+)")


def read_section(
    reader: Reader, call: Callable[[], Parse[None]], *, begin: str, end: str, section_end: str
) -> Parse[None]:
    """Read calls that follow each other; the first one's mark has been read.

    Args:
        reader: the text.
        call: reads one call without its marks.
        begin: the mark before each call.
        end: the mark after each call; it may be missing, and so may `section_end`.
        section_end: the mark after all calls.
    """
    while True:
        yield from call()
        yield from reader.space()
        if (yield from reader.accept(end)):
            reader.commit()
            yield from reader.space()
        if not (yield from reader.accept(begin)):
            break
    if (yield from reader.accept(section_end)):
        reader.commit()


class Kimi(ToolFormat):
    """Kimi K2: functions.f:0 and JSON between control tokens, within a section.

    The number counts the calls of a conversation; with the name it is the model's id of the call.
    Source: the chat template and docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct.
    """

    name = "kimi"
    begins = (KIMI_SECTION, KIMI_CALL)
    ends = (KIMI_SECTION_END, KIMI_ARGUMENTS, KIMI_CALL_END)

    def detect(self, clues: Clues) -> bool:
        """The section's mark is in the template or among the tokens."""
        return KIMI_SECTION in clues.template or KIMI_SECTION in clues.tokens

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        if mark == KIMI_SECTION:
            yield from reader.space()
            yield from reader.expect(KIMI_CALL)
        yield from read_section(
            reader,
            lambda: _read_kimi_call(reader, calls),
            begin=KIMI_CALL,
            end=KIMI_CALL_END,
            section_end=KIMI_SECTION_END,
        )

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls with any number after the name."""
        number = lark.rule("/[0-9]{1,4}/")
        options = [
            f"{lark.text(f'{KIMI_CALL}functions.{tool.name}:')} {number} "
            f"{lark.text(KIMI_ARGUMENTS)} {lark.parameters(tool)} {lark.text(KIMI_CALL_END)}"
            for tool in tools
        ]
        calls = lark.repeated(lark.one_of(options), "", parallel=parallel)
        return f"{lark.text(KIMI_SECTION)} {calls} {lark.text(KIMI_SECTION_END)}"


def _read_kimi_call(reader: Reader, calls: CallWriter) -> Parse[None]:
    found = _KIMI_ID.fullmatch((yield from reader.until(KIMI_ARGUMENTS, limit=MAX_WORD)))
    yield from reader.expect(KIMI_ARGUMENTS)
    if found is None:
        raise Malformed("a call without a name")
    yield from read_arguments(reader, calls, found.group(1))


class DeepSeek(ToolFormat):
    """DeepSeek V3, R1 and V3.1: a section of calls; a call outside of a section is read too.

    Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and R1 (function<sep>f, then the
    arguments as a block of code) and DeepSeek-V3.1 (f<sep>{...}).

    Args:
        fenced: a forced call is written as V3 does, in a block of code; else as V3.1 does. Both
            are read.
    """

    name = "deepseek"
    begins = (DEEPSEEK_CALLS, DEEPSEEK_CALL)
    ends = (DEEPSEEK_CALLS_END, DEEPSEEK_CALL_END, DEEPSEEK_SEP)

    def __init__(self, *, fenced: bool = False) -> None:
        self._fenced = fenced

    def detect(self, clues: Clues) -> bool:
        """The section's mark stands in the template."""
        return DEEPSEEK_CALLS in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        if mark == DEEPSEEK_CALLS:
            yield from reader.space()
            yield from reader.expect(DEEPSEEK_CALL)
        yield from read_section(
            reader,
            lambda: self._call(reader, calls),
            begin=DEEPSEEK_CALL,
            end=DEEPSEEK_CALL_END,
            section_end=DEEPSEEK_CALLS_END,
        )

    def _call(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name = yield from reader.until(DEEPSEEK_SEP, limit=MAX_WORD)
        yield from reader.expect(DEEPSEEK_SEP)
        yield from reader.space()
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            name = yield from reader.until("\n", limit=MAX_WORD)
            yield from reader.expect("\n")
            yield from reader.space()
            yield from reader.expect("```json")
        if not name.strip():
            raise Malformed("a call without a name")
        yield from read_arguments(reader, calls, name.strip())
        if fenced:
            yield from reader.space()
            if (yield from reader.accept("```")):
                reader.commit()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls as the model's own template writes them."""
        if self._fenced:
            head = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{{name}}\n```json\n"
            tail = f"\n```{DEEPSEEK_CALL_END}"
        else:
            head, tail = f"{DEEPSEEK_CALL}{{name}}{DEEPSEEK_SEP}", DEEPSEEK_CALL_END
        options = [
            f"{lark.text(head.format(name=tool.name))} {lark.parameters(tool)} {lark.text(tail)}"
            for tool in tools
        ]
        between = "\n" if self._fenced else ""
        calls = lark.repeated(lark.one_of(options), between, parallel=parallel)
        return f"{lark.text(DEEPSEEK_CALLS)} {calls} {lark.text(DEEPSEEK_CALLS_END)}"


class Harmony(ToolFormat):
    """gpt-oss: a message to=functions.f in the commentary channel, its body the arguments.

    The recipient may stand in the role or after the channel. HarmonySplitter passes such messages
    on with their header, beginning with <|start|>. <|call|> ends the answer and is seldom part of
    it. Source: OpenAI's description of the harmony response format (openai-harmony.md).
    """

    name = "harmony"
    begins = ("<|start|>",)
    ends = ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def detect(self, clues: Clues) -> bool:
        """The control tokens are there, or the template writes them."""
        return {"<|channel|>", "<|message|>", "<|call|>"} <= clues.tokens or (
            "<|call|>" in clues.template and "<|channel|>" in clues.template
        )

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one message; a message without a tool, or without JSON in its body, is text."""
        header = yield from reader.until("<|message|>", limit=1024)
        yield from reader.expect("<|message|>")
        found = _RECIPIENT.search(header.replace("<|channel|>", " <|channel|>"))
        if found is None:
            raise Malformed("a message without a tool")
        yield from read_arguments(reader, calls, found.group(1))
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
