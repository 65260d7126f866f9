"""The advice where MLX cannot be loaded, for each kind of machine."""

import sys
from types import ModuleType

import pytest

from mlxinfer.backend import advice, require_mlx
from mlxinfer.errors import BackendMissingError


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("linux", "x86_64", 'pip install "mlxinfer[cpu]"'),
        ("darwin", "arm64", "--force-reinstall mlx"),
        ("darwin", "x86_64", "Install an arm64 Python"),
        ("win32", "AMD64", "MLX runs on macOS"),
    ],
)
def test_advice_fits_the_machine(system: str, machine: str, words: str) -> None:
    assert words in advice(system, machine)


def test_nothing_is_said_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", ModuleType("mlx.core"))
    require_mlx()


def test_the_reason_is_part_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendMissingError, match=r"MLX cannot be loaded \(.*mlx\.core"):
        require_mlx()
