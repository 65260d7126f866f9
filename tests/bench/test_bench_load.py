"""Loads are counted right: all bytes are read, and by mlxinfer once."""

from pathlib import Path

import pytest

from tests.bench.checkpoints import MIDDLE, write_checkpoint
from tests.bench.load import measure


@pytest.mark.parametrize("side", ["read", "mlxinfer"])
def test_every_byte_is_counted(side: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, MIDDLE)
    stored = (folder / "model.safetensors").stat().st_size
    cost = measure(side, folder)
    assert cost.wall_s > 0
    assert cost.peak_bytes > 0.4 * stored  # 32 bits become 16
    if cost.read_bytes:  # counted on Linux alone
        assert stored * 0.99 <= cost.read_bytes <= stored * 1.05 + 100_000
