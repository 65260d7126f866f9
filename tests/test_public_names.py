"""The names of `import mlxinfer`: __all__, the error tree, the version."""

import tomllib
from pathlib import Path

import pytest

import mlxinfer
from mlxinfer import core, errors, library, outputs, program

HERE = {"LLM", "__version__"}  # not in the modules compared below
CORE = {"FinishReason", "Request", "SamplingParams", "TokenEvent"}
OUTPUTS = {
    *("Delta", "Facts", "Ranked", "Result", "Results", "Timing", "ToolCall", "ToolCallDelta"),
}
LIBRARY = {"convert_model", "list_models", "pull"}
PROGRAM = {"Branches", "Program", "Selection"}
HOMES = [(CORE, core), (OUTPUTS, outputs), (LIBRARY, library), (PROGRAM, program)]


def test_all_is_every_error_and_the_listed_names() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert sorted(mlxinfer.__all__) == sorted(tree | CORE | OUTPUTS | LIBRARY | PROGRAM | HERE)


def test_each_name_is_the_one_of_its_module() -> None:
    for name in set(mlxinfer.__all__) - HERE:
        home = next((module for names, module in HOMES if name in names), errors)
        assert getattr(mlxinfer, name) is getattr(home, name)
        assert name in dir(mlxinfer)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        mlxinfer.LMM  # noqa: B018


def test_the_version_is_the_one_in_pyproject() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert mlxinfer.__version__ == pyproject["project"]["version"]
