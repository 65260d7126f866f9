"""The jinja environment of chat templates: transformers' own, with a limit on what loops take.

A process with a deadline finds out once whether a template ends (`samples.py`). A hostile template
may end then, and not for the messages of a request. So each round of a loop looks at the time.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import TemplateError

MAX_LOOP_S = 10.0  # of a thread's own computing time; usual renderings take milliseconds


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders as transformers does. Threads may share it.

    Args:
        now: the clock behind `strftime_now`.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self._begun = threading.local()

    def limit_loops(self, tree: nodes.Template) -> None:
        """Change a template so that each round of a loop calls `tick`."""
        for loop in tree.find_all(nodes.For):
            tick = nodes.EnvironmentAttribute("tick", lineno=loop.lineno)
            call = nodes.Call(tick, [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno))
        tree.set_environment(self)

    def begin(self) -> None:
        self._begun.at = time.thread_time()

    def tick(self) -> None:
        if time.thread_time() - self._begun.at > MAX_LOOP_S:
            raise TemplateError(f"The chat template was stopped: its loops took {MAX_LOOP_S:g} s.")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the model's text for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' `tojson` does: real characters, nothing escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, Iterator):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return list(value)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))
