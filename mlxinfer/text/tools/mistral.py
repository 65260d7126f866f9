"""Mistral: [TOOL_CALLS] and then a JSON list of calls, or name[ARGS]{...} for each call.

Source: mistral-common's instruct tokenizers (v3 to v7: the list; v11: name[ARGS]{...}; v13:
name[CALL_ID]id[ARGS]{...}) and the chat templates of Mistral-Small 3.1 and 3.2. Ids have nine
letters or digits, as its validator demands of ids in a conversation.
"""

import secrets
import string

from .format import CallWriter, Clues, ToolFormat
from .hermes import object_head
from .jsoncall import read_arguments, read_call
from .lark import Lark
from .reader import Parse, Reader, compiled
from .schema import Toolbox

_NAME = compiled(r"[\w.:/-]+")
_ID_CHARS = string.ascii_letters + string.digits


class Mistral(ToolFormat):
    """Calls after the mark, until other text follows."""

    name = "mistral"
    begins = ("[TOOL_CALLS]",)
    ends = ("[ARGS]", "[CALL_ID]")

    def __init__(self, *, listed: bool = True) -> None:
        self._listed = listed  # how a forced call is written; both ways are read

    def detect(self, clues: Clues) -> bool:
        """The mark is in the template or among the tokens."""
        return "[TOOL_CALLS]" in clues.template or "[TOOL_CALLS]" in clues.tokens

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a list of calls, or one call."""
        yield from reader.space()
        first = yield from reader.peek()
        if first == "[":
            yield from self._list(reader, calls)
        elif first == "{":
            yield from read_call(reader, calls)
        else:
            yield from self._named(reader, calls)

    def _list(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        reader.take()
        mark = ","
        while mark == ",":
            yield from reader.space()
            yield from read_call(reader, calls)
            yield from reader.space()
            mark = yield from reader.expect(",", "]")
        reader.commit()

    def _named(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name = yield from reader.whole_run(_NAME)
        yield from reader.space()
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.whole_run(_NAME)
            yield from reader.space()
        yield from reader.accept("[ARGS]")
        yield from read_arguments(reader, calls, name)

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls as the model's own template writes them."""
        if not self._listed:
            options = [
                f"{lark.text(f'[TOOL_CALLS]{tool.name}[ARGS]')} {lark.parameters(tool)}"
                for tool in tools
            ]
            return lark.repeated(lark.one_of(options), "", parallel=parallel)
        options = [
            f"{lark.text(object_head(tool.name))} {lark.parameters(tool)} {lark.text('}')}"
            for tool in tools
        ]
        calls = lark.repeated(lark.one_of(options), ", ", parallel=parallel)
        return f"{lark.text('[TOOL_CALLS][')} {calls} {lark.text(']')}"

    def new_id(self) -> str:
        """Return nine letters or digits."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
