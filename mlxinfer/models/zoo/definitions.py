"""Models of mlx-lm's definitions: a config, however it is spelled, to a model of theirs.

Also where such a model is cut: its hidden states are had before the output projection, so that
only the rows that are sampled go through it.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ...errors import CheckpointError
from .private_copy import copied, one_line


class Definition:
    """A model of mlx-lm's, built from a config.

    Its weights are zeros that take no memory, until others are loaded.

    Args:
        module: defines the architecture.
        args: its ModelArgs.

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
        """From the values of config.json, however they are spelled."""
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
        """Of the module."""
        return self.module.__name__.rpartition(".")[2]

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))

    def own_caches(self) -> list[Any]:
        """New caches of mlx-lm's for one sequence, as the definition wants them."""
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
        found = body.found
        if not isinstance(found, mx.array) or found.ndim != 3:
            raise TypeError("the definition has no hidden states before its output projection")
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """What `hidden` gives, of any rows (R, width) -> (R, vocab_size)."""
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
        """Meanwhile the part gives `given`; None: what it computes, which is kept."""
        part = self._owner[self._name]
        watched = _Watched(part, given)
        setattr(self._owner, self._name, watched)
        try:
            yield watched
        finally:
            setattr(self._owner, self._name, part)


class _Watched:
    """A part of a model with a result that is kept or given."""

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
    """Zeros of the same shape that take no memory."""
    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def respelled(args_type: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the spelling that mlx-lm reads, for a ModelArgs that ignores what it lacks.

    transformers 5 writes `rope_parameters`, which holds the theta, the kind of scaling and the part
    of a head that turns; before, each was a key of its own.
    """
    known = inspect.signature(args_type).parameters
    out = {key: _respelled_inner(value) for key, value in config.items()}
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_parameters" in known:
        return out
    return _with_old_rope(out, rope)


def _respelled_inner(value: Any) -> Any:
    """The config of a language model inside another; definitions read some keys of either kind."""
    if not isinstance(value, dict) or not isinstance(value.get("rope_parameters"), dict):
        return value
    return _with_old_rope(value, value["rope_parameters"])


def _with_old_rope(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What `rope_parameters` says in keys of its own, where these are silent."""
    if "full_attention" in rope and isinstance(rope["full_attention"], dict):
        rope = rope["full_attention"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    old: dict[str, Any] = {
        key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope
    }
    if kind != "default":
        old["rope_scaling"] = {**rope, "rope_type": kind, "type": kind}
    silent = {key: value for key, value in old.items() if config.get(key) is None}
    return {**config, **silent}


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
    """A ModelArgs, or a config inside it, with cut windows; itself where there are none."""
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
