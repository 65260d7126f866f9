"""Functions of a Python file as tools of a conversation in the terminal."""

from pathlib import Path

import pytest

from mlxinfer.cli._tools import FunctionTools, JoinedTools, conversation_tools
from mlxinfer.config.file import ConfigFile
from mlxinfer.errors import InvalidRequestError

SOURCE = '''
from enum import Enum
from pathlib import Path

class Unit(Enum):
    CELSIUS = "c"

def temperature(city: str, unit: str = "c") -> dict:
    """The temperature of a city.

    Args:
        city: its name.
        unit: c or f.
    """
    return {"city": city, "degrees": _degrees(city), "unit": unit}

def _degrees(city: str) -> int:
    return len(city)

def fails(reason: str) -> str:
    """Always fails.

    Args:
        reason: why.
    """
    raise ValueError(reason)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(SOURCE)
    return path


def test_the_functions_of_a_file_are_offered_and_called(file: Path) -> None:
    tools = conversation_tools(ConfigFile(), file)
    assert [s["function"]["name"] for s in tools.schemas] == ["temperature", "fails"]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["city"]
    assert not tools.allows("temperature"), "a call asks first"
    called = tools.call("temperature", '{"city": "Rome"}')
    assert called == '{"city": "Rome", "degrees": 4, "unit": "c"}'
    tools.close()


def test_what_goes_wrong_in_a_call_is_a_text_for_the_model(file: Path) -> None:
    tools = FunctionTools(file)
    assert tools.call("fails", '{"reason": "no net"}') == "Error: ValueError: no net"
    assert tools.call("temperature", "[").startswith("Error: JSONDecodeError")
    assert "missing 1 required" in tools.call("temperature", "")
    assert JoinedTools([tools]).call("other", "{}") == "Error: there is no tool 'other'."


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:", "does not run: SyntaxError"),
        ("x = 1", "defines no function"),
        ("def f(a: int): ...", "docstring"),
        ("raise SystemError('ended')", "ended"),
        ("import sys; sys.exit(3)", "does not run: SystemExit: 3"),
    ],
)
def test_a_file_that_offers_nothing_is_refused(tmp_path: Path, source: str, reason: str) -> None:
    path = tmp_path / "tools.py"
    path.write_text(source)
    with pytest.raises(InvalidRequestError, match=reason):
        FunctionTools(path)


def test_two_tools_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="Two tools are called temperature"):
        JoinedTools([FunctionTools(file), FunctionTools(file)])
