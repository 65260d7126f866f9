"""The names of `import mlxinfer`: __all__, the error tree, the version."""

import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest

import mlxinfer
from mlxinfer import core, errors, library, outputs, program

HERE = {"LLM", "__version__", "convert"}  # not in the modules compared below
CORE = {"FinishReason", "Request", "SamplingParams", "TokenEvent"}
OUTPUTS = {
    "Delta", "Facts", "Ranked", "Result", "Results", "Timing", "ToolCall", "ToolCallDelta",
}  # fmt: skip
LIBRARY = {"convert_model", "list_models", "pull"}
PROGRAM = {"Branches", "Program", "Selection"}
HOMES = [(CORE, core), (OUTPUTS, outputs), (LIBRARY, library), (PROGRAM, program)]


def test_all_is_every_error_and_the_listed_names() -> None:
    types = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    tree = {name for name, value in types.items() if value.__module__ == errors.__name__}
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


def undocumented() -> Iterator[str]:
    """Public methods and functions of the listed names, inherited ones of this package too."""
    for name in mlxinfer.__all__:
        value = getattr(mlxinfer, name)
        parts = {name: value}
        if isinstance(value, type):
            bases = [base for base in value.__mro__ if base.__module__.startswith("mlxinfer")]
            parts |= {f"{name}.{n}": v for base in reversed(bases) for n, v in vars(base).items()}
        for path, part in parts.items():
            is_code = isinstance(part, FunctionType | property | cached_property | classmethod)
            if is_code and not path.rpartition(".")[2].startswith("_") and not part.__doc__:
                yield path


def test_the_public_api_is_documented() -> None:
    """The linter asks for docstrings of modules and classes; the interface needs them all."""
    assert not list(undocumented())
