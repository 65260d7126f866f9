"""DeepSeek V3, R1 and V3.1: calls between control tokens, arguments in JSON.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and R1 (function<sep>f, then the
arguments as a block of code) and DeepSeek-V3.1 (f<sep>{...}).
"""

from .format import CallWriter, Clues, ToolFormat, read_section
from .jsoncall import read_arguments
from .lark import Lark
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Toolbox

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"


class DeepSeek(ToolFormat):
    """A section of calls; a call outside of a section is read too.

    Args:
        fenced: a forced call is written as V3 does, in a block of code; else as V3.1 does. Both
            are read.
    """

    name = "deepseek"
    begins = (CALLS, CALL)
    ends = (CALLS_END, CALL_END, SEP)

    def __init__(self, *, fenced: bool = False) -> None:
        self._fenced = fenced

    def detect(self, clues: Clues) -> bool:
        """The section's mark stands in the template."""
        return CALLS in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        if mark == CALLS:
            yield from reader.space()
            yield from reader.expect(CALL)
        yield from read_section(
            reader,
            lambda: self._call(reader, calls),
            begin=CALL,
            end=CALL_END,
            section_end=CALLS_END,
        )

    def _call(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name = yield from reader.until(SEP, limit=MAX_WORD)
        yield from reader.expect(SEP)
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
        head = f"{CALL}function{SEP}{{name}}\n```json\n" if self._fenced else f"{CALL}{{name}}{SEP}"
        tail = f"\n```{CALL_END}" if self._fenced else CALL_END
        options = [
            f"{lark.text(head.format(name=tool.name))} {lark.parameters(tool)} {lark.text(tail)}"
            for tool in tools
        ]
        between = "\n" if self._fenced else ""
        calls = lark.repeated(lark.one_of(options), between, parallel=parallel)
        return f"{lark.text(CALLS)} {calls} {lark.text(CALLS_END)}"
