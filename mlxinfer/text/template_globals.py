"""What templates may call besides jinja's own: as in transformers. Knows no messages, no limits."""

import json
from typing import Any

import jinja2
from jinja2.utils import Namespace

from .budget import LimitError


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
