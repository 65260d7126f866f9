"""Values between tags, converted to JSON by the schemas of the tools, one parameter at a time."""

import json
import re
from collections.abc import Sequence

from .format import CallWriter
from .reader import Malformed, Parse, Reader, compiled
from .schema import Tool, json_of


class XmlArguments:
    """The arguments of one call, written as one JSON object while its parameters arrive.

    A value whose only type is string is passed on as it arrives; others once they are complete,
    since only then their type is known.

    Args:
        reader: the text.
        calls: receives the JSON; the call has begun.
        tool: its schema has the types.
        trim: one line break after the tag before a value, and one before the tag after it, belong
            to the tags.
    """

    def __init__(self, reader: Reader, calls: CallWriter, tool: Tool, *, trim: bool) -> None:
        self._reader, self._calls, self._tool, self._trim = reader, calls, tool, trim
        self._names: set[str] = set()
        calls.arguments("{")

    def value(
        self, name: str, ends: Sequence[str], *, is_string: bool | None = None
    ) -> Parse[None]:
        """Read the value of a parameter up to one of `ends`, which is not read.

        `is_string` is the type in the tag, None where the tag has none.
        """
        if name in self._names:
            raise Malformed(f"{name} is given twice")
        self._names.add(name)
        key = json.dumps(name, ensure_ascii=False)
        self._calls.arguments(f"{', ' if len(self._names) > 1 else ''}{key}: ")
        if self._trim:
            yield from self._reader.accept("\n")
        types = self._tool.types_of(name)
        if is_string is not None:
            types = frozenset({"string"}) if is_string else types - {"string"}
        if types == {"string"}:
            yield from self._stream(ends)
            return
        text = yield from self._reader.until(*ends)
        if self._trim:
            text = text.removesuffix("\n")
        self._calls.arguments(json_of(text, types))

    def end(self) -> None:
        """End the object and the call."""
        self._calls.arguments("}")
        self._calls.end()

    def _stream(self, ends: Sequence[str]) -> Parse[None]:
        reader = self._reader
        firsts = re.escape("".join(sorted({end[0] for end in ends})))
        plain = compiled(f"[^\n{firsts}]+")
        stops = [*ends, *(f"\n{end}" for end in ends)] if self._trim else list(ends)
        self._calls.arguments('"')
        while True:
            piece = yield from reader.run(plain)
            if not piece:
                if not (yield from reader.more()):
                    raise Malformed(f"the text ended before {ends[0]}")
                stop = yield from reader.ahead(stops)
                if stop is not None:
                    break
                if reader.at_end:
                    raise Malformed("the text ended within a mark")
                piece = reader.take()
            self._calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        reader.take(len(stop) - len(stop.removeprefix("\n")))
        self._calls.arguments('"')
