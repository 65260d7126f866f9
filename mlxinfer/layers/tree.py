"""What arrays a tree of layers holds. Knows only that layers declare `__slots__`."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx


def arrays(item: Any) -> Iterator[mx.array]:
    """Every array reachable through lists, tuples and the slots of this package's classes, once."""
    seen: set[int] = set()
    stack = [item]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            yield item
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif type(item).__module__.startswith("mlxinfer."):
            slots = getattr(type(item), "__slots__", ())
            stack.extend(getattr(item, name) for name in slots)
