"""Checks of single arguments: a number within bounds, strings, a kind of object."""

import math
import sys

from .errors import InvalidRequestError, shown


def as_strings(name: str, value: object) -> tuple[str, ...]:
    """The strings of an argument that is one or several; raises InvalidRequestError."""
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings):
        return tuple(strings)
    raise InvalidRequestError(f"{name} is {shown(value)}; expected non-empty strings.", param=name)


def check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise InvalidRequestError unless an argument is of a kind, such as a mapping."""
    if not isinstance(value, kind) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected {wanted}.", param=name)


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raise InvalidRequestError unless an argument is an integer within bounds."""
    if value is None and optional:
        return
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise InvalidRequestError(
            f"{name} is {shown(value)}; expected an integer {bounds}.", param=name
        )


def check_number(
    name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise InvalidRequestError unless an argument is a finite number within bounds."""
    sound = type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    above = sound and (value > low if open_low else value >= low)  # type: ignore[operator]
    if not above or value > high:  # type: ignore[operator]
        bounds = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        if high == math.inf:
            bounds = f"{'above' if open_low else 'from'} {low:g}"
        raise InvalidRequestError(
            f"{name} is {shown(value)}; expected a finite number {bounds}.", param=name
        )
