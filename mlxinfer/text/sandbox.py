"""The jinja environment of chat templates: transformers' set-up, with limits of time and memory.

Templates come with checkpoints, which may be hostile. jinja's sandbox denies them Python's
internals; the limits keep them from running forever or filling the memory. A thread cannot be
interrupted from outside, so each template is rewritten as it is compiled (`template_syntax`): loop
bodies report to the `Budget`, and all operations that can build a value (calls, filters,
`+ * ** % ~`, list and dict literals) are measured before or after. What stays unmeasured is linear
in measured values.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from datetime import datetime
from functools import wraps
from types import CodeType, MethodType
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .marked_text import (
    call_ignoring_marks,
    ignores_marks,
    only_marks,
    slice_ignoring_marks,
    without_marks,
)
from .template_syntax import (
    DictBuilder,
    GenerationTag,
    TemplateNamespace,
    TemplateRewriter,
    raise_exception,
)

MAX_FOLDED = 1_000_000  # characters that constants of a template may have together
MAX_INT_ARGUMENT = 1_000_000  # widths, counts and the like, given to a method or a filter
MAX_INT_BITS = 10_000
MAX_DIGITS = 2_000
_WIDE = re.compile(
    r"\d{6,}|\{[^{}]*\{|\*"
)  # a format with a huge width, or one given as an argument
_WIDE_DATE = re.compile(r"%[^A-Za-z%]*[0-9]{3}")
_LISTS = (list, tuple, set, frozenset)


MULTIPLYING = frozenset({"%", "format_map", "format", "indent", "expandtabs", "translate"})
MULTIPLYING |= {"wordwrap", "xmlattr", "tojson"}
SLOW = frozenset({"urlize", "striptags", "wordwrap", "pprint", "xmlattr"})  # not linear


class LimitError(Exception):
    """A rendering exceeded a limit; the message names it."""


class Budget:
    """The time and memory that one rendering has left.

    Each value that a template builds is charged with the characters that it takes, and its expanded
    size (shared parts count each time) has a limit of its own. So neither one huge value, nor many,
    nor a small one that refers to the same part a billion times gets through.

    Args:
        input_size: characters of the inputs; the limits grow with it.
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
        """Subtract the size of a value that was just built; a list shares its items."""
        size = self.check_value(value)
        self._spend(8 * len(value) if isinstance(value, (dict, *_LISTS)) else size)

    def charge_text(self, value: object) -> None:
        """Subtract the expanded size of a value that is written out."""
        self._spend(self.check_value(value))

    def check_value(self, value: object) -> int:
        """Return the expanded size of a value; raise LimitError if it is too large."""
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
            first: the text or value that it is called on.
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
    """Return a date format that gives a short text; raise LimitError for any other."""
    if not isinstance(format, str) or len(format) > 200 or _WIDE_DATE.search(format):
        raise LimitError("it writes a date in a format that is too long or too wide")
    return format


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


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' `tojson` does: real characters, nothing escaped for HTML."""
    if isinstance(indent, int) and indent > 32:
        raise LimitError(f"tojson gets the indentation {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders templates within a Budget. Several threads may share one sandbox."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self._local = threading.local()
        self.filters["tojson"] = to_json
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(checked_format(format))
        self.globals["dict"] = DictBuilder()
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]

    def compile_template(self, source: str) -> jinja2.Template:
        """Return the template, rewritten so that it reports to the budget."""
        tree = TemplateRewriter().visit(self.parse(source))
        self.limit(Budget(total=MAX_FOLDED))  # compiling folds constants
        try:
            code: CodeType = self.compile(tree)
        finally:
            self.limit(None)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def reads(self, source: str, variable: str) -> bool:
        """Whether a template reads a variable anywhere; a broken template reads none."""
        try:
            names = self.parse(source).find_all(jinja2.nodes.Name)
        except (jinja2.TemplateError, RecursionError):
            return False
        return any(name.name == variable and name.ctx == "load" for name in names)

    def limit(self, budget: Budget | None, marks: str = "") -> None:
        """Let this thread's rendering draw on `budget` and ignore the characters `marks`.

        Args:
            budget: of the rendering that begins; None: it has ended.
            marks: see `marked_text`.
        """
        self._local.budget, self._local.marks = budget, marks

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering; a fresh one while constants are folded."""
        budget: Budget = getattr(self._local, "budget", None) or Budget()
        return budget

    @property
    def marks(self) -> str:
        """The characters that this thread's rendering ignores in texts."""
        marks: str = getattr(self._local, "marks", "")
        return marks

    def tick(self) -> str:
        """Check the deadline in a loop; called by code that TemplateRewriter inserted."""
        self.budget.tick()
        return ""

    def measured(self, value: Any) -> Any:
        """Return `value` after charging it."""
        self.budget.charge(value)
        return value

    def joined(self, *parts: Any) -> str:
        """Return the concatenation of `~` after charging it."""
        self.budget.charge_text(parts)
        return "".join(map(str, parts))

    def shown(self, value: Any) -> Any:
        """Return `value` after charging the text that it becomes in the output or in a block."""
        self.budget.charge_text(value)
        return value

    def item(self, value: Any, key: Any) -> Any:
        """Return `value[key]`; positions in a text are counted without marks."""
        if type(key) is int and self._has_mark(value):
            return self.cut(value, key, key + 1 or None, None)
        return self.getitem(value, key)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return `value[start:stop:step]`, charged; a text keeps its marks, which do not count."""
        part = slice(start, stop, step)
        if self._has_mark(value) and step in (None, 1):
            return self.measured(slice_ignoring_marks(self.marks, value, part))
        return self.measured(value[part])

    def unmarked(self, value: Any) -> Any:
        """Return an operand of a comparison: a text without its marks."""
        return without_marks(value, self.marks) if self.marks else value

    def bare(self, value: Any) -> Any:
        """Return a condition's value: a text of marks only counts as empty."""
        return "" if self.marks and only_marks(self.marks, value) else value

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template; all calls of methods, globals and macros come here."""
        if type(__obj) is MethodType and __obj.__self__ is self:  # inserted by TemplateRewriter
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes in a wrapper of jinja's
        owner = getattr(method, "__self__", None)
        budget = self.budget
        named = [value for name, value in kwargs.items() if name[0] != "_"]  # others are jinja's
        budget.check_value((args, named))
        if isinstance(owner, (str, bytes, int, float)):
            args = tuple(a if _is_plain(a) else list(a) for a in args)
            budget.check_text_call(method.__name__, owner, (*args, *kwargs.values()))
            if self._has_mark(owner) and not named and ignores_marks(method.__name__, args):
                text = str(owner)
                return self.measured(call_ignoring_marks(self.marks, text, method.__name__, args))
        return self.measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template."""
        self.budget.check_binop(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def _has_mark(self, value: object) -> bool:
        return type(value) is str and any(mark in value for mark in self.marks)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with its arguments checked and its result charged."""
        first = 1 if getattr(function, "jinja_pass_arg", None) else 0  # after a context of jinja's

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args[:first], *(a if _is_plain(a) else _as_list(a) for a in args[first:])]
            if len(given) > first:
                rest = (*given[first + 1 :], *kwargs.values())
                self.budget.check_text_call(name, given[first], rest)
            if name in ("length", "count") and self._has_mark(given[0]):
                given = [without_marks(given[0], self.marks)]
            if name == "trim" and not kwargs and self._has_mark(given[0]):
                text, *chars = given
                return self.measured(call_ignoring_marks(self.marks, text, "strip", tuple(chars)))
            return self.measured(function(*given, **kwargs))

        return run


def _is_plain(value: object) -> bool:
    """Whether a value can be measured without consuming it."""
    return not isinstance(value, Iterator)


def _as_list(lazy: Iterator[Any]) -> list[Any]:
    return list(lazy)
