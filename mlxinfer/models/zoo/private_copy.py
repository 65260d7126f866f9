"""mlx-lm's modules of models as a private copy, which shares nothing with an imported mlx-lm.

The copy is a package of its own name with modules read from mlx-lm's folder: an
mlx-lm imported elsewhere stays as it is, and its own package, which imports transformers and
lowers the limit of open files, is not run. In the copy, the function through which the definitions
attend is ours, which hands a call on to the cache where that is one of ours.
"""

import ast
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError

COPY = "mlxinfer_private_mlx_lm"  # the name of the copy's package
INSTALL = 'pip install "mlxinfer[zoo]"'
BROKEN = {  # definitions that must not even be tried, with what was found
    "phi3small": "it adds a mask of true and false to its scores, so that tokens see later ones, "
    "and corrupts memory on MLX's CPU backend",
}
_IMPORTING = threading.Lock()  # engines load on threads of their own
NEEDED = ("Model", "ModelArgs")  # what a module that defines an architecture has


class AttendingCache:
    """What an attention layer of a definition gets in place of mlx-lm's cache; see flat.py."""

    __slots__ = ()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """As `AttentionOverride`."""
        raise AssertionError("a base class")


class AttentionOverride:
    """Stands for mlx-lm's attention function in the copy.

    Args:
        original: mlx-lm's own.
    """

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self._original = original

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """queries (B, H, L, D), keys and values as the cache gave them -> (B, H, L, V)."""
        if isinstance(cache, AttendingCache):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        return self._original(queries, keys, values, cache, scale, mask, sinks)


@cache
def installed() -> str | None:
    """The version of the mlx-lm that is installed; None: none is."""
    try:
        return version("mlx-lm")
    except PackageNotFoundError:
        return None


@cache
def _folder() -> Path:
    """Where mlx-lm lies. `find_spec` of a top-level name imports nothing."""
    spec = find_spec("mlx_lm")
    assert spec is not None, "mlx-lm is installed"
    assert spec.submodule_search_locations, "mlx-lm is a package"
    return Path(spec.submodule_search_locations[0])


@cache
def _renamed() -> Mapping[str, str]:
    """Architectures that mlx-lm defines under another's name: a literal of its utils.py."""
    try:
        tree = ast.parse((_folder() / "utils.py").read_text())
        found = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING"
        )
    except (OSError, SyntaxError, ValueError, StopIteration):
        return {}
    return found if isinstance(found, dict) else {}


def _package(name: str, folder: Path) -> ModuleType:
    """An empty package of that name; its modules lie in `folder`."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules[name] = module
    return module


@cache
def copied() -> str:
    """The name of the package of the copied models, with the attention function replaced."""
    _package(COPY, _folder())
    models = f"{COPY}.models"
    _package(models, _folder() / "models")
    base: Any = import_module(f"{models}.base")
    base.scaled_dot_product_attention = AttentionOverride(base.scaled_dot_product_attention)
    return models


def architectures() -> list[str]:
    """Names of mlx-lm's model files, in order; some hold parts only."""
    return sorted(path.stem for path in (_folder() / "models").glob("*.py") if path.stem[0] != "_")


def module_of(model_type: str) -> ModuleType | None:
    """The copied module that defines an architecture; None: mlx-lm has none.

    Raises:
        UnsupportedModelError: mlx-lm is not installed, or the module does not load here.
    """
    if installed() is None:
        raise UnsupportedModelError(
            f"The architecture {model_type[:60]!r} has no native definition here, and mlx-lm, "
            f"which may define it, is not installed: {INSTALL}."
        )
    name = _renamed().get(model_type, model_type)
    if name not in architectures():
        return None
    if name in BROKEN:
        raise UnsupportedModelError(f"mlx-lm's definition of {name!r} is not used: {BROKEN[name]}.")
    said = io.StringIO()
    try:
        with _IMPORTING, _absolute_names(), contextlib.redirect_stdout(said):
            module = import_module(f"{copied()}.{name}")
    except (Exception, SystemExit) as error:  # the fault boundary of foreign code
        what = said.getvalue().strip() or f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"mlx-lm's definition of {model_type!r} does not load here: {one_line(what)}"
        ) from error
    defines = all(getattr(module, needed, None) is not None for needed in NEEDED)
    return module if defines else None


@contextlib.contextmanager
def _absolute_names() -> Iterator[None]:
    """Meanwhile `mlx_lm.models` means the copy: a few definitions name their imports in full."""
    models = copied()
    ours = {
        name.replace(COPY, "mlx_lm", 1): module
        for name, module in list(sys.modules.items())
        if name == COPY or name.startswith(models)
    }
    theirs = {name: module for name, module in list(sys.modules.items()) if _is_mlx_lm(name)}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in [name for name in list(sys.modules) if _is_mlx_lm(name)]:
            del sys.modules[name]
        sys.modules.update(theirs)


def _is_mlx_lm(name: str) -> bool:
    return name.partition(".")[0] == "mlx_lm"


def one_line(text: str, limit: int = 200) -> str:
    """The beginning of a message of foreign code."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit] + "…"
