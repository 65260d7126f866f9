"""What Metal's language forbids, or leaves unsafe, and C++ allows: read off the tokens of a source.

The Metal Shading Language is C++14 (C++17 from Metal 4 on) without exceptions, virtual functions,
function pointers, lambdas, goto, double and the standard library, and with an address space in
each pointer and reference (Metal Shading Language Specification, sections 1.5 and 4). What clang
can see is left to `lint.py`; these are the rest. Rules are stricter than the language where that
costs nothing: every recursion and every return before a barrier is a fault, whatever decides it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from metal_cpu.report import Fault
from metal_cpu.source import Part
from metal_cpu.tokens import Kind, Token, closing, code_of, split

SPACES = frozenset({"device", "constant", "threadgroup", "thread", "ray_data", "object_data"})
BARRIERS = frozenset({"threadgroup_barrier", "simdgroup_barrier"})
FORBIDDEN = frozenset(
    {
        "double",
        "virtual",
        "goto",
        "new",
        "delete",
        "throw",
        "try",
        "catch",
        "dynamic_cast",
        "typeid",
        "thread_local",
        "asm",
    }
)
RESERVED = re.compile(
    r"fragment|vertex|kernel|sampler|patch|mesh|object|ray_data|object_data|texture\w*|depth\w+"
)
WIDE = frozenset({"long", "ulong", "int64_t", "uint64_t", "size_t", "ptrdiff_t", "atomic_ulong"})
STATEMENT_WORDS = frozenset(
    {"return", "else", "case", "using", "typedef", "goto", "delete", "sizeof", "throw"}
)
NO_OBJECT = frozenset(
    {"using", "typedef", "struct", "class", "enum", "union", "namespace", "static_assert"}
)


@dataclass(slots=True)
class Function:
    """A function definition: names that its body calls, and where it returns and waits."""

    name: str
    file: str
    line: int
    is_kernel: bool
    calls: set[str] = field(default_factory=set)
    barriers: list[int] = field(default_factory=list)  # token places in the body
    returns: list[tuple[int, int]] = field(
        default_factory=list
    )  # (token place, line) of early ones
    called_at: list[tuple[str, int]] = field(default_factory=list)  # (name, token place)


def faults(parts: Sequence[Part]) -> list[Fault]:
    """Every breach of a rule in a kernel's own parts; headers that it includes are not read."""
    faults: list[Fault] = []
    places: dict[str, Function] = {}
    calls: dict[str, set[str]] = {}
    for part in parts:
        breaches, functions = _read(part)
        faults += breaches
        for function in functions:
            places.setdefault(function.name, function)
            calls.setdefault(function.name, set()).update(function.calls)
    return faults + [
        Fault("language", f"{name} calls itself", places[name].file, places[name].line)
        for name in _recursive(calls)
    ]


@lru_cache(maxsize=128)
def _read(part: Part) -> tuple[list[Fault], list[Function]]:
    """Breaches that one part shows, and its functions: kept, most kernels share most parts."""
    code = code_of(part.text)
    reader = _Reader(part.file, code)
    reader.read_scope(0, len(code), in_struct=False)
    result = [*reader.found]
    result += [Fault("language", said, part.file, line) for said, line in _words(code)]
    result += [
        Fault("divergence", "a return before a barrier", part.file, line)
        for line in _early_returns(reader.functions)
    ]
    return result, reader.functions


def _words(code: Sequence[Token]) -> Iterator[tuple[str, int]]:
    """Rules that a few neighbouring tokens decide."""
    for i, token in enumerate(code):
        text, next_text = token.text, code[i + 1].text if i + 1 < len(code) else ""
        last = code[i - 1] if i else None
        if token.kind is Kind.NAME and text in FORBIDDEN:
            yield f"Metal has no {text}", token.line
        elif text == "std" and next_text == ":":
            yield "Metal has no standard library", token.line
        elif text.startswith("memory_order_") and text != "memory_order_relaxed":
            yield f"Metal has no {text}", token.line
        elif text == "(" and next_text == "*" and _is_function_pointer(code, i):
            yield "Metal has no function pointers", token.line
        elif text == "[" and _is_lambda(code, i):
            yield "Metal has no lambdas", token.line
        elif text.startswith(("simd_", "quad_")) and next_text == "(":
            if i + 2 < len(code) and code[i + 2].text in WIDE:
                yield f"{text} takes no numbers of 64 bits", token.line
        elif text == "thread_elements" and not _by_element(code, i):
            yield "thread_elements() is not named element by element", token.line
        elif text == "threadgroup" and _has_wide_atomic(code, i):
            yield "threadgroup memory has no atomics of 64 bits", token.line
        elif last is not None and last.kind is Kind.NAME and _is_declared(text, next_text):
            yield f"{text} is a word of Metal's", token.line


def _is_declared(text: str, next_text: str) -> bool:
    """Whether a word of Metal's is used as the name of a variable; a type stands before it."""
    return RESERVED.fullmatch(text) is not None and next_text in ("=", ";", ",", ")", "[")


