"""Functions as tools become what transformers makes of them, or what is missing is named."""

# ruff: noqa: UP007, UP045  # both spellings of a union are tested

import random
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from mlxinfer import LLM, InvalidRequestError
from mlxinfer.text.tools.functions import tool_of


class Unit(Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


HINTS = [
    int, float, str, bool, Any, list, dict, tuple, list[int], list[list[str]], dict[str, float],
    tuple[int, str], Optional[int], Union[int, str], int | str | None, Union[list[int], str],
    Literal["a", "b"], Literal[1, "x", None], Unit, list[Unit], dict[str, list[bool]],
    Union[int, int | None], list[Optional[str]], Union[list, tuple],
]  # fmt: skip
TEXTS = [
    "A place.", "Where it is\n            on this Earth", "Of two (choices: [\"a\", \"b\"])",
    "See: this, with a colon", "(optional) maybe",
]  # fmt: skip


def made(seed: int) -> Callable[..., Any]:
    """A function with random arguments, hints and sections."""
    draw = random.Random(seed)
    names = [f"value_{number}" for number in range(draw.randint(0, 4))]
    optional = draw.randint(0, len(names))
    given = [name if i < optional else f"{name}=None" for i, name in enumerate(names)]
    scope: dict[str, Any] = {}
    exec(f"def tool_{seed}({', '.join(given)}): pass", scope)
    function: Callable[..., Any] = scope[f"tool_{seed}"]
    function.__annotations__ = {name: draw.choice(HINTS) for name in names}
    if draw.random() < 0.5:
        function.__annotations__["return"] = draw.choice([*HINTS, None, object])
    doc = "\n    Do what is asked.\n\n    In two paragraphs.\n"
    if names:
        lines = "".join(f"        {name}: {draw.choice(TEXTS)}\n" for name in names)
        doc += f"\n    Args:\n{lines}"
    if draw.random() < 0.5:
        doc += "\n    Returns:\n        What came of it.\n"
    if draw.random() < 0.3:
        doc += "\n    Raises:\n        OSError: it is late.\n"
    function.__doc__ = doc
    return function


@pytest.mark.parametrize("seed", range(60))
def test_random_functions_become_the_tools_of_transformers(seed: int) -> None:
    assert tool_of(made(seed)) == get_json_schema(made(seed))


def undescribed(place: str) -> None:
    """Find a place."""


def unhinted(place) -> None:  # type: ignore[no-untyped-def]
    """Find a place.

    Args:
        place: where.
    """


def strange(place: random.Random) -> None:
    """Find a place.

    Args:
        place: where.
    """


def silent(place: str) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (undescribed, r"undescribed\(\) has no line for 'place' under Args:"),
        (unhinted, r"unhinted\(\) has no type hint for 'place'"),
        (strange, r"strange\(\) has 'place' of .*Random"),
        (silent, r"silent\(\) has no docstring"),
        (lambda: 0, "has no docstring"),
    ],
)
def test_what_makes_no_schema_is_refused_by_name(function: Callable[..., Any], said: str) -> None:
    with LLM("demo") as llm, pytest.raises(InvalidRequestError, match=said):
        llm.chat("Where?", tools=[function])


class Weather:
    """Weather of a place."""

    def now(self, city: str, unit: Literal["c", "f"] = "c") -> str:
        """Get the weather.

        Args:
            city: the name of the city,
                with its country.
            unit: of the temperature.
        """
        return f"{city}: 20 {unit}"


def test_a_chat_takes_functions_and_dicts_side_by_side() -> None:
    method, plain = Weather().now, tool_of(made(7))
    assert tool_of(method) == get_json_schema(method)
    options: dict[str, Any] = {"tool_choice": "required", "temperature": 0, "max_tokens": 60}
    with LLM("demo") as llm:
        by_function = llm.chat("Weather in Rome?", tools=[method, plain], **options)
        by_dict = llm.chat("Weather in Rome?", tools=[tool_of(method), plain], **options)
    assert by_function.token_ids == by_dict.token_ids
    assert by_function.prompt_tokens == by_dict.prompt_tokens
