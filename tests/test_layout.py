"""The house rules that a machine can check: imports point down, logic stays free of MLX."""

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.tables import words

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mlxinfer"
FOLDERS = {
    "mlxinfer": PACKAGE,
    "mlxinfer.metal_kernels": ROOT / "metal_kernels",
    "mlxinfer.convert": ROOT / "convert",
    "mlxinfer.app": ROOT / "apps" / "menubar" / "app",
}

LEAVES = {"cache_specs", "core", "errors", "config", "fair", "outputs"}
MAY_IMPORT = {  # a part -> the parts that it may import, beside itself
    "errors": set(),
    "fair": set(),
    "cache_specs": set(),
    "core": {"errors", "fair", "images"},  # of pictures the plain data, for type checkers
    "images": {"errors", "files", "killable"},
    "outputs": {"core", "display", "errors"},  # cards of notebooks, imported when one is drawn
    "display": {"core", "errors", "images", "memory", "outputs", "progress"},
    "files": {"errors"},
    "progress": set(),
    "program": {"core", "errors", "files", "outputs", "progress", "session"},
    "remote": LEAVES | {"http_json", "images", "progress", "session", "text"},
    "config": {"core", "errors"},
    "config.file": {"errors"},
    "mcp_tools": {"config.file", "errors", "text", "threads"},
    "memory.suggestions": {"hub"},
    "metal_kernels": set(),
    "layers": LEAVES | {"metal_kernels"},
    "models": LEAVES | {"files", "images", "layers", "memory", "metal_kernels"},
    "cache": LEAVES | {"files", "memory", "metal_kernels"},
    "sampling": LEAVES | {"metal_kernels"},
    "text": LEAVES | {"files", "killable"},
    "grammar": LEAVES | {"killable", "text"},
    "engine": LEAVES
    | {"cache", "images", "layers", "memory", "metal_kernels", "models", "sampling", "threads"},
    "ranks": LEAVES | {"cache", "engine", "layers", "memory", "models", "threads"},
    "speculation": LEAVES | {"cache", "engine", "grammar", "metal_kernels", "models", "sampling"},
    "hub": LEAVES | {"backend", "files", "memory", "threads"},
    "database": {"errors"},
    "history": {"database", "errors", "files"},
    "memory.fit": LEAVES | {"memory", "models"},
    "memory.roofline": LEAVES | {"memory.fit", "memory", "metal_kernels", "models"},
    "http_json": {"errors"},
    "app": {"errors", "files", "http_json", "memory", "memory.suggestions"},
    "threads": set(),
    "killable": {"errors", "threads"},
    "backend": LEAVES | {"memory"},
    "memory": LEAVES,
    "pooling": LEAVES | {"layers", "metal_kernels", "models"},
    "session": LEAVES
    | {"backend", "cache", "display", "engine", "files", "grammar", "images", "memory"}
    | {"memory.fit", "models", "pooling", "ranks", "speculation", "text", "threads"},
    "convert": LEAVES
    | {"files"}
    | {"backend", "hub", "layers", "memory", "metal_kernels", "models", "text"}
    | {"pooling"},  # segments: whole sequences without a cache
    "server": LEAVES
    | {"backend", "database", "files", "grammar", "history", "hub", "images", "killable"}
    | {"mcp_tools", "memory", "memory.suggestions", "pooling", "session", "text"},
}
SERVER_BASE = {"admission", "errors", "keys", "config", "workers", "http"}
SERVER_MODELS = SERVER_BASE | {"slots", "models", "metrics", "log", "store"}
SERVER_MAY_IMPORT = {  # the same inside mlxinfer/server
    "errors": set(),
    "workers": set(),
    "admission": set(),
    "store": {"errors", "http"},
    "log": set(),
    "keys": {"errors"},
    "config": {"keys"},
    "http": {"config", "errors"},
    "protocol": {"http"},
    "openapi": {"http"},
    "slots": {"errors"},
    "models": {"errors", "slots", "workers"},
    "metrics": {"models", "reuse", "slots", "workers"},
    "reuse": {"http", "slots"},
    "service": SERVER_MODELS | {"pdf", "reuse"},
    "guard": {"config", "errors", "http", "keys", "protocol"},
    "pdf": set(),
    "pictures": {"workers"},
    "exchange": {"http", "protocol"},
    "call": SERVER_MODELS | {"exchange", "pdf", "pictures", "reuse", "service"},
    "apis": SERVER_MODELS | {"call", "pdf", "reuse"},
    "ops": SERVER_MODELS | {"call", "service"},
    "page": SERVER_MODELS | {"apis", "call", "ops", "pdf", "service"},
}
SERVER_ASSEMBLERS = {"app", "run", "__init__"}
APART = ("config.file", "memory.fit", "memory.roofline", "memory.suggestions")  # see `part_of`
ASSEMBLERS = {"llm", "library", "magics", "cli", "bench", "__init__"}  # anything
WITHOUT_MLX = words("""
    app cache_specs core config errors fair images outputs display progress program remote hub
    backend memory history http_json threads killable ranks.control ranks.hosts session cache.pages
    cache.inputs cache.prefix cache.disk grammar engine.batch engine.queues engine.scheduler
    engine.events engine.followers engine.kv_manager engine.limits engine.pagestore engine.snapshots
    engine.page_server engine.peers pooling.config pooling.request server speculation.controller
    speculation.estimates speculation.ngram speculation.options speculation.speculation text
""")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements may stand


