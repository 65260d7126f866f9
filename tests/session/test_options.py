"""Options of an engine: one dataclass, its keyword arguments, its help and its page of the docs."""

from dataclasses import fields
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from mlxinfer import LLM
from mlxinfer.errors import InvalidRequestError
from mlxinfer.session.options import EngineArguments, EngineOptions, help_of

INTERNAL = ["room_bytes", "fixed_proposals", "gives_pages"]


def test_arguments_are_the_fields_with_their_types() -> None:
    given = EngineArguments.__annotations__
    assert [*given, *INTERNAL] == [engineoption.name for engineoption in fields(EngineOptions)]
    for name, kind in given.items():
        assert get_args(EngineOptions.__annotations__[name])[0] == widened(kind), name
        assert help_of(name) in (LLM.__doc__ or ""), name


def widened(kind: Any) -> Any:
    """The type without the literals, which only help editors."""
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return tuple[tuple(widened(part) for part in get_args(kind))]  # type: ignore[misc]
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, [widened(part) for part in get_args(kind)])
    return kind


@pytest.mark.parametrize("user", ["bob:secret", "secret", "bob:se@cret", ":secret", "a b:secret"])
@pytest.mark.parametrize("name", ["peers", "prefill_at"])
def test_no_address_of_a_peer_has_a_password(name: str, user: str) -> None:
    """It is refused before it is logged or listed, and the error does not repeat it."""
    url = f"http://{user}@studio.local:8080"
    options: dict[str, Any] = {name: [url] if name == "peers" else url}
    with pytest.raises(InvalidRequestError) as refused:
        EngineOptions(**options)
    assert "cret" not in str(refused.value)
    assert "MLXINFER_API_KEY" in str(refused.value)
