"""The advice where MLX cannot be loaded, for each kind of machine."""

import os
import sys
from types import ModuleType

import pytest

from mlxinfer.backend import (
    BUFFER_VARIABLE,
    _first_memory_limit,
    _limit_cache,
    advice,
    command_buffer_limits,
    command_buffer_mb,
    limit_memory,
    require_mlx,
)
from mlxinfer.errors import BackendMissingError


def test_advice_fits_the_machine() -> None:
    for system, machine, words in (
        ("linux", "x86_64", 'pip install -e ".[cpu]"'),
        ("darwin", "arm64", "--force-reinstall mlx"),
        ("darwin", "x86_64", "Install an arm64 Python"),
        ("win32", "AMD64", "MLX runs on macOS"),
    ):
        assert words in advice(system, machine)


class FakeMLX(ModuleType):
    """MLX with limits of its memory, and nothing else."""

    def __init__(self, cache_limit: int = 0, memory_limit: int = 0) -> None:
        super().__init__("mlx.core")
        self.cache_limit, self.memory_limit = cache_limit, memory_limit
        self.active_memory = self.clears = 0

    def set_cache_limit(self, limit: int) -> int:
        before, self.cache_limit = self.cache_limit, limit
        return before

    def set_memory_limit(self, limit: int) -> int:
        before, self.memory_limit = self.memory_limit, limit
        return before

    def get_active_memory(self) -> int:
        return self.active_memory

    def clear_cache(self) -> None:
        self.clears += 1


class LoadedModel:
    """A model: something that is collected."""


@pytest.mark.parametrize("own_gb", [48, 9])
def test_mlx_may_use_what_live_models_take(own_gb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the program has beside them; a lower limit of its own stays."""
    gb = 1 << 30
    fake = FakeMLX(memory_limit=own_gb * gb)
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", fake)
    monkeypatch.setattr("mlxinfer.backend._promised", {})
    _first_memory_limit.cache_clear()
    one, other = LoadedModel(), LoadedModel()
    fake.active_memory = 4 * gb
    limit_memory(one, 8 * gb)
    assert fake.memory_limit == 9 * gb
    fake.active_memory = 42 * gb  # of which the models have 40
    limit_memory(other, 32 * gb)
    assert fake.memory_limit == min(42 * gb * 17 // 16, own_gb * gb)
    del one
    fake.active_memory = 0
    limit_memory(other, 32 * gb)
    assert fake.memory_limit == min(34 * gb, own_gb * gb)
    assert fake.clears == 3
    _first_memory_limit.cache_clear()


@pytest.mark.parametrize(("before", "after"), [(24 << 30, 1 << 30), (5 << 20, 5 << 20)])
def test_mlx_keeps_few_buffers(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the memory at most; a lower limit of the program's own stays."""
    fake = FakeMLX(before)
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", fake)
    monkeypatch.setattr("mlxinfer.backend.total_memory_bytes", lambda: 16 << 30)
    _limit_cache.cache_clear()
    require_mlx()
    require_mlx()
    assert fake.cache_limit == after


@pytest.mark.parametrize(("given", "found"), [(None, "512"), ("40", "40")])
def test_command_buffers_on_a_mac_take_a_layer_of_the_kv_cache(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", FakeMLX(0))
    monkeypatch.setattr("mlxinfer.backend.total_memory_bytes", lambda: 32 << 30)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv(BUFFER_VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(BUFFER_VARIABLE)
    _limit_cache.cache_clear()
    require_mlx()
    assert os.environ[BUFFER_VARIABLE] == found
    assert command_buffer_limits() == f"{found} Mi elements, 40 to 50 operations"
    assert command_buffer_mb(1 << 30) == 50


def test_the_reason_is_part_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendMissingError, match=r"MLX cannot be loaded \(.*mlx\.core"):
        require_mlx()
