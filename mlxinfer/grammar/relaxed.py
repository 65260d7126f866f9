"""Leaves out of a schema what llguidance cannot enforce, and checks complete answers for it.

If a schema is not strict, masks enforce as much of it as they can. The rest is left out of the
grammar, and the complete answer is checked against the whole schema.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..outputs import Result
from ..text.tools.schema import resolve
from .schema import BOUNDS, CLASS, NOTES, Schema, at, is_kept, is_kept_bound, mapped, rewrite

UNENFORCED = (  # keywords that llguidance refuses and for which `rewrite` has no equivalent
    "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "dependentSchemas",
    "dependentRequired", "dependencies",
)  # fmt: skip
_BEYOND_REGULAR = re.compile(  # look-around, back-references, ends of words; classes of Java
    r"\(\?(?:[=!>]|<[=!])|\\[1-9bBc<>]|\\k<|\\p\{(?:Graph|Print)\}"
)
_PLAIN_PARTS = re.compile(rf"\\.|{CLASS}|\[.*|\(\?[a-z]+\)", re.DOTALL)  # `[.*`: never closed
_INNER_ENDS = re.compile(  # ^ and $ within a text, or in a group that may be left out
    r"[^(|:]\^|[^(|:^]\((?:\?:)?\^|\((?:\?:)?\^[^()]*\)[?*+{]"
    r"|\$\)*[^)|]|\$\|(?:[^()$]|\$(?!\|))*\)[^)|]"
)
_NESTED = re.compile(r"\)[*+{]")  # a repeated group
MAX_NESTED = 100  # characters of a text that llguidance holds against such a pattern
MAX_BACKTRACKS = 100_000  # of one pattern, in the check
MAX_PROBLEM = 300  # characters of a message


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A schema that its grammar enforces in part."""

    tool: str | None  # the grammar is of calls of this one; None: of the text of the answer
    place: str  # in the request, for messages
    schema: str  # JSON text
    keywords: tuple[str, ...]  # that the grammar leaves out


def relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the schema in llguidance's keywords, and the keywords that were left out of it.

    Where nothing was left out the schemas accept the same values. A oneOf becomes an anyOf, which
    leaves out nothing if its options exclude each other.
    """
    dropped: set[str] = set()
    schema = _rings_alone(schema, dropped)

    def relax(part: Schema) -> None:
        _whole_counts(part)
        rewrite(part)
        for key in (*UNENFORCED, *_not_here(part)):
            if key in part:
                del part[key]
                dropped.add(key)
        dropped.update(_without_wide_bounds(part))
        if "oneOf" in part and not _exclusive(part["oneOf"], schema):
            dropped.add("oneOf")
        _one_of_as_any_of(part)

    return mapped(schema, relax), tuple(sorted(dropped))


def _without_wide_bounds(part: Schema) -> list[str]:
    """Remove bounds that llguidance would round; return them."""
    is_exact = is_kept_bound if part.get("type") == "integer" else is_kept
    wide = [key for key in BOUNDS if not is_exact(part.get(key))]
    for key in wide:
        del part[key]
    return wide


_DEFINITIONS = ("$defs", "definitions")


def _rings_alone(schema: Any, dropped: set[str]) -> Any:
    """Remove what stands beside references within a schema that leads back to itself.

    Beside a `$ref` these are keywords; in an `allOf` the references go. llguidance
    refuses them there. Their names are added to `dropped`.
    """
    rings = _rings(schema)
    if not rings:
        return schema

    def drop(part: Schema) -> None:
        beside = set(part) - NOTES - {"$ref", *_DEFINITIONS} if part.get("$ref") in rings else ()
        dropped.update(beside)
        for key in beside:
            del part[key]
        if _refers_beside(part, rings):
            part["allOf"] = [option for option in part["allOf"] if not _is_ring(option, rings)]
            dropped.add("allOf")

    if "#" in rings:
        return mapped(schema, drop)
    new = dict(schema)
    for key in _DEFINITIONS:
        if isinstance(new.get(key), Mapping):
            named = new[key].items()
            new[key] = {n: mapped(s, drop) if f"#/{key}/{n}" in rings else s for n, s in named}
    return new


def _is_ring(part: Any, rings: set[str]) -> bool:
    return isinstance(part, Mapping) and part.get("$ref") in rings


def _refers_beside(part: Schema, rings: set[str]) -> bool:
    """Whether an `allOf` has a reference of these, and anything stands beside that."""
    parts = part.get("allOf")
    if not isinstance(parts, list) or not any(_is_ring(option, rings) for option in parts):
        return False
    return len(parts) > 1 or bool(set(part) - NOTES - {"allOf", *_DEFINITIONS})


def _rings(schema: Any) -> set[str]:
    targets = {"#": schema}
    for key in _DEFINITIONS:
        named = schema.get(key) if isinstance(schema, Mapping) else None
        for name, inner in (named if isinstance(named, Mapping) else {}).items():
            targets[f"#/{key}/{name}"] = inner
    leads = {ref: set(_references(target)) for ref, target in targets.items()}
    rings = set()
    for reference in leads:
        seen, waiting = set(), list(leads[reference])
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen.add(here)
                waiting += leads.get(here, ())
        if reference in seen:
            rings.add(reference)
    return rings


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for key, inner in value.items():
            if key not in _DEFINITIONS:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def any_of(schema: Any) -> Any:
    """Return the schema with each oneOf as an anyOf, to which references into it lead too."""

    def change(part: Schema) -> None:
        _one_of_as_any_of(part)
        if isinstance(part.get("$ref"), str):
            part["$ref"] = part["$ref"].replace("/oneOf/", "/anyOf/")

    return mapped(schema, change)


def _one_of_as_any_of(schema: Schema) -> None:
    options = schema.pop("oneOf", None)
    if options is None:
        return
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": options}]
    else:
        schema["anyOf"] = options


def _whole_counts(schema: Schema) -> None:
    """Turn counts such as 2.0 into integers, and remove the name of the draft."""
    schema.pop("$schema", None)
    for key in _COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def _not_here(schema: Schema) -> list[str]:
    keywords = []
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str) and not _regular(pattern):
        keywords.append("pattern")
    elif isinstance(pattern, str) and _NESTED.search(pattern) and _longest(schema) > MAX_NESTED:
        keywords += ["minLength", "maxLength"]  # whether both can hold takes too long to work out
    if isinstance(patterns, Mapping) and not _simple(list(patterns)):
        keywords += ["patternProperties", "additionalProperties"]
    properties, required = schema.get("properties", {}), schema.get("required", [])
    needed = {name for name in required if isinstance(name, str)} if required else set()
    if isinstance(properties, Mapping) and not set(properties) <= needed:
        keywords += ["minProperties", "maxProperties"]
    return keywords


def _regular(pattern: str) -> bool:
    """Whether llguidance takes a pattern: a regular one, with ends at its ends alone."""
    bare = _PLAIN_PARTS.sub(lambda match: "" if match[0].startswith("(?") else "x", pattern)
    return not (_BEYOND_REGULAR.search(pattern) or _INNER_ENDS.search(bare))


def _longest(schema: Schema) -> float:
    """Return the larger bound of a text's length, 0 without one."""
    bounds = (schema.get("minLength"), schema.get("maxLength"))
    return max([bound for bound in bounds if isinstance(bound, (int, float))], default=0)


def _simple(patterns: list[str]) -> bool:
    """Whether these are regular, and seen to match different names: each begins unlike others."""
    if not all(map(_regular, patterns)):
        return False
    begins = [_BEGINNING.match(pattern) for pattern in patterns]
    firsts = [match.group(1) for match in begins if match is not None]
    return len(patterns) == 1 or len(set(firsts)) == len(patterns)


