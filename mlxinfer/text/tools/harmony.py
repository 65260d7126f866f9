"""gpt-oss: a message to=functions.f in the commentary channel, its body the arguments.

Source: OpenAI's description of the harmony response format (openai-harmony.md). The recipient may
stand in the role or after the channel. HarmonySplitter passes such messages on with their header,
beginning with <|start|>. <|call|> ends the answer and is seldom part of it.
"""

import re

from .format import CallWriter, Clues, ToolFormat
from .jsoncall import read_arguments
from .lark import Lark
from .reader import Malformed, Parse, Reader
from .schema import Toolbox

_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.:/-]+)")


class Harmony(ToolFormat):
    """One message, one call."""

    name = "harmony"
    begins = ("<|start|>",)
    ends = ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def detect(self, clues: Clues) -> bool:
        """The control tokens are there, or the template writes them."""
        return {"<|channel|>", "<|message|>", "<|call|>"} <= clues.tokens or (
            "<|call|>" in clues.template and "<|channel|>" in clues.template
        )

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one message; a message without a tool, or whose body is no JSON, is text."""
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
