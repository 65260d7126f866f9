"""References to the memory of a thread, and `this`, are of objects, never of values on their way.

C++ binds a temporary to a reference to const. In Metal the reference names an address space, and
what a temporary lies in is not said: the project's kernels give each such value a name.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

from metal_cpu.report import Fault
from metal_cpu.source import Part
from metal_cpu.tokens import Kind, Token, closing, code_of, split

NO_FUNCTION = frozenset({"if", "for", "while", "switch", "return", "sizeof"})

Definition = tuple[str, list[list[Token]], int]  # name, parameters, place
Call = tuple[str, list[list[Token]]]  # name, arguments
Method = tuple[str, int]  # name and line of one that is called
References = dict[tuple[str, int], frozenset[int]]  # (name, parameters) -> places of references


def reference_faults(parts: Sequence[Part]) -> list[Fault]:
    """Every temporary that a kernel's own parts bind to a `thread` reference."""
    references: References = {}
    read = [_read(part) for part in parts]
    for definitions, _, _ in read:
        for name, parameters, _ in definitions:
            places = frozenset(
                i
                for i, parameter in enumerate(parameters)
                if {"thread", "&"} <= {token.text for token in parameter}
            )
            key = name, len(parameters)
            references[key] = references.get(key, places) & places
    return [
        Fault("address space", said, part.file, line)
        for part, (_, calls, methods) in zip(parts, read, strict=True)
        for said, line in [
            *(
                (f"{n} is bound to a thread reference", at)
                for n, at in _temporaries(calls, references)
            ),
            *((f"{name} is called on a temporary", at) for name, at in methods),
        ]
    ]


@lru_cache(maxsize=128)
def _read(part: Part) -> tuple[list[Definition], list[Call], list[Method]]:
    """Functions, calls and methods of temporaries of one part: kept, most kernels share most."""
    code = code_of(part.text)
    definitions = list(_definitions(code))
    calls = list(_calls(code, {place for *_, place in definitions}))
    return definitions, calls, list(_methods_of_temporaries(code))


def _definitions(code: Sequence[Token]) -> Iterator[Definition]:
    """Name, parameters and place of each function that has a body."""
    for i, end in _parentheses(code):
        after = end + 1
        while after < len(code) and code[after].text == "const":
            after += 1
        has_body = after < len(code) and code[after].text == "{"
        returns = i > 0 and (code[i - 1].kind is Kind.NAME or code[i - 1].text in (">", "&", "*"))
        if has_body and returns:
            yield code[i].text, _split(code[i + 2 : end]), i


def _calls(code: Sequence[Token], defined: Collection[int]) -> Iterator[Call]:
    """Name and arguments of each call."""
    for i, end in _parentheses(code):
        if i not in defined:
            opening = i + 1 if code[i + 1].text == "(" else closing(code, i + 1) + 1
            yield code[i].text, _split(code[opening + 1 : end])


def _methods_of_temporaries(code: Sequence[Token]) -> Iterator[Method]:
    """Name and line of each method of what a function gives; a cast names an object."""
    places = {i for i, _ in _parentheses(code)}
    for i, end in _parentheses(code):
        after = end + 2
        if after in places and code[end + 1].text == "." and not code[i].text.endswith("_cast"):
            yield code[after].text, code[after].line


def _temporaries(calls: Sequence[Call], references: References) -> Iterator[tuple[str, int]]:
    """Arguments of calls that are temporaries where a reference is wanted, with their lines."""
    for name, arguments in calls:
        for place in references.get((name, len(arguments)), ()):
            argument = arguments[place]
            if not _is_object(argument):
                yield " ".join(token.text for token in argument), argument[0].line


def _parentheses(code: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """Places of names before parentheses, template arguments between, and where these close."""
    for i, token in enumerate(code[:-1]):
        if token.kind is not Kind.NAME or token.text in NO_FUNCTION:
            continue
        opening = i + 1
        if code[opening].text == "<":
            try:
                opening = closing(code, opening) + 1
            except ValueError:  # a comparison
                continue
        if opening < len(code) and code[opening].text == "(":
            yield i, closing(code, opening)


def _split(code: Sequence[Token]) -> list[list[Token]]:
    """What stands between commas; nothing where a comparison hides them."""
    try:
        return split(list(code)) if code else []
    except ValueError:
        return []


def _is_object(argument: Sequence[Token]) -> bool:
    """Whether an argument is a variable, a member or an element, and not what something gives."""
    pieces = list(argument)
    while pieces and pieces[0].text in ("*", "("):  # of a pointer; in parentheses
        pieces = pieces[1:]
    if not pieces or pieces[0].kind is not Kind.NAME:
        return False
    i = 1
    while i < len(pieces):
        if pieces[i].text == "[":
            i = closing(pieces, i) + 1
        elif pieces[i].text in (".", ")") or pieces[i].kind is Kind.NAME:
            i += 1
        elif (
            pieces[i].text == "("
        ):  # what a method gives is an object where an element is taken of it
            i = closing(pieces, i) + 1
            if i >= len(pieces) or pieces[i].text != "[":
                return False
        else:
            return False
    return True
