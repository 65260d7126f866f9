"""The jinja environment of chat templates: transformers' set-up, plus limits. Knows no messages.

Templates come with checkpoints from strangers. The sandbox keeps them from Python's internals; the
limits keep them from running forever or filling memory. There is no way to interrupt Python from
within a thread, so each template is rewritten as it is compiled: loop bodies report to the budget,
and all that can build a value (calls, filters, `+ * ** % ~`, list and dict literals) is measured
before or after. What stays unmeasured is linear in values that were measured.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .budget import Budget, LimitError


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs templates within a Budget; one may be shared by threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self._local = threading.local()
        self.filters["tojson"] = to_json
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["dict"] = DictBuilder()
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]

    def compile_template(self, source: str) -> jinja2.Template:
        """Return the template with its reports to the budget in place."""
        tree = Instrument().visit(self.parse(source))
        code: CodeType = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    @contextmanager
    def limited_by(self, budget: Budget) -> Iterator[None]:
        """Let what this thread renders draw on `budget`."""
        self._local.budget = budget
        try:
            yield
        finally:
            del self._local.budget

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering; outside of one (constant folding) a fresh one."""
        budget: Budget = getattr(self._local, "budget", None) or Budget()
        return budget

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
        self.budget.charge(parts)
        return "".join(map(str, parts))

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template: the one gate of methods, globals and macros."""
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes in a wrapper of jinja's
        owner = getattr(method, "__self__", None)
        if owner is self:
            return __obj(*args)
        budget = self.budget
        budget.charge(args)
        budget.charge([value for name, value in kwargs.items() if name[0] != "_"])
        if isinstance(owner, (str, bytes, int, float)):
            args = tuple(a if _is_plain(a) else list(a) for a in args)
            budget.check_text_call(method.__name__, owner, (*args, *kwargs.values()))
        return self.measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template."""
        self.budget.check_binop(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with its arguments checked and its result charged."""
        first = 1 if getattr(function, "jinja_pass_arg", None) else 0  # after a context of jinja's

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args[:first], *(a if _is_plain(a) else _as_list(a) for a in args[first:])]
            if len(given) > first:
                rest = (*given[first + 1 :], *kwargs.values())
                self.budget.check_text_call(name, given[first], rest)
            return self.measured(function(*given, **kwargs))

        return run


class Instrument(NodeTransformer):
    """Puts the calls of `tick`, `measured` and `joined` into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: D102
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if constant else _call("measured", [node], node.lineno)


class GenerationTag(Extension):
    """`{% generation %}`: marks what the model wrote, for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class DictBuilder:
    """`dict(...)` for templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return dict(*args, **kwargs)."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return dict.fromkeys(*args)."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace(...)` for templates; names with a leading underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces may refer to each other: written out, that can explode


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace cannot have the attribute {name!r}.")


def raise_exception(message: object) -> None:
    """Let a template refuse its messages."""
    raise jinja2.TemplateError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' `tojson` does: real characters, nothing escaped for HTML."""
    if isinstance(indent, int) and indent > 32:
        raise LimitError(f"tojson is told to indent by {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


def _is_plain(value: object) -> bool:
    """Whether a value can be measured without using it up."""
    return not isinstance(value, Iterator)


def _as_list(lazy: Iterator[Any]) -> list[Any]:
    return list(lazy)
