"""A tool-call format that was read off a chat template: its marks are data, not code."""

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from ..reader import Parse, TextReader
from .cores import CallCore, ObjectCore
from .format import CallWriter, ToolFormat, WrittenCall
from .lark import Lark
from .marks import COUNT, ID, exact_text, expect_text, first_word, literals_of, skip_text, words_of
from .schema import Toolbox

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts around calls."""

    section: tuple[str, str]  # texts before the first and after the last call
    call: tuple[str, str]  # texts before and after each call
    between: str = ""  # text between two calls
    single: bool = False  # an answer has one call

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.section, *self.call, self.between)


class TemplateFormat(ToolFormat):
    """Calls as one template writes them.

    Args:
        syntax: what stands around the calls.
        short_ids: the template takes ids of nine letters or digits only, as Mistral's do.

    Raises:
        ValueError: nothing marks a call, not even the beginning of a JSON object.
    """

    def __init__(
        self, syntax: CallSyntax, core: CallCore, name: str = "template", *, short_ids: bool = False
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.syntax, self.core, self._short_ids = syntax, core, short_ids
        words = [first_word(syntax.section[0]), first_word(syntax.call[0])]
        words += [word for word in words_of(syntax.call[0])[-1:] if re.fullmatch("<.+=", word)]
        words = list(dict.fromkeys(word for word in words if word))
        if not words and isinstance(core, ObjectCore):
            words = ["{"]
        if not words:
            raise ValueError("nothing marks a call")
        self.begins = tuple(w for w in words if w not in ("{", "["))  # type: ignore[misc]
        bare = {w for w in words if w in ("{", "[")}
        if isinstance(core, ObjectCore):  # models that miss their own mark: Qwen2.5-Coder
            bare.add("{")
        self.bare = tuple(sorted(bare))  # type: ignore[misc]
        texts = [text for source in (*syntax.texts, *core.texts) for text in literals_of(source)]
        self.ends = tuple(dict.fromkeys(texts))  # type: ignore[misc]

    def new_id(self) -> str:
        if not self._short_ids:
            return super().new_id()
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))

    def read(self, reader: TextReader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        syntax = self.syntax
        bare = mark in self.bare
        opened = bare and mark == "{"
        if mark == first_word(syntax.section[0]):
            yield from expect_text(reader, syntax.section[0].partition(mark)[2] + syntax.call[0])
        elif not opened:
            yield from expect_text(reader, syntax.call[0].partition(mark)[2])
        while True:
            if not opened:
                yield from reader.space()
            yield from self.core.read(reader, calls, bare=bare, opened=opened)
            opened = False
            if (yield from skip_text(reader, syntax.call[1])):
                reader.commit()
            if not (yield from self._another(reader, bare=bare)):
                break
        if (yield from skip_text(reader, syntax.section[1])):
            reader.commit()

    def _another(self, reader: TextReader, *, bare: bool) -> Parse[bool]:
        """Read what stands before a further call; return whether it was there."""
        between = self.syntax.between
        if self.syntax.single:
            if not bare:
                return False
            between = ";"  # as Llama 3 at times writes several calls
        gap = f"{between} {self.syntax.call[0]}"
        first = first_word(gap)
        yield from reader.space()
        if first:
            mark = yield from reader.accept(first)
            if mark:
                yield from expect_text(reader, gap.partition(first)[2])
            return bool(mark)
        following = yield from reader.peek()
        return bool(self.core.starts and re.match(self.core.starts, following))

    def write(self, calls: Sequence[WrittenCall]) -> str:
        (begin, end), (head, tail), groups = self.syntax.call, self.syntax.section, [calls]
        if self.syntax.single:
            groups = [[call] for call in calls]
        written = [
            [
                f"{begin}{self.core.write(call)}{end}".replace(COUNT, str(i)).replace(ID, call.id)
                for i, call in enumerate(group)
            ]
            for group in groups
        ]
        return "".join(f"{head}{self.syntax.between.join(pieces)}{tail}" for pieces in written)

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        syntax = self.syntax
        begin, end = (exact_text(lark, text) for text in syntax.call)
        call = lark.rule(f"{begin} {self.core.rule(lark, tools)} {end}")
        calls = lark.repeated(call, syntax.between, parallel=parallel and not syntax.single)
        head = exact_text(lark, syntax.section[0].lstrip())
        return f"{head} {calls} {lark.text(syntax.section[1])}"
