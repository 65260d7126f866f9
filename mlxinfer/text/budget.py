"""How much time and memory one rendering may take. Knows sizes of plain values; no jinja."""

import re
import time
from collections.abc import Sequence, Sized
from typing import Any

MAX_INT_ARGUMENT = 1_000_000  # widths, counts and the like, given to a method or a filter
MAX_INT_BITS = 10_000
MAX_DIGITS = 2_000
_WIDE = re.compile(r"\d{6,}|\{[^{}]*\{|\*")  # a format whose width is huge, or itself an argument
_WIDE_DATE = re.compile(r"%[^A-Za-z%]*[0-9]{3}")
_LISTS = (list, tuple, set, frozenset)


class LimitError(Exception):
    """A rendering went past a limit; the message names it."""


class Budget:
    """What is left of one rendering's allowance.

    Every value that a template builds is charged for what it takes, and its expanded size (shared
    parts count each time) has a limit, so that neither one huge value, nor many, nor a small one
    that refers to the same part a billion times gets through.

    Args:
        input_size: characters of what the template is given; the limits grow with it.
        deadline_s: seconds from now.
        total: characters of all values together, whatever the input.
    """

    def __init__(
        self, input_size: int = 0, deadline_s: float = 10.0, *, total: int = 64_000_000
    ) -> None:
        self.max_size = 8_000_000 + 4 * input_size  # of one value, and of the output
        self.max_product = 16_000_000 + 16 * input_size
        self._left = total + 64 * input_size  # of all values together
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def tick(self) -> None:
        """Raise LimitError past the deadline."""
        if time.monotonic() > self._end:
            raise LimitError(f"it ran for more than {self._deadline_s:g} s")

    def charge(self, value: object) -> None:
        """Take what a value that was just built takes from what is left; lists share items."""
        size = self.check_value(value)
        self._spend(8 * len(value) if isinstance(value, (dict, *_LISTS)) else size)

    def charge_text(self, value: object) -> None:
        """Take the size of a value that is written out from what is left."""
        self._spend(self.check_value(value))

    def check_value(self, value: object) -> int:
        """Return the expanded size of a value; raise LimitError if that is too large."""
        self.tick()
        return size_of(value, self.max_size)

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise LimitError("the values that it builds take too much memory together")

    def check_size(self, size: int) -> None:
        """Raise LimitError if a value of this size must not be built."""
        if size > self.max_size:
            raise LimitError(f"it builds a value of {size} characters; {self.max_size} are allowed")

    def check_binop(self, operator: str, left: Any, right: Any) -> None:
        """Raise LimitError where `left operator right` could be huge."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_INT_BITS:
                raise LimitError("it computes a power that is too large")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self.check_text_call("%", left, (right,))
        elif operator in ("%", "//"):
            self._check_quotient(left, right)

    def check_text_call(self, name: str, first: Any, rest: Sequence[Any]) -> None:
        """Raise LimitError where a text method or a filter could return something huge.

        Args:
            name: of the method or filter, "%" for the operator.
            first: the text (or the value) it is called on.
            rest: its other arguments.
        """
        if any(isinstance(x, int) and abs(x) > MAX_INT_ARGUMENT for x in rest) and name not in (
            "default",
            "d",
            "format",
            "%",
            "index",
            "count",
        ):
            raise LimitError(f"it calls {name} with a number beyond {MAX_INT_ARGUMENT}")
        if name in ("format", "format_map", "%") and _WIDE.search(str(first)):
            raise LimitError("it uses a format with a huge or variable width")
        if name == "replace" and isinstance(first, (str, bytes)) and len(rest) >= 2:
            times = first.count(rest[0] if isinstance(first, bytes) else str(rest[0]))  # type: ignore[arg-type]
            self.check_size(len(first) + times * len(str(rest[1])))
        elif name == "sum" and any(isinstance(x, _LISTS) for x in rest):
            raise LimitError("it adds up lists")
        elif name == "int" and isinstance(first, (str, bytes)) and len(first) > MAX_DIGITS:
            raise LimitError(f"it reads a number of {len(first)} characters")
        elif name == "join":
            sizes = [len(x) if isinstance(x, Sized) else 1 for x in (first, *rest)]
            self.check_size(sizes[0] * max(sizes[1:], default=1))
            self.check_size(size_of((first, *rest), self.max_size))
        elif name in MULTIPLYING:
            size = size_of(first, self.max_size) * (1 + max(map(self._weight, rest), default=0))
            if size > self.max_product:
                raise LimitError(f"{name} could make a text of {size} characters")
        elif name in SLOW and size_of(first, self.max_size) > 100_000:
            raise LimitError(f"it calls {name} on more than 100000 characters")

    def _weight(self, argument: object) -> int:
        if isinstance(argument, int):
            return abs(argument)
        return size_of(argument, self.max_size)

    def _check_quotient(self, left: Any, right: Any) -> None:
        both = isinstance(left, int) and isinstance(right, int)
        if both and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise LimitError("it divides numbers that are too large")

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INT_BITS:
                raise LimitError("it computes a number that is too large")
        elif isinstance(left, int) or isinstance(right, int):
            value, times = (right, left) if isinstance(left, int) else (left, right)
            self.check_size(size_of(value, self.max_size) * max(times, 0))


def checked_format(format: object) -> str:
    """Return a format of dates that makes a short text; raise LimitError for any other."""
    if not isinstance(format, str) or len(format) > 200 or _WIDE_DATE.search(format):
        raise LimitError("it writes a date in a format that is too long or too wide")
    return format


MULTIPLYING = frozenset({"%", "format_map", "format", "indent", "expandtabs", "translate"})
MULTIPLYING |= {"wordwrap", "xmlattr", "tojson"}
SLOW = frozenset({"urlize", "striptags", "wordwrap", "pprint", "xmlattr"})  # not linear


def size_of(value: object, limit: int) -> int:
    """Return about how many characters `value` has when written out; shared parts count each time.

    Raises:
        LimitError: more than `limit`; found without walking further than that.
    """
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, dict):
            total += 8 * len(item)
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, _LISTS):
            total += 8 * len(item)
            stack.extend(item if total <= limit else ())
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 8
        else:
            total += 1
        if total > limit:
            raise LimitError(f"it builds a value of more than {limit} characters")
    return total
