"""JSON files read with care: sizes, depth, types and ranges are checked and named. No mlx."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, UnsupportedModelError, clipped

MAX_JSON_BYTES = 64 << 20
MAX_ITEMS = 10_000  # of a list


def read_json(path: Path, *, infinite: bool = False) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        infinite: take Infinity, which is not JSON but what transformers writes, for a number.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CheckpointError(f"{path} is no file.")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes; not read.")
        return parse_json(path.read_bytes(), str(path), infinite=infinite)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_list(path: Path) -> list[Any]:
    """The list in a JSON file; raises what `read_json` raises."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes; not read.")
    whole = parse_json(b'{"items": ' + path.read_bytes() + b"}", str(path))
    items = whole["items"]
    if not isinstance(items, list):
        raise CheckpointError(f"{path} holds a {type(items).__name__}; expected a list.")
    return items


def parse_json(data: bytes, where: str, *, infinite: bool = False) -> dict[str, Any]:
    """The object in `data`; duplicate keys are refused, since readers disagree about them."""
    constant = _infinity if infinite else _refuse
    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=constant, object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not sound JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}; expected an object.")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _infinity(constant: str) -> float:
    return float(constant) if constant.endswith("Infinity") else _refuse(constant)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


_REQUIRED: Any = object()


class Fields:
    """One JSON object, read key by key.

    Several keys are spellings of one thing: the first that is present and not null counts. Every
    reader raises CheckpointError, naming key and file, where the value is missing, of another type
    or out of its range.
    """

    __slots__ = ("values", "where")

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, *keys: str) -> Any:
        """The first value that is present and not null, unchecked; None if there is none."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def integer(
        self, *keys: str, low: int = 1, high: int = 2**31 - 1, default: Any = _REQUIRED
    ) -> int:
        """An integer in [low, high]; whole floats, as some configs have them, count."""
        value = self._given(keys, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if value is default and default is not _REQUIRED:
            return default
        if type(value) is not int or not low <= value <= high:
            self._fail(keys, value, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        *keys: str,
        low: float = -1e30,
        high: float = 1e30,
        above: float | None = None,
        default: Any = _REQUIRED,
    ) -> float:
        """A finite number in [low, high], and greater than `above`."""
        value = self._given(keys, default)
        if value is default and default is not _REQUIRED:
            return default
        sound = type(value) in (int, float) and low <= value <= high and math.isfinite(value)
        if not sound or (above is not None and value <= above):
            bound = f"[{low:g}" if above is None else f"({above:g}"
            self._fail(keys, value, f"a number in {bound}, {high:g}]")
        return float(value)

    def boolean(self, *keys: str, default: Any = _REQUIRED) -> bool:
        value = self._given(keys, default)
        if type(value) is not bool:
            self._fail(keys, value, "true or false")
        return value

    def text(self, *keys: str, default: Any = _REQUIRED) -> str:
        value = self._given(keys, default)
        if value is default and default is not _REQUIRED:
            return default
        if type(value) is not str:
            self._fail(keys, value, "a string")
        return value

    def fields(self, *keys: str) -> "Fields | None":
        """A nested object, or None where there is none."""
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._fail(keys, value, "an object")
        return Fields(value, f"{keys[0]} of {self.where}")

    def items(self, *keys: str) -> list[Any] | None:
        """A list, its items unchecked, or None where there is none."""
        value = self.get(*keys)
        if value is not None and (not isinstance(value, list) or len(value) > MAX_ITEMS):
            self._fail(keys, value, f"a list of at most {MAX_ITEMS} items")
        return value

    def by_layer(
        self, *keys: str, count: int, known: Sequence[Any], further: int = 0
    ) -> list[Any] | None:
        """A list with one of the values of `known` for each layer; None where there is none.

        Args:
            further: layers that may follow, and predict further ahead. They are left out.
        """
        stated = self.items(*keys)
        if stated is None:
            return None
        if not 0 <= len(stated) - count <= further or not all(one in known for one in stated):
            *others, last = map(repr, known)
            raise CheckpointError(
                f"{keys[0]} in {self.where} must be {count} times {', '.join(others)} or {last}."
            )
        return stated[:count]

    @property
    def present(self) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if value is not None}

    def stated(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The values that are present and not null, under other names: {key: other name}."""
        return {other: self.get(key) for key, other in names.items() if self.get(key) is not None}

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The object with values under other names too, see `stated`."""
        return Fields({**self.values, **self.stated(names)}, self.where)

    def require(self, known: Mapping[str, Sequence[Any]]) -> None:
        """Refuse settings that would change the answers; `known`: values of each that are read."""
        for key, values in known.items():
            stated = self.get(key)
            if stated is not None and stated not in values:
                raise UnsupportedModelError(
                    f"{key} in {self.where} is {repr(stated)[:60]}; supported: "
                    f"{', '.join(map(repr, values))}."
                )

    def _given(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.get(*keys)
        if value is not None:
            return value
        if default is _REQUIRED:
            names = " or ".join(keys)
            raise CheckpointError(f"{self.where} has no {names}, which this model needs.")
        return default

    def _fail(self, keys: tuple[str, ...], value: Any, expected: str) -> NoReturn:
        key = next(key for key in keys if self.values.get(key) is not None)
        given = clipped(repr(value), 60)
        raise CheckpointError(f"{key} in {self.where} is {given}; expected {expected}.")
