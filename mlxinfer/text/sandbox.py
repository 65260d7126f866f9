"""The jinja environment of chat templates: transformers' set-up, plus limits. Knows no messages.

Templates come with checkpoints from strangers. The sandbox keeps them from Python's internals; the
limits keep them from running forever or filling memory. There is no way to interrupt Python from
within a thread, so each template is rewritten as it is compiled: loop bodies report to the budget,
and all that can build a value (calls, filters, `+ * ** % ~`, list and dict literals) is measured
before or after. What stays unmeasured is linear in values that were measured.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import CodeType, MethodType
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .budget import Budget, checked_format
from .instrument import GenerationTag, Instrument
from .overlook import call_overlooking, cut_overlooking, nothing_but, overlooks, without
from .template_globals import DictBuilder, TemplateNamespace, raise_exception, to_json

MAX_FOLDED = 1_000_000  # characters that constants of a template may have together


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs templates within a Budget; one may be shared by threads."""

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
        """Return the template with its reports to the budget in place."""
        tree = Instrument().visit(self.parse(source))
        with self.limited_by(Budget(total=MAX_FOLDED)):  # constants are worked out meanwhile
            code: CodeType = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def reads(self, source: str, variable: str) -> bool:
        """Whether a template reads a variable anywhere; a broken one reads nothing."""
        try:
            names = self.parse(source).find_all(jinja2.nodes.Name)
        except (jinja2.TemplateError, RecursionError):
            return False
        return any(name.name == variable and name.ctx == "load" for name in names)

    @contextmanager
    def limited_by(self, budget: Budget, marks: str = "") -> Iterator[None]:
        """Let what this thread renders draw on `budget`, and overlook the characters `marks`."""
        self._local.budget, self._local.marks = budget, marks
        try:
            yield
        finally:
            del self._local.budget, self._local.marks

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering; outside of one (constant folding) a fresh one."""
        budget: Budget = getattr(self._local, "budget", None) or Budget()
        return budget

    @property
    def marks(self) -> str:
        """What this thread's rendering overlooks in texts."""
        marks: str = getattr(self._local, "marks", "")
        return marks

    def tick(self) -> str:
        """Report that a loop goes on. Templates reach this through Instrument only."""
        self.budget.tick()
        return ""

    def measured(self, value: Any) -> Any:
        """Return `value`, charged."""
        self.budget.charge(value)
        return value

    def joined(self, *parts: Any) -> str:
        """Return what `~` gives, charged."""
        self.budget.charge_text(parts)
        return "".join(map(str, parts))

    def shown(self, value: Any) -> Any:
        """Return `value`, charged as the text that it becomes in the output or in a block."""
        self.budget.charge_text(value)
        return value

    def item(self, value: Any, key: Any) -> Any:
        """Return what stands under a key, or at a place; of a text without its marks."""
        if type(key) is int and self._has_mark(value):
            return self.cut(value, key, key + 1 or None, None)
        return self.getitem(value, key)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return a slice, charged; of a text without its marks, but with all of them."""
        part = slice(start, stop, step)
        if self._has_mark(value) and step in (None, 1):
            return self.measured(cut_overlooking(self.marks, value, part))
        return self.measured(value[part])

    def unmarked(self, value: Any) -> Any:
        """Return what is compared: a text without its marks."""
        return without(value, self.marks)

    def bare(self, value: Any) -> Any:
        """Return what is asked whether it is true: no text of marks only."""
        return "" if nothing_but(self.marks, value) else value

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template: the one gate of methods, globals and macros."""
        if type(__obj) is MethodType and __obj.__self__ is self:  # what Instrument put in
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes in a wrapper of jinja's
        owner = getattr(method, "__self__", None)
        budget = self.budget
        named = [value for name, value in kwargs.items() if name[0] != "_"]  # others are jinja's
        budget.check_value((args, named))
        if isinstance(owner, (str, bytes, int, float)):
            args = tuple(a if _is_plain(a) else list(a) for a in args)
            budget.check_text_call(method.__name__, owner, (*args, *kwargs.values()))
            if self._has_mark(owner) and not named and overlooks(method.__name__, args):
                text = str(owner)
                return self.measured(call_overlooking(self.marks, text, method.__name__, args))
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
                given = [without(given[0], self.marks)]
            if name == "trim" and not kwargs and self._has_mark(given[0]):
                text, *chars = given
                return self.measured(call_overlooking(self.marks, text, "strip", tuple(chars)))
            return self.measured(function(*given, **kwargs))

        return run


def _is_plain(value: object) -> bool:
    """Whether a value can be measured without using it up."""
    return not isinstance(value, Iterator)


def _as_list(lazy: Iterator[Any]) -> list[Any]:
    return list(lazy)
