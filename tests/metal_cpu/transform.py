"""Metal's language as C++ that clang takes, by tokens. Knows no machine: shim/ has what it needs.

Address spaces, vectors and the library are the shim's, so little is left to change:

- variables in threadgroup memory become references to memory that the machine hands out;
- attributes in [[ ]] go, and function constants get their values;
- vectors are built by a function, because clang has no constructors for its vector types;
- numbers may end in h or bf.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from metal_cpu.source import stretches
from metal_cpu.tokens import Kind, Token, after, before, closing, joined, split, text_at, tokens

_VECTOR = re.compile(r"(?:float|half|bfloat|bool|char|uchar|short|ushort|int|uint|long|ulong)[234]")
_SMALL_FLOAT = re.compile(r"(?!0[xX])([\d.]+(?:[eE][+-]?\d+)?)(h|H|bf|BF)")

Pieces = list[Token]
Change = tuple[int, Pieces]  # up to where, and what comes instead


def transformed(text: str, constants: Mapping[int, int], *, lint: bool = False) -> str:
    """The C++ of a kernel's text; lines stay where they are.

    Args:
        constants: values of function constants by index; 0 where not named.
        lint: for a pass over the syntax with real address spaces, not to be run.
    """
    values = tuple(sorted(constants.items()))
    return "".join(_transformed(piece, values, lint) for piece in stretches(text))


@lru_cache(maxsize=512)
def _transformed(text: str, constants: tuple[tuple[int, int], ...], lint: bool) -> str:
    pieces = list(tokens(text))
    pieces = _rewritten(pieces, lambda at, i: _function_constant(at, i, dict(constants)))
    pieces = _rewritten(pieces, _instantiation)
    pieces = _rewritten(pieces, _attribute)
    pieces = _rewritten(pieces, lambda at, i: _threadgroup_variables(at, i, lint=lint))
    pieces = _rewritten(pieces, _vector)
    pieces = _rewritten(pieces, _number)
    if lint:
        classes = _classes(pieces)
        pieces = _rewritten(pieces, lambda at, i: _constructor(at, i, classes))
    return joined(pieces)


def _rewritten(pieces: Pieces, rule: Callable[[Pieces, int], Change | None]) -> Pieces:
    """Each code token at which the rule applies is replaced, and what the rule takes with it."""
    result: Pieces = []
    index = 0
    while index < len(pieces):
        change = rule(pieces, index) if pieces[index].is_code else None
        if change is None:
            result.append(pieces[index])
            index += 1
        else:
            end, instead = change
            result += instead
            result += [_newlines(pieces[index:end], instead)]
            index = end
    return result


def _newlines(old: Pieces, new: Pieces) -> Token:
    missing = joined(old).count("\n") - joined(new).count("\n")
    return Token(Kind.SPACE, "\n" * missing, old[0].line)


def _code(text: str, line: int) -> Token:
    return Token(Kind.NAME, text, line)


def _opens_attribute(pieces: Pieces, index: int) -> bool:
    return text_at(pieces, index) == "[" == text_at(pieces, index + 1)


def _function_constant(pieces: Pieces, index: int, constants: Mapping[int, int]) -> Change | None:
    """`constant bool name [[function_constant(3)]];`."""
    if pieces[index].text != "constant":
        return None
    type_at = after(pieces, index)
    name_at = after(pieces, type_at)
    start = after(pieces, name_at)
    if not _opens_attribute(pieces, start) or text_at(pieces, start + 2) != "function_constant":
        return None
    end = after(pieces, closing(pieces, start))
    value = constants.get(int(text_at(pieces, start + 4)), 0)
    kind, name = pieces[type_at].text, pieces[name_at].text
    assert text_at(pieces, end) == ";", f"line {pieces[end].line}: one declaration at a time"
    text = f"constexpr constant {kind} {name} = {kind}({value});"
    return end + 1, [_code(text, pieces[index].line)]


def _instantiation(pieces: Pieces, index: int) -> Change | None:
    """`template [[host_name("x")]] ... ;`."""
    start = after(pieces, index)
    if pieces[index].text != "template" or not _opens_attribute(pieces, start):
        return None
    end = next(i for i in range(start, len(pieces)) if pieces[i].text == ";")
    return end + 1, []


def _attribute(pieces: Pieces, index: int) -> Change | None:
    if not _opens_attribute(pieces, index):
        return None
    return closing(pieces, index) + 1, []


def _threadgroup_variables(pieces: Pieces, index: int, *, lint: bool) -> Change | None:
    """`threadgroup float x[32], y;` as a statement of its own."""
    if pieces[index].text != "threadgroup":
        return None
    if text_at(pieces, before(pieces, index)) not in (";", "{", "}"):
        return None
    end = next(i for i in range(index, len(pieces)) if pieces[i].text == ";")
    declared = pieces[index + 1 : end]
    if {"*", "&"} & _outside_brackets(declared):
        return None  # a pointer or a reference, which is a thread's own
    first, *others = split(declared)
    name_at = _variable(first)
    kind = joined(first[:name_at]).strip()
    variables = [first[name_at:], *others]
    text = " ".join(_declaration(kind, variable, lint=lint) for variable in variables)
    return end + 1, [_code(text, pieces[index].line)]


def _outside_brackets(pieces: Pieces) -> set[str]:
    texts, index = set(), 0
    while index < len(pieces):
        if pieces[index].text in ("[", "<", "("):
            index = closing(pieces, index)
        texts.add(pieces[index].text)
        index += 1
    return texts


def _variable(declarator: Pieces) -> int:
    """Index of the name in `type name[dims]`."""
    end = next((i for i, token in enumerate(declarator) if token.text == "["), len(declarator))
    return before(declarator, end)


def _declaration(kind: str, variable: Pieces, *, lint: bool) -> str:
    at = after(variable, -1)
    name, dims = variable[at].text, joined(variable[at + 1 :]).strip()
    alias = f"msl_{name}_type"
    if lint:
        return (
            f"typedef {kind} {alias}{dims}; "
            f"threadgroup {alias}& {name} = *(threadgroup {alias}*)nullptr;"
        )
    return (
        f"typedef {kind} {alias}{dims}; static char msl_{name}_tag; {alias}& {name} = "
        f"*({alias}*)msl_threadgroup_variable("
        f'&msl_{name}_tag, sizeof({alias}), alignof({alias}), "{name}", msl::Site::here());'
    )


def _vector(pieces: Pieces, index: int) -> Change | None:
    """`float4(...)` and `vec<T, 4>(...)`."""
    text = pieces[index].text
    if text == "vec" and text_at(pieces, after(pieces, index)) == "<":
        end = closing(pieces, after(pieces, index))
    elif _VECTOR.fullmatch(text):
        end = index
    else:
        return None
    builds = text_at(pieces, after(pieces, end)) == "("
    if not builds or text_at(pieces, before(pieces, index)) == "operator":
        return None
    name = joined(pieces[index : end + 1])
    return end + 1, [_code(f"msl::make<{name}>", pieces[index].line)]


def _number(pieces: Pieces, index: int) -> Change | None:
    match = _SMALL_FLOAT.fullmatch(pieces[index].text)
    if not match or pieces[index].kind is not Kind.NUMBER:
        return None
    kind = "half" if match[2] in "hH" else "bfloat"
    return index + 1, [_code(f"{kind}({match[1]})", pieces[index].line)]


def _classes(pieces: Pieces) -> set[str]:
    heads = (i for i, token in enumerate(pieces) if token.text in ("struct", "class"))
    return {text_at(pieces, after(pieces, i)) for i in heads}


def _constructor(pieces: Pieces, index: int, classes: set[str]) -> Change | None:
    """`Name(...) thread`: an object that is being made lies in `thread` memory anyway.

    For clang one that has no name yet lies in no address space.
    """
    start = after(pieces, index)
    if pieces[index].text not in classes or text_at(pieces, start) != "(":
        return None
    space = after(pieces, closing(pieces, start))
    ends = text_at(pieces, after(pieces, space)) in (":", "{", ";", "=")
    if text_at(pieces, space) != "thread" or not ends:
        return None
    return space + 1, pieces[index:space]
