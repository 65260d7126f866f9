"""JSON schemas in the keywords that llguidance knows: equivalent ones for some that it does not.

Every rewrite accepts the same values (JSON Schema 2020-12), but for `format`, which is an
annotation unless llguidance knows it. What has no equivalent here is left as it is, and refused
when compiled.
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]
FORMATS = frozenset(  # llguidance's; it refuses others
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid"),
    )
)
_ONE = frozenset(
    (
        *("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not"),
        *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_COMPOSED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "$dynamicRef"))


def rewritten(schema: Any) -> Any:
    """The schema with keywords replaced, in all of its parts; `schema` itself is not changed."""
    if not isinstance(schema, Mapping):
        return schema
    new: Schema = {}
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            new[key] = [rewritten(each) for each in value]
        elif key in _ONE:
            new[key] = rewritten(value)
        elif key in _MAPS and isinstance(value, Mapping):
            new[key] = {name: rewritten(each) for name, each in value.items()}
        else:
            new[key] = value
    for rewrite in _REWRITES:
        rewrite(new)
    return new


def _format(schema: Schema) -> None:
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)


def _without_effect(schema: Schema) -> None:
    """Remove keywords that allow everything."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
        schema.pop("uniqueItems", None)
    for key in ("propertyNames", "unevaluatedProperties", "unevaluatedItems"):
        if schema.get(key) in (True, {}) and schema[key] is not False:
            del schema[key]
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _unevaluated(schema: Schema) -> None:
    """unevaluatedProperties is additionalProperties where nothing else evaluates properties."""
    if "unevaluatedProperties" not in schema or not _COMPOSED.isdisjoint(schema):
        return
    value = schema.pop("unevaluatedProperties")
    schema.setdefault("additionalProperties", value)


def _names(schema: Schema) -> None:
    """propertyNames with a list or a pattern of names, where no property is declared."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or not {"properties", "patternProperties"}.isdisjoint(schema):
        return
    rest = set(names) - {"type", "description", "title"}
    values = schema.get("additionalProperties", True)
    if rest == {"enum"} and isinstance(names["enum"], list):
        schema["properties"] = {name: values for name in names["enum"] if isinstance(name, str)}
    elif rest == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: values}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _dependencies(schema: Schema) -> None:
    """A property that depends on another: either it is absent, or what it demands holds."""
    demands: list[tuple[str, Any]] = []
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = schema.get(key)
        if not isinstance(given, Mapping):
            continue
        del schema[key]
        for name, demand in given.items():
            demands.append((name, {"required": demand} if isinstance(demand, list) else demand))
    for name, demand in demands:
        absent = {"properties": {name: False}}
        present = {"allOf": [{"required": [name]}, rewritten(demand)]}
        _add(schema, {"anyOf": [absent, present]})


def _negation(schema: Schema) -> None:
    """`not` of values that `enum` or `type` beside it lists, of a required name, of nothing."""
    inner = schema.get("not")
    if inner is False:
        del schema["not"]
    if not isinstance(inner, Mapping):
        return
    keys = set(inner)
    if keys in ({"enum"}, {"const"}) and isinstance(schema.get("enum"), list):
        excluded = inner["enum"] if "enum" in inner else [inner["const"]]
        if isinstance(excluded, list):
            schema["enum"] = [value for value in schema["enum"] if not _among(value, excluded)]
            del schema["not"]
    elif keys == {"type"} and isinstance(schema.get("type"), list):
        excluded = inner["type"] if isinstance(inner["type"], list) else [inner["type"]]
        if "number" not in excluded or "integer" not in schema["type"]:
            schema["type"] = [kind for kind in schema["type"] if kind not in excluded]
            del schema["not"]
    elif keys == {"required"} and schema.get("type") == "object":
        names = inner["required"]
        if isinstance(names, list) and names:
            absent = [{"properties": {name: False}} for name in names]
            del schema["not"]
            _add(schema, {"anyOf": absent})


def _condition(schema: Schema) -> None:
    """if/then/else on the constant of a property whose values are listed."""
    tested = schema.get("if")
    if not isinstance(tested, Mapping) or not set(tested) <= {"properties", "required", "type"}:
        return
    wanted, declared = tested.get("properties"), schema.get("properties")
    if not isinstance(wanted, Mapping) or len(wanted) != 1 or not isinstance(declared, Mapping):
        return
    ((name, test),) = wanted.items()
    values = declared[name].get("enum") if isinstance(declared.get(name), Mapping) else None
    if not isinstance(test, Mapping) or set(test) - {"type"} not in ({"const"}, {"enum"}):
        return
    chosen = test["enum"] if "enum" in test else [test["const"]]
    required = tested.get("required", [])
    if not isinstance(values, list) or not isinstance(chosen, list) or required not in ([], [name]):
        return
    if tested.get("type", "object") != "object" or schema.get("type") != "object":
        return
    others = [value for value in values if not _among(value, chosen)]
    holds: list[Schema] = [{"properties": {name: {"enum": chosen}}, "required": [name]}]
    fails: list[Schema] = [{"properties": {name: {"enum": others}}, "required": [name]}]
    (fails if required else holds).append({"properties": {name: False}})
    then, other = schema.pop("then", True), schema.pop("else", True)
    del schema["if"]
    options = [{"allOf": [case, then]} for case in holds]
    options += [{"allOf": [case, other]} for case in fails]
    _add(schema, {"anyOf": options})


def _among(value: Any, values: list[Any]) -> bool:
    """Whether JSON values are equal: 1 is 1.0, and no bool."""
    return any(
        value == each and isinstance(value, bool) is isinstance(each, bool) for each in values
    )


def _add(schema: Schema, other: Schema) -> None:
    """Let a schema demand another one, too."""
    if "anyOf" in other and "anyOf" not in schema:
        schema["anyOf"] = other["anyOf"]
    else:
        schema["allOf"] = [*schema.get("allOf", []), other]


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _format,
    _without_effect,
    _unevaluated,
    _names,
    _dependencies,
    _negation,
    _condition,
)
