"""References of a JSON schema: each becomes one that llguidance resolves, `#/$defs/NAME`.

A reference may be a pointer to any place of the document, an anchor, or the `$id` of a schema
inside (JSON Schema 2020-12, sections 8.2 and 9.3; RFC 3986 for relative ones). llguidance follows
plain pointers only, and takes an `$id` for another document.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

from ..text.tools.schema import resolve
from .schema import at, walk

LITERALS = frozenset(("const", "enum", "default", "examples"))
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
ANCHORS = ("$anchor", "$dynamicAnchor")
_PLAIN = re.compile(r"#|#/(?:\$defs|definitions)/[\w.-]+")
_METASCHEMA = re.compile(r"https?://json-schema\.org/draft(?:-0[4-7]|/20(?:19-09|20-12))/schema#?")
_ANY_SCHEMA = {"type": ["object", "boolean"]}  # in the place of a metaschema
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_OURS = frozenset(("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"))


class References:
    """The places of a schema that references can name."""

    def __init__(self, schema: Mapping[str, Any], place: str) -> None:
        self._root, self._place = schema, place
        self._bases: dict[int, str] = {}  # of each object, by its identity
        self._named: dict[str, Any] = {"": schema}  # URI -> schema
        self._names: dict[int, str] = {}  # of the schemas that are moved to $defs
        self._moved: dict[str, Any] = {}
        self.loose: set[str] = set()  # keywords that the result says less of than the schema
        for value, base in _objects(schema, ""):
            self._bases[id(value)] = base
            self._named.setdefault(base, value)
            for key in ANCHORS:
                if isinstance(value.get(key), str):
                    self._named.setdefault(f"{base}#{value[key]}", value)
            if str(value.get("$id", "")).startswith("#"):  # an anchor of old drafts
                self._named.setdefault(base + value["$id"], value)

    def resolved(self) -> Any:
        """Return the schema with plain references.

        Raises:
            InvalidRequestError: a reference leads to another document.
        """
        new = self._rewritten(self._root)
        return {**new, "$defs": {**new.get("$defs", {}), **self._moved}} if self._moved else new

    def _rewritten(self, value: Any, key: str = "") -> Any:
        if key in LITERALS:
            return value
        if isinstance(value, (list, tuple)):
            return [self._rewritten(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        base = self._bases.get(id(value), "")
        if key in MAPS:
            return {name: self._rewritten(inner) for name, inner in value.items()}
        new = {}
        for name, inner in value.items():
            if name in ("$ref", *_DYNAMIC) and isinstance(inner, str):
                if name in _DYNAMIC:
                    self.loose.add(name)
                new["$ref"] = self._plain(inner, base)
            elif not (name in _OURS and isinstance(inner, (str, bool))):
                new[name] = self._rewritten(inner, name)
        return new

    def _plain(self, reference: str, base: str) -> str:
        if _PLAIN.fullmatch(reference) and base == self._bases[id(self._root)]:
            return reference
        target = self._target(reference, base)
        if target is self._root:
            return "#"
        if target is None:
            return reference  # llguidance says that there is nothing
        if id(target) not in self._names:
            name = self._names[id(target)] = f"_ref{len(self._names) + 1}"
            self._moved[name] = None  # it may refer to itself
            self._moved[name] = self._rewritten(target)
        return f"#/$defs/{self._names[id(target)]}"

    def _target(self, reference: str, base: str) -> Any:
        uri = urljoin(base, reference)
        if uri in self._named:
            return self._named[uri]
        document, fragment = urldefrag(uri)
        if document not in self._named:
            if _METASCHEMA.fullmatch(uri):
                self.loose.add("$ref")
                return _ANY_SCHEMA
            places = (p for p, value, _ in walk(self._root) if _names(value, reference))
            problem = f"$ref {reference[:200]!r} points to another document; put it into $defs."
            raise at(self._place, next(places, ""), problem)
        return resolve(f"#{fragment}", self._named[document])


def resolved(schema: Any, place: str) -> tuple[Any, tuple[str, ...]]:
    """Return a schema with plain references, and the keywords that it weakens.

    Raises:
        InvalidRequestError: a reference leads to another document.
    """
    if _is_plain(schema):
        return schema, ()
    references = References(schema, place)
    return references.resolved(), tuple(sorted(references.loose))


def _is_plain(schema: Any) -> bool:
    return all(
        _OURS.isdisjoint(value)
        and not any(key in value for key in _DYNAMIC)
        and (not isinstance(value.get("$ref"), str) or _PLAIN.fullmatch(value["$ref"]))
        for value, _ in _objects(schema, "")
    )


def _names(value: Any, reference: str) -> bool:
    return isinstance(value, Mapping) and reference in [value.get(k) for k in ("$ref", *_DYNAMIC)]


def _objects(value: Any, base: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    stack = [(value, base)]
    while stack:
        value, base = stack.pop()
        if isinstance(value, Mapping):
            identifier = value.get("$id", value.get("id"))
            if isinstance(identifier, str) and not identifier.startswith("#"):
                base = urldefrag(urljoin(base, identifier)).url
            yield value, base
            stack += [(inner, base) for key, inner in value.items() if key not in LITERALS]
        elif isinstance(value, (list, tuple)):
            stack += [(inner, base) for inner in value]
