"""mlx-lm's definitions: its modules as a private copy, and models built from a config.

The copy is a package of its own name with modules read from mlx-lm's folder: an mlx-lm imported
elsewhere stays as it is, and its own package, which imports transformers and lowers the limit of
open files, is not run. In the copy, the function through which the definitions attend is ours. It
hands a call on to the cache if the cache is one of ours.

A model is cut before its output projection, so that only the rows that are sampled go through it.
"""

import ast
import contextlib
import dataclasses
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ...errors import CheckpointError, UnsupportedModelError, clipped
from .spelling import respelled

COPY = "mlxinfer_private_mlx_lm"  # the name of the copy's package
INSTALL = 'pip install -e ".[zoo]" in a checkout of mlxinfer'
BROKEN = {  # definitions that must not even be tried, with what was found
    "phi3small": "it adds a mask of true and false to its scores, so that tokens see later ones, "
    "and corrupts memory on MLX's CPU backend"
}
_IMPORTING = threading.Lock()  # engines load on threads of their own
NEEDED = ("Model", "ModelArgs")  # what a module that defines an architecture has


class AttendingCache:
    """The cache that an attention layer of a definition gets in place of mlx-lm's."""

    __slots__ = ()
    attend: Callable[..., mx.array]  # gets what mlx-lm's function gets, except the cache


class AttentionOverride:
    """Stands for mlx-lm's attention function in the copy."""

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
    spec = find_spec("mlx_lm")
    assert spec is not None, "mlx-lm is installed"
    assert spec.submodule_search_locations, "mlx-lm is a package"
    return Path(spec.submodule_search_locations[0])


@cache
def _table(name: str) -> Mapping[Any, str]:
    """A literal of mlx-lm's utils.py; empty where this version has none of that name."""
    try:
        tree = ast.parse((_folder() / "utils.py").read_text())
        table = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
    except (OSError, SyntaxError, ValueError, StopIteration):
        return {}
    return table if isinstance(table, dict) else {}


def module_name(model_type: str, classes: Sequence[Any] = ()) -> str:
    """The name of the module that mlx-lm has for an architecture: by its class, else by its type.

    Args:
        model_type, classes: as config.json states them; `classes` are its `architectures`.
    """
    by_class = _table("MODEL_ARCHITECTURE_REMAPPING")
    for name in classes:
        if (model_type, name) in by_class:
            return by_class[model_type, name]
    return _table("MODEL_REMAPPING").get(model_type, model_type)


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


def module_of(model_type: str, classes: Sequence[Any] = ()) -> ModuleType | None:
    """The copied module that defines an architecture; None: mlx-lm has none.

    Args:
        model_type, classes: see `module_name`.
    """
    if installed() is None:
        raise UnsupportedModelError(
            f"The architecture {model_type[:60]!r} has no native definition here, and mlx-lm, "
            f"which may define it, is not installed: {INSTALL}."
        )
    name = module_name(model_type, classes)
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
    """Let `mlx_lm.models` mean the copy: a few definitions name their imports in full."""
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
    return clipped(" ".join(text.split()), limit)


