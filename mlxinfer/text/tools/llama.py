"""Llama 3: {"name": ..., "parameters": {...}}, bare or after <|python_tag|>.

Source: Meta's prompt formats of Llama 3.1 to 3.3 and their chat templates. Several calls are
separated by semicolons, as vLLM's llama3_json and SGLang's llama3 parsers expect. The list of
Python calls that Llama 3.2 may also write is read too. Without the tag only a declared name
distinguishes a call from an answer in JSON.
"""

from functools import partial

from .format import CallWriter, Clues, ToolFormat, require_known
from .hermes import object_head
from .jsoncall import read_call
from .lark import Lark
from .pythonic import read_calls
from .reader import Parse, Reader
from .schema import Toolbox


class Llama(ToolFormat):
    """JSON objects, or a list of Python calls."""

    name = "llama"
    begins = ("<|python_tag|>",)
    bare = ("{", "[")

    def detect(self, clues: Clues) -> bool:
        """The tag is known, and the template mentions parameters."""
        tag = "<|python_tag|>" in clues.tokens or "<|python_tag|>" in clues.template
        return tag and '"parameters"' in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a list of Python calls, or objects with semicolons between them."""
        yield from reader.space()
        first = mark if mark in self.bare else (yield from reader.accept(*self.bare))
        if first == "[":
            yield from read_calls(reader, calls, mark, self.bare)
            return
        check = partial(_check, calls, mark, self.bare)
        yield from read_call(reader, calls, check, opened=first == "{")
        yield from reader.space()
        while (yield from reader.accept(";")):
            yield from reader.space()
            yield from read_call(reader, calls, check)
            yield from reader.space()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Bare objects, as the templates ask for."""
        options = [
            f"{lark.text(object_head(tool.name, 'parameters'))} {lark.parameters(tool)} "
            f"{lark.text('}')}"
            for tool in tools
        ]
        return lark.repeated(lark.one_of(options), "; ", parallel=parallel)


def _check(calls: CallWriter, mark: str, bare: tuple[str, ...], name: str) -> None:
    require_known(calls, name, mark, bare)