def _by_element(code: Sequence[Token], i: int) -> bool:
    """Whether a fragment's numbers are named one by one, or cast as MLX's kernels do."""
    after_call = code[closing(code, i + 1) + 1].text
    return after_call == "[" or (after_call == ")" and _is_cast(code, i))


def _is_cast(code: Sequence[Token], i: int) -> bool:
    while i and code[i].text not in ("(", "=", ";", ","):
        i -= 1
    return code[i - 1].text == ">"


def _is_function_pointer(code: Sequence[Token], i: int) -> bool:
    named = i + 4 < len(code) and code[i + 2].kind is Kind.NAME
    return named and code[i + 3].text == ")" and code[i + 4].text == "("


def _is_lambda(code: Sequence[Token], i: int) -> bool:
    if code[i + 1].text == "[":
        return False  # an attribute
    last = code[i - 1] if i else None
    subscript = last is not None and (
        (last.kind is Kind.NAME and last.text != "return") or last.text in ("]", ")", "[")
    )
    if subscript:
        return False
    end = closing(code, i)
    return end + 1 < len(code) and code[end + 1].text in ("(", "{")


def _has_wide_atomic(code: Sequence[Token], i: int) -> bool:
    texts = [token.text for token in code[i + 1 : i + 6]]
    if texts[:1] == ["atomic_ulong"]:
        return True
    return texts[:2] == ["atomic", "<"] and texts[2] in WIDE


class _Reader:
    """Reads declarations, and finds the functions of one part.

    Attributes:
        found: faults of declarations.
        functions: every function definition, those of structs too.
    """

    def __init__(self, file: str, code: Sequence[Token]) -> None:
        self.found: list[Fault] = []
        self.functions: list[Function] = []
        self._file = file
        self._code = code

    def _fault(self, kind: str, message: str, line: int) -> None:
        self.found.append(Fault(kind, message, self._file, line))

    def read_scope(self, start: int, stop: int, *, in_struct: bool) -> None:
        """Declarations of the program, a namespace or a struct, in tokens [start, stop)."""
        begin = i = start
        while i < stop:
            text = self._code[i].text
            if text in ("(", "["):
                i = closing(self._code, i) + 1
            elif text == ";":
                self._object(begin, i, in_struct=in_struct)
                begin = i = i + 1
            elif text == "{":
                end = closing(self._code, i)
                self._braces(begin, i, end, in_struct=in_struct)
                begin = i = end + 1
            else:
                i += 1

    def _braces(self, begin: int, opening: int, end: int, *, in_struct: bool) -> None:
        """A declaration [begin, opening) and what its braces hold, up to `end`."""
        head = _unparenthesised(self._code[begin:opening])
        words = [token.text for token in head]
        if "=" in words or not words:
            self._object(begin, opening, in_struct=in_struct)
        elif "enum" in words:
            return
        elif {"struct", "class", "union", "namespace"} & set(words):
            self.read_scope(opening + 1, end, in_struct="namespace" not in words)
        elif any(token.text == "(" for token in self._code[begin:opening]):
            self._function(begin, opening, end, in_struct=in_struct)
        else:
            self._object(begin, opening, in_struct=in_struct)

    def _object(self, begin: int, stop: int, *, in_struct: bool) -> None:
        """A declaration without a body: of an object, a type, or a function."""
        head = self._code[begin:stop]
        if not head or head[0].text in (":", ","):
            return
        texts = [token.text for token in head]
        line = head[0].line
        is_call = "(" in texts and "=" not in texts[: texts.index("(")]
        if NO_OBJECT & set(texts) or is_call or texts == [";"]:
            return
        if in_struct:
            if _points(head) and not SPACES & set(texts):
                self._fault("address space", "a member that names no address space", line)
            return
        if "constant" not in texts and head[0].kind is Kind.NAME and texts[0] != "template":
            self._fault("address space", "an object of the program is not `constant`", line)

    def _function(self, begin: int, opening: int, end: int, *, in_struct: bool) -> None:
        head = _without_attributes(self._code[begin:opening])
        at = next(i for i, token in enumerate(head) if token.text == "(" and _calls(head, i))
        name = "operator" if head[at - 1].kind is not Kind.NAME else head[at - 1].text
        function = Function(
            name,
            self._file,
            head[0].line,
            any(token.text == "kernel" for token in self._code[begin:opening]),
        )
        self.functions.append(function)
        returns = head[:at]
        if _points(returns) and not (SPACES | {"operator"}) & {token.text for token in returns}:
            self._fault("address space", f"{name} returns a bare pointer", head[0].line)
        for parameter in split(list(head[at + 1 : closing(head, at)])):
            self._parameter(parameter)
        is_constructor = len(returns) == 1
        if in_struct and not is_constructor and "static" not in {t.text for t in returns}:
            behind = {token.text for token in head[closing(head, at) + 1 :]}
            if not SPACES & behind:  # from Metal 4.1 on `this` is generic without one
                self._fault(
                    "address space", f"{name} does not say where its object is", function.line
                )
        self._body(function, opening + 1, end)

    def _parameter(self, parameter: Sequence[Token]) -> None:
        texts = [token.text for token in parameter]
        declared = texts[: texts.index("=")] if "=" in texts else texts
        if {"*", "&"} & set(declared) and not SPACES & set(declared):
            self._fault(
                "address space", "a parameter that names no address space", parameter[0].line
            )

    def _body(self, function: Function, start: int, stop: int) -> None:
        """Statements of a function: locals, calls, barriers and returns."""
        code, depth = self._code, 0
        for i in range(start, stop):
            text, last = code[i].text, code[i - 1].text
            depth += (text == "{") - (text == "}")
            begins = last in (";", "{", "}", ")") or (last == "(" and code[i - 2].text == "for")
            if begins:
                self._local(function, i, stop)
            if text in BARRIERS:
                function.barriers.append(i)
            elif text == "return" and (depth or last in (")", "else")):
                function.returns.append((i, code[i].line))
            elif code[i].kind is Kind.NAME and _is_call(code, i):
                function.calls.add(text)
                function.called_at.append((text, i))

    def _local(self, function: Function, i: int, stop: int) -> None:
        code, line = self._code, self._code[i].line
        if code[i].text == "static":
            self._fault("language", "Metal has no static locals", line)
        if code[i].kind is not Kind.NAME or code[i].text in STATEMENT_WORDS:
            return
        end = next(
            (j for j in range(i, stop) if code[j].text in ("=", ";", "(", "{", "[", ":")), stop
        )
        declared = code[i:end]
        texts = [token.text for token in declared]
        if code[i].text == "threadgroup" and not function.is_kernel and not {"*", "&"} & set(texts):
            self._fault("language", "threadgroup memory is declared outside of a kernel", line)
        if _declares_pointer(declared) and not SPACES & set(texts):
            self._fault("address space", "a pointer that names no address space", line)