@cache
def parsed(path: Path) -> ast.Module:
    gc.disable()  # looking through all trees again for each takes longer than to parse it
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@cache
def modules() -> tuple[tuple[str, Path], ...]:
    """(dotted name below mlxinfer, file) of every module."""
    return tuple(found_modules())


def found_modules() -> Iterator[tuple[str, Path]]:
    for prefix, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [*prefix.split(".")[1:], *path.relative_to(folder).with_suffix("").parts]
            yield (
                ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1]),
                path,
            )


def part_of(name: str) -> str:
    """core.py -> core, engine/scheduler.py -> engine; those of APART stand for themselves."""
    below = ".".join(name.split(".")[:2])
    return below if below in APART else name.split(".")[0]


@cache
def imported(
    name: str, path: Path, *, everything: bool = False, at_once: bool = False
) -> tuple[str, ...]:
    """Modules that a module names in import statements, absolute: mlxinfer.core, mlx.core, json.

    Imports for type checkers only are left out, as nothing is imported by them, unless it is to
    be `everything`; `at_once`: those within functions, too.
    """
    nodes = statements(parsed(path), everything=everything, at_once=at_once)
    return tuple(targets(name, path, nodes))


def targets(name: str, path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    package = ["mlxinfer", *name.split(".")]
    if name == "__init__":
        package = ["mlxinfer"]
    elif path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            if node.module is not None:  # `from . import x` names a module x, not the package
                yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def statements(tree: ast.AST, *, everything: bool, at_once: bool) -> Iterator[ast.AST]:
    """Of a module, at any depth; same arguments as `imported`."""
    for block in BLOCKS:
        for node in getattr(tree, block, ()):
            for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if (for_checkers and not everything) or (later and at_once):
                continue
            yield node
            yield from statements(node, everything=everything, at_once=at_once)


def upward(
    names: Iterable[tuple[str, Path]],
    prefix: str,
    may_import: Mapping[str, set[str]],
    assemblers: set[str],
) -> list[str]:
    """Imports below `prefix` ("mlxinfer.") that `may_import` does not allow."""
    wrong = []
    for name, path in names:
        part = part_of(name.removeprefix(prefix.removeprefix("mlxinfer.")))
        if part in assemblers:
            continue
        assert part in may_import, f"{name} is a new part: say what it may import"
        for target in imported(name, path):
            ours = target.startswith(prefix) and part_of(target.removeprefix(prefix))
            known = ours in may_import or ours in assemblers
            if ours and known and ours not in may_import[part] | {part}:
                wrong.append(f"{name} imports {target.removeprefix('mlxinfer.')}")
    return wrong


def server_modules() -> list[tuple[str, Path]]:
    return [(name, path) for name, path in modules() if name.startswith("server.")]


def test_imports_point_down() -> None:
    assert not upward(modules(), "mlxinfer.", MAY_IMPORT, ASSEMBLERS)


def test_imports_inside_the_server_point_down() -> None:
    assert not upward(server_modules(), "mlxinfer.server.", SERVER_MAY_IMPORT, SERVER_ASSEMBLERS)


def test_there_are_no_import_circles() -> None:
    """Not even for type checkers: two modules that need each other are one, or lack a third."""
    result = list(modules())
    known = {f"mlxinfer.{name}" for name, _ in result}
    graph = {
        f"mlxinfer.{name}": known.intersection(imported(name, path, everything=True))
        for name, path in result
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_logic_is_free_of_mlx() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(name, path)
        if name.startswith(tuple(f"{free}." for free in WITHOUT_MLX)) or name in WITHOUT_MLX
        if target == "mlx" or target.startswith(("mlx.", "mlx_lm"))
    ]
    assert not wrong


def test_nothing_imports_torch_transformers_or_mlx_lm() -> None:
    allowed = {"text.tokenizer"}  # the fallback for checkpoints without a tokenizer.json
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(name, path)
        if target.split(".")[0] in {"torch", "transformers", "mlx_lm"}
        and part_of(name) != "bench"
        and name not in allowed
    ]
    assert not wrong


def test_no_hasattr_dispatch_and_no_stubs() -> None:
    wrong = []
    for name, path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
                wrong.append(f"{name}:{node.lineno} hasattr")
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
                wrong.append(f"{name}:{node.lineno} NotImplementedError")
    assert not wrong


def test_optional_packages_are_imported_where_they_are_used() -> None:
    """Inside a function: a server that writes no spans, and a start of a command, load none."""
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(name, path, at_once=True)
        if target.split(".")[0] in {"opentelemetry", "pypdf", "pandas"}
    ]
    assert not wrong