class Definition:
    """A model of mlx-lm's, built from a config.

    Its weights are zeros that take no memory, until others are loaded.

    Raises:
        CheckpointError: the definition does not take these sizes.
    """

    def __init__(self, module: ModuleType, args: Any) -> None:
        self.module = module
        self.args = args
        try:
            self.model: nn.Module = module.Model(args)
        except Exception as error:  # the fault boundary of foreign code
            raise CheckpointError(
                f"mlx-lm's definition of {self.name} does not take this config.json: "
                f"{one_line(f'{type(error).__name__}: {error}')}"
            ) from error
        self.model.update(tree_map(_hollow, self.model.parameters()))
        self.model.eval()
        self._body = _Body.of(self.model)

    @classmethod
    def of(cls, module: ModuleType, config: Mapping[str, Any]) -> "Definition":
        name = module.__name__.rpartition(".")[2]
        try:
            args = module.ModelArgs.from_dict(respelled(module.ModelArgs, config))
        except Exception as error:  # the fault boundary of foreign code
            raise CheckpointError(
                f"mlx-lm's definition of {name} does not take this config.json: "
                f"{one_line(f'{type(error).__name__}: {error}')}"
            ) from error
        return cls(module, args)

    @property
    def name(self) -> str:
        return self.module.__name__.rpartition(".")[2]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))

    def made_of(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """The definition's tensors, made of those of a checkpoint: renamed, joined, stacked."""
        make = getattr(self.model, "sanitize", None)
        return tensors if make is None else make(tensors)

    @property
    def quantisable(self) -> dict[str, int]:
        """Paths of the layers that may be quantised, and the least bits of each; 0: any."""
        wanted = getattr(self.model, "quant_predicate", None) or (lambda path, layer: True)
        layers = self.model.named_modules()
        choices = {
            p: wanted(p, layer) for p, layer in layers if getattr(layer, "to_quantized", None)
        }
        return {p: 0 if said is True else said["bits"] for p, said in choices.items() if said}

    def own_caches(self) -> list[Any]:
        caches: Any = import_module(f"{copied()}.cache")
        made: list[Any] = caches.make_prompt_cache(self.model)
        return made

    def __call__(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """The definition's own forward pass: ids (B, L) -> logits (B, L, vocab_size)."""
        logits: mx.array = self.model(ids, cache=caches)
        return logits

    def hidden(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """The same up to the output projection, (B, L, width).

        Where the definition cannot be cut there these are the logits, and `logits` changes nothing.
        """
        if self._body is None:
            return self(ids, caches)
        with self._body.replaced() as body:
            self(ids, caches)  # lazy: the logits of all tokens are never computed
        states = body.found
        if not isinstance(states, mx.array) or states.ndim != 3:
            raise TypeError("the definition has no hidden states before its output projection")
        return states

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits of rows that `hidden` returned: (R, width) -> (R, vocab_size)."""
        if self._body is None:
            return hidden
        with self._body.replaced(hidden[:, None]):
            logits: mx.array = self.model(mx.zeros((len(hidden), 1), mx.int32))
        return logits[:, 0]

    def uncut(self) -> None:
        """From now on `hidden` gives logits."""
        self._body = None


BODIES = ("model", "transformer", "backbone", "language_model")


class _Body:
    """The part of a model that is followed by the output projection.

    During a call a stand-in keeps the body's output, or returns hidden states given beforehand: the
    hidden states are had without the projection, and the projection runs on a few rows of them.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self._owner = owner
        self._name = name

    @classmethod
    def of(cls, model: nn.Module) -> "_Body | None":
        """Of a language model, or of the one inside a multimodal model; None: no such part."""
        inner = model.get("language_model")
        if isinstance(inner, nn.Module) and any(
            isinstance(inner.get(name), nn.Module) for name in BODIES
        ):
            model = inner
        name = next((name for name in BODIES if isinstance(model.get(name), nn.Module)), None)
        return None if name is None else cls(model, name)

    @contextlib.contextmanager
    def replaced(self, given: mx.array | None = None) -> Iterator["_Watched"]:
        """Let the part return `given`; None: it computes its result and keeps it."""
        part = self._owner[self._name]
        watched = _Watched(part, given)
        setattr(self._owner, self._name, watched)
        try:
            yield watched
        finally:
            setattr(self._owner, self._name, part)


class _Watched:
    def __init__(self, part: Any, given: mx.array | None) -> None:
        self._part = part
        self._given = given
        self.found: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._given is not None:
            return self._given
        self.found = self._part(*arguments, **named)
        return self.found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, name: str) -> Any:
        return self._part[name]


def _hollow(array: mx.array) -> mx.array:
    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def with_narrow_windows(definition: Definition, window: int) -> Definition | None:
    """The same architecture with every attention window cut to `window`; None: it has none.

    Its weights are hollow. Where the narrow sizes do not fit together there is no such model.
    """
    try:
        args = _narrowed(definition.args, window)
        return None if args is definition.args else Definition(definition.module, args)
    except (CheckpointError, TypeError, ValueError):
        return None


def _narrowed(args: Any, window: int) -> Any:
    """A ModelArgs, or a config inside it, with cut windows; unchanged if it has none."""
    if isinstance(args, dict):
        items = args
    elif dataclasses.is_dataclass(args):
        items = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    else:
        return args
    changed = {
        name: window if _is_window(name, value, window) else _narrowed(value, window)
        for name, value in items.items()
    }
    changed = {name: value for name, value in changed.items() if value is not items[name]}
    if not changed:
        return args
    return {**args, **changed} if isinstance(args, dict) else dataclasses.replace(args, **changed)


def _is_window(name: str, value: object, narrow: int) -> bool:
    return "window" in name and "conv" not in name and type(value) is int and value > narrow