def _declares_pointer(declared: Sequence[Token]) -> bool:
    """Whether a statement begins with `type* name` or `type& name`; a product is none."""
    bare = _unparenthesised(declared)
    texts = [token.text for token in bare]
    if len(bare) < 3 or texts[-2] not in ("*", "&") or bare[-1].kind is not Kind.NAME:
        return False
    return all(token.kind is Kind.NAME or token.text in (":", "*", "&") for token in bare)


def _without_attributes(code: Sequence[Token]) -> list[Token]:
    """The tokens of a declaration without what stands in [[ ]]."""
    kept: list[Token] = []
    i = 0
    while i < len(code):
        if code[i].text == "[" and i + 1 < len(code) and code[i + 1].text == "[":
            i = closing(code, i)
        else:
            kept.append(code[i])
        i += 1
    return kept


def _unparenthesised(code: Sequence[Token]) -> list[Token]:
    """The tokens of a declaration outside of ( ), [ ] and < >."""
    kept: list[Token] = []
    i = 0
    while i < len(code):
        if code[i].text in ("(", "["):
            i = closing(code, i)
        elif code[i].text == "<":
            try:
                i = closing(code, i)
            except ValueError:
                kept.append(code[i])
        else:
            kept.append(code[i])
        i += 1
    return kept


def _points(code: Sequence[Token]) -> bool:
    """Whether a declaration is of a pointer or a reference."""
    return bool({"*", "&"} & {token.text for token in _unparenthesised(code)})


def _calls(head: Sequence[Token], i: int) -> bool:
    """Whether the parenthesis at `i` opens a parameter list."""
    return i > 0 and (head[i - 1].kind is Kind.NAME or head[i - 1].text in (")", ">", "]", "="))


def _is_call(code: Sequence[Token], i: int) -> bool:
    """Whether a function is called: `f(...)` or `f<...>(...)`; methods of objects apart."""
    if code[i - 1].text in (".", ">"):
        return False
    if code[i + 1].text == "(":
        return True
    if code[i + 1].text != "<":
        return False
    try:
        end = closing(code, i + 1)
    except (ValueError, IndexError):
        return False
    return end + 1 < len(code) and code[end + 1].text == "("


def _early_returns(functions: Sequence[Function]) -> Iterator[int]:
    """Lines of returns that stand before a barrier of the same function, or of one it calls."""
    waiting = {function.name for function in functions if function.barriers}
    while more := {f.name for f in functions if f.calls & waiting} - waiting:
        waiting |= more
    for function in functions:
        waits = [*function.barriers, *(at for name, at in function.called_at if name in waiting)]
        yield from (line for at, line in function.returns if at < max(waits, default=-1))


def _recursive(calls: Mapping[str, set[str]]) -> list[str]:
    """Functions from which calls lead back to themselves, in order of name."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        todo = set(calls[name])
        while todo:
            other = todo.pop()
            if other in calls and other not in seen:
                seen.add(other)
                todo |= calls[other]
        return seen

    return [name for name in sorted(calls) if name in reached(name)]
