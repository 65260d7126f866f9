"""Options of an engine: one dataclass, its keyword arguments and its help."""

from dataclasses import fields
from typing import get_args

import pytest

from mlxinfer import LLM, InvalidRequestError
from mlxinfer.session.options import EngineArguments, EngineOptions, help_of

INTERNAL = ["room_bytes", "fixed_proposals"]


def test_arguments_are_the_fields_with_their_types() -> None:
    given = EngineArguments.__annotations__
    assert [*given, *INTERNAL] == [each.name for each in fields(EngineOptions)]
    for name, kind in given.items():
        assert get_args(EngineOptions.__annotations__[name])[0] == kind, name
        assert help_of(name) in (LLM.__doc__ or ""), name


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"kv_bits": 5}, "kv_bits"),
        ({"kv_sinks": 4}, "kv_sinks"),
        ({"max_memory": "much"}, "much"),
        ({"speculate": "magic"}, "speculate"),
        ({"ranks": 0}, "ranks"),
        ({"slow_experts": True}, "expert_memory"),
        ({"prefix_cache": False, "disk_cache": "1GB"}, "disk_cache"),
        ({"prefill_chunk": 64, "prefill_slice": 100}, "prefill_slice"),
    ],
)
def test_wrong_options_are_refused_when_they_are_built(given: EngineArguments, names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        EngineOptions(**given)
