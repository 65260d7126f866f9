"""The project speaks of itself alone, in files and functions that can be taken in."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mlxinfer", "metal_kernels", "convert", "apps")
MAX_FILE, MAX_FUNCTION = 800, 45  # lines
SUFFIXES = {".py", ".md", ".toml", ".txt", ".metal", ".h", ".yml"}


def texts() -> Iterator[Path]:
    """Every text of the checkout or of an unpacked sdist, but for what tools leave there."""
    for folder, inside, files in os.walk(ROOT):
        inside[:] = [name for name in inside if name != "node_modules"]
        if Path(folder) == ROOT:
            inside[:] = [name for name in inside if not name.startswith(".")]
        paths = (Path(folder, name) for name in sorted(files))
        yield from (path for path in paths if path.suffix in SUFFIXES and path.is_file())


def test_the_project_speaks_of_itself() -> None:
    by_name = {path: path.read_text() for path in texts()}
    assert len(by_name) > 300
    for word in ("/" + "work/", "sub" + "agent", "this " + "session"):
        assert not [str(path) for path, text in by_name.items() if word in text]


SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "node_modules" not in path.parts
]


def test_files_have_at_most_800_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lengths) > 200
    assert not {str(path): length for path, length in lengths.items() if length > MAX_FILE}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """At any depth: statements stand in statements, not in expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        result = getattr(tree, field, ())
        for node in result if isinstance(result, list) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            yield from functions(node)


def test_a_public_class_has_a_name_of_its_own() -> None:
    names = [
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(names) > 1000
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_functions_have_at_most_45_lines() -> None:
    lengths = {
        f"{path}:{node.lineno} {node.name}": num_lines(node)
        for path in SOURCES
        for node in functions(ast.parse(path.read_text()))
    }
    assert len(lengths) > 2000
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION}


def test_broad_except_has_a_reason() -> None:
    broad = [
        f"{path}:{number} {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith(("except Exception", "except BaseException", "except:"))
    ]
    assert len(broad) > 40
    assert not [line for line in broad if "#" not in line]


CLOCK = re.compile(
    r"""setattr\(\s*["']?[\w.]*\btime(\.|["']?,\s*["'])(monotonic|time|perf_counter|process_time)"""
)


def test_no_test_replaces_the_clock_of_the_process() -> None:
    """Event loops and engines of other tests read it: one that runs dry ended a server's thread.

    A test replaces the name `time` in the module that it is about.
    """
    assert CLOCK.search('setattr(progress.time, "monotonic", clock)')
    assert CLOCK.search('setattr("mlxinfer.progress.time.monotonic", clock)')
    assert not CLOCK.search('setattr(progress, "time", clock)')
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    del tests[Path(__file__).resolve()]
    assert not [str(path) for path, text in tests.items() if CLOCK.search(text)]


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the signature to the end, without the docstring."""
    first, *rest = function.body
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    explained = first.end_lineno - first.lineno + 1 if documented and rest else 0  # type: ignore[operator]
    return function.end_lineno - function.lineno + 1 - explained  # type: ignore[operator]
