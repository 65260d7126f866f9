"""How large a field may be that holds any JSON. Knows plain data; no field's meaning."""

from typing import Any

import msgspec

from ...errors import InvalidRequestError
from ...grammar.schema import MAX_BYTES


def check_extent(value: Any, *, param: str, max_depth: int) -> None:
    """Raise InvalidRequestError where plain data is long or nests deeper than `max_depth`.

    The length comes first, and is found in C: a walk through 30 MB of numbers takes a minute.
    """
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise _too_deep(param, max_depth) from None
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"{param} has {size} bytes of JSON; at most {MAX_BYTES} are accepted. Send less of it.",
            param=param,
        )
    _check_depth(value, param=param, max_depth=max_depth)


def _check_depth(value: Any, *, param: str, max_depth: int) -> None:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, (dict, list)):
            continue
        if depth > max_depth:
            raise _too_deep(param, max_depth)
        children = item.values() if isinstance(item, dict) else item
        stack += [(child, depth + 1) for child in children]


def _too_deep(param: str, max_depth: int) -> InvalidRequestError:
    return InvalidRequestError(f"{param} nests more than {max_depth} levels deep.", param=param)
