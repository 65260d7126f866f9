"""docs/python.md: LLM, programs, parameters, results and exceptions, from their docstrings."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import mlxinfer
from mlxinfer import errors

CLASSES = ("LLM", "Program", "Branches")
FIELDS = ("SamplingParams", "Result", "Delta", "ToolCall", "ToolCallDelta", "Timing", "Ranked")
FUNCTIONS = ("list_models", "pull", "convert_model")
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Options of the engine):$")
TITLES = {"Args": "Arguments"}


def page() -> str:
    """docs/python.md."""
    parts: list[str] = []
    for name in CLASSES:
        parts += class_part(name)
    parts.append("## Functions\n")
    for name in FUNCTIONS:
        parts += callable_part(name, getattr(mlxinfer, name))
    parts.append("## Parameters and results\n")
    for name in FIELDS:
        parts += fields_part(name)
    parts += errors_part()
    return "\n".join(parts)


def class_part(name: str) -> list[str]:
    """A class with its public methods and properties, inherited ones too."""
    kind = getattr(mlxinfer, name)
    parts = [f"## `{name}{signature(kind)}`\n", doc_of(kind)]
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("mlxinfer"):  # its own come first
            own = {n: value for n, value in vars(base).items() if not n.startswith("_")}
            members = {**own, **{n: value for n, value in members.items() if n not in own}}
    for member, value in members.items():
        if inspect.isfunction(value):
            parts += callable_part(f"{name}.{member}", value)
        elif isinstance(value, property) or hasattr(value, "func"):
            parts += [f"### `{name}.{member}`\n", doc_of(value)]
    return parts


def callable_part(name: str, function: Any) -> list[str]:
    """A function or a method."""
    wait = "await " if inspect.iscoroutinefunction(function) else ""
    return [f"### `{wait}{name}{signature(function)}`\n", doc_of(function)]


def signature(function: Any) -> str:
    """The names of arguments with their defaults; types are in the text."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(shown):
            shown.append("*")
        shown.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def doc_of(value: Any) -> str:
    """A docstring as Markdown: paragraphs, and a list for each section."""
    lines: list[str] = []
    section, items = "", list[str]()
    for line in (inspect.getdoc(value) or "").splitlines():
        if match := SECTION.match(line):
            lines += listed(section, items)
            section, items = match[1], []
        elif section:
            items.append(line)
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, *listed(section, items)])).rstrip() + "\n"


def listed(section: str, lines: list[str]) -> list[str]:
    """The entries of a section, `name: text`, as a list."""
    if not section:
        return []
    if section == "Options of the engine":
        return ["", "Options of the engine are in [options](options.md)."]
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line:
            entries.append(line)
    title = TITLES.get(section, section)
    return ["", f"{title}:", "", *(f"- {in_code(entry)}" for entry in entries)]


def in_code(entry: str) -> str:
    """`name: text` with the name in code."""
    match = re.match(r"([\w, *]+): (.*)", entry)
    return entry if match is None else f"`{match[1]}`: {match[2]}"


def fields_part(name: str) -> list[str]:
    """A dataclass: its docstring, and a table of its fields."""
    kind = getattr(mlxinfer, name)
    rows = [f"### `{name}`\n", doc_of(kind), "| field | type | default | |\n|---|---|---|---|"]
    comments = comments_of(kind)
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        shown = getattr(field.type, "__name__", None) or str(field.type)
        shown = re.sub(r"(\w+\.)+", "", shown if isinstance(field.type, type) else str(field.type))
        text = comments.get(field.name, "").replace("|", "\\|")
        rows.append(
            f"| `{field.name}` | `{shown}` | {default} | {text} |".replace("| None`", "\\| None`")
        )
    properties = [n for n, v in vars(kind).items() if isinstance(v, property) and n[0] != "_"]
    rows.append("")
    rows += [f"- `{name}.{member}`: {doc_of(getattr(kind, member))}" for member in properties]
    return rows


def comments_of(kind: type) -> dict[str, str]:
    """What the source says of each field: the lines of comment above it, and beside it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    sections = {}
    [tree] = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = list(comments_above(lines, node.lineno - 2))
            beside = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
            sections[node.target.id] = " ".join([*above, *([beside[1]] if beside else [])])
    return sections


def comments_above(lines: list[str], last: int) -> Iterator[str]:
    """The comments that end at a line, first one first."""
    first = last
    while lines[first].strip().startswith("# "):
        first -= 1
    yield from (line.strip().removeprefix("# ") for line in lines[first + 1 : last + 1])


def errors_part() -> list[str]:
    """The tree of exceptions, and what each one means."""
    rows = [
        "## Exceptions\n",
        "Everything that mlxinfer raises on purpose is a `MlxinferError`. `status` and `code` are "
        "what a server answers with.\n",
        "| exception | is a | status | code | |\n|---|---|---|---|---|",
    ]
    types = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in [kind for kind in types if kind.__module__ == errors.__name__]:
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        status = getattr(kind, "status", "")
        code = getattr(kind, "code", "")
        rows.append(f"| `{kind.__name__}` | {bases} | {status} | `{code}` | {text} |")
    return [*rows, ""]