def _exclusive(options: Any, root: Any) -> bool:
    """Whether options of a oneOf are seen to exclude each other, by their type or by one name."""
    if not isinstance(options, list):
        return False
    options = [_followed(option, root) for option in options]
    kinds = [option.get("type") for option in options]
    if all(isinstance(kind, str) for kind in kinds):
        plain = ["number" if kind == "integer" else kind for kind in kinds]
        if len(set(plain)) == len(plain):
            return True
    names = [_tags(option) for option in options]
    shared = set.intersection(*map(set, names)) if names else set()
    return any(_disjoint([tags[name] for tags in names]) for name in shared)


def _followed(option: Any, root: Any) -> Mapping[str, Any]:
    """Return the schema behind a local reference, {} where there is none."""
    reference = option.get("$ref") if isinstance(option, Mapping) else None
    target = resolve(reference, root) if isinstance(reference, str) else option
    return target if isinstance(target, Mapping) else {}


def _tags(option: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return {name: values} of the required properties that list their values."""
    properties, required = option.get("properties"), option.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    tags = {}
    for name, schema in properties.items():
        if name in required and isinstance(schema, Mapping) and option.get("type") == "object":
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if isinstance(values, list):
                tags[name] = values
    return tags


def _disjoint(lists: list[list[Any]]) -> bool:
    """Whether no value is in two lists; numbers and texts that look alike count as one."""
    texts = [
        text for values in lists for text in {str(value).removesuffix(".0") for value in values}
    ]
    return len(set(texts)) == len(texts)


_COUNTS = tuple(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
_BEGINNING = re.compile(r"\^([\w-])")


def problem_of(unenforced: Sequence[Unenforced], result: Result) -> tuple[str, str] | None:
    """Return (place of the schema, what is wrong) for a complete answer, None if it fits.

    A text beside calls is not looked at: the answer was calls or a text of the schema.
    """
    for part in unenforced:
        texts = [result.text] if part.tool is None and not result.tool_calls else []
        texts += [call.arguments for call in result.tool_calls if call.name == part.tool]
        for text in texts:
            problem = _problem(part.schema, text)
            if problem is not None:
                return part.place, problem[:MAX_PROBLEM]
    return None


def require_checkable(part: Unenforced) -> None:
    """Raise InvalidRequestError where no answer can be checked against a schema: it is none."""
    import jsonschema_rs

    try:
        _validator(part.schema)
    except jsonschema_rs.ValidationError as error:
        pointer = "".join(f"/{step}" for step in error.instance_path)
        raise at(part.place, pointer, f"this is no JSON schema: {error.message}") from None


def _problem(schema: str, text: str) -> str | None:
    import jsonschema_rs

    try:
        _validator(schema).validate(json.loads(text))
    except jsonschema_rs.ValidationError as error:
        pointer = "".join(f"/{step}" for step in error.instance_path)
        return f"{error.message} (at {pointer or 'the whole value'})"
    except (ValueError, RecursionError) as error:  # no JSON
        return str(error)
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """Return the validator of a schema; it never fetches other documents."""
    import jsonschema_rs

    value = json.loads(schema)
    stated = str(value.pop("$schema", "")) or schema  # else a reference to a draft's schema says it
    draft = _DRAFT.search(stated)
    kind = _VALIDATORS.get(draft[1] if draft else "", "Draft202012Validator")
    return getattr(jsonschema_rs, kind)(
        value,
        validate_formats=False,
        retriever=_no_document,
        pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
    )


_DRAFT = re.compile(r"json-schema\.org/(?:draft/)?(draft-0[467]|2019-09|2020-12)")
_VALIDATORS = {
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft-07": "Draft7Validator",
    "2019-09": "Draft201909Validator",
}


def _no_document(uri: str) -> Any:
    raise ValueError(f"{uri[:100]} is another document")
