"""mlxinfer cache: sizes by namespace, and a clear that touches nothing but the cache."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.cache.disk import DiskTier, Entry, namespace_key, page_key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, with two entries of one namespace and one of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "mlxinfer" / "kv"
    for name, count in (("one", 2), ("other", 1)):
        tier = DiskTier(str(root), namespace_key(name), max_bytes=1 << 20)
        for i in range(count):
            key, payload = page_key(tier.namespace, [i]), memoryview(bytes(1000))
            tier.store(Entry(key, tier.namespace, (i,), payload))
        tier.close()
    return root


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_info_counts_what_is_there(folder: Path, outcome: Any) -> None:
    total = sum(path.stat().st_size for path in files(folder))
    shown = outcome.json("cache", "info")
    assert (shown["dir"], shown["bytes"]) == (str(folder), total)
    assert sorted(space["entries"] for space in shown["namespaces"]) == [1, 2]
    assert {s["name"] for s in shown["namespaces"]} == {
        namespace_key(name).hex() for name in ("one", "other")
    }
    lines = outcome("cache").out.splitlines()
    assert outcome("cache", "info").out.splitlines() == lines
    assert lines[0].startswith(f"{folder}: 3.")
    assert lines[1].split() == ["NAMESPACE", "ENTRIES", "SIZE"]
    assert len(lines) == 4


def test_no_cache_is_no_error(tmp_path: Path, outcome: Any) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert outcome.json("cache", "info", "--dir", nowhere) == {
        "dir": nowhere,
        "bytes": 0,
        "namespaces": [],
    }
    assert outcome("cache", "info", "--dir", nowhere).code == 0
    assert outcome("cache", "clear", "--yes", "--dir", nowhere).code == 0


def test_clear_removes_the_cache_and_nothing_else(folder: Path, outcome: Any) -> None:
    space = next(folder.iterdir())
    left_over = space / f"{'ab' * 20}.0f.tmp"
    left_over.write_bytes(b"half an entry")
    mine = [folder / "notes.txt", space / "notes.txt", folder / "mine" / f"{'ab' * 20}.kv"]
    mine[-1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    total = sum(path.stat().st_size for path in files(folder) if path not in mine)
    freed = outcome.json("cache", "clear", "--yes")["freed_bytes"]
    assert freed == total
    assert sorted(files(folder)) == sorted(mine)


def test_clear_asks_first(folder: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("cache", "clear").code == 2
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert outcome("cache", "clear").code == 1
    assert len(files(folder)) == 3
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    seen = outcome("cache", "clear")
    assert (seen.code, files(folder)) == (0, [])
    assert "freed" in seen.out
