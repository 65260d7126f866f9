"""Options of an engine: one dataclass, its keyword arguments and its help."""

from dataclasses import fields
from typing import get_args

from mlxinfer import LLM
from mlxinfer.session.options import EngineArguments, EngineOptions, help_of

INTERNAL = ["room_bytes", "fixed_proposals"]


def test_arguments_are_the_fields_with_their_types() -> None:
    given = EngineArguments.__annotations__
    assert [*given, *INTERNAL] == [each.name for each in fields(EngineOptions)]
    for name, kind in given.items():
        assert get_args(EngineOptions.__annotations__[name])[0] == kind, name
        assert help_of(name) in (LLM.__doc__ or ""), name
