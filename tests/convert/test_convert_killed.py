"""Killed at any call that changes the disk and resumed: the same bytes as without that."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from convert_cases import contents, convert, write_source
from killed_convert import SHARD_BYTES

from mlxinfer.convert.files import ShardFile
from mlxinfer.convert.workplace import Workplace
from mlxinfer.convert.write import Journal
from mlxinfer.errors import ConversionError

SCRIPT = str(Path(__file__).parent / "killed_convert.py")


def killed(source: Path, out: Path, number: int) -> bool:
    """Whether the conversion has as many calls that change the disk; if so it is killed then."""
    command = [sys.executable, SCRIPT, str(source), str(out), str(number)]
    status = subprocess.run(command, stdout=subprocess.PIPE).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.ci
def test_a_conversion_killed_twice_resumes_with_what_it_has(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "source", shards=2), tmp_path / "out"
    convert(source, tmp_path / "undisturbed", shard_bytes=SHARD_BYTES)
    known = 0
    for number in (90, 60):
        assert killed(source, out, number)
        journal = Journal(tmp_path / "out.partial" / "journal.jsonl")
        assert len(journal.tensors) > known + 3
        known = len(journal.tensors)
    convert(source, out, shard_bytes=SHARD_BYTES, run={"resume": True})
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


def test_a_line_that_a_kill_cut_short_is_done_again(tmp_path: Path, monkeypatch) -> None:
    source = write_source(tmp_path / "source")
    convert(source, tmp_path / "undisturbed")
    monkeypatch.setattr("mlxinfer.convert.write.CHECKPOINT_BYTES", 1)
    right, calls = ShardFile.write, 0

    def stopping(self, name, offset, data):
        nonlocal calls
        calls += 1
        if calls == 40:
            raise KeyboardInterrupt
        return right(self, name, offset, data)

    monkeypatch.setattr(ShardFile, "write", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    journal = tmp_path / "out.partial" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 5
    journal.write_bytes(b"".join(lines)[:-7])
    monkeypatch.setattr(ShardFile, "write", right)
    convert(source, tmp_path / "out", run={"resume": True})
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


def test_killed_before_tidying_up_and_the_output_deleted(tmp_path: Path, monkeypatch) -> None:
    """The journal says that all is done, but what it speaks of is gone."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "tidy_up", lambda self: None)
        convert(source, out)
    expected = contents(out)
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()
    shutil.rmtree(out)
    with pytest.raises(ConversionError, match=r"model\.safetensors is damaged, .* use --restart"):
        convert(source, out, run={"resume": True})
    convert(source, out, run={"restart": True})
    assert contents(out) == expected


def test_lines_after_one_that_was_cut_short_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin({"source": "a"})
    journal.add_tensors({"one": {"error": {}}})
    path.write_bytes(path.read_bytes()[:-3])
    Journal(path).add_tensors({"two": {"error": {}}})
    assert list(Journal(path).tensors) == ["two"]


def test_the_journal_speaks_of_what_is_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    """A power cut takes what was not synced: data first, then the line, each of them synced."""
    monkeypatch.setattr("mlxinfer.convert.write.CHECKPOINT_BYTES", 1)
    events: list[tuple[str, str]] = []
    pwrite, fsync, append = os.pwrite, os.fsync, Journal._append
    names = {}

    def name_of(handle: int) -> str:
        for path in (tmp_path / "out.partial").rglob("*"):
            names[path.stat().st_ino] = path.name.removesuffix(".partial")
        return names.get(os.fstat(handle).st_ino, "")

    def appended(self: Journal, lines: list[dict]) -> None:
        events.extend(("line", kind) for line in lines for kind in line)
        append(self, lines)

    monkeypatch.setattr(
        os, "pwrite", lambda *a: events.append(("write", name_of(a[0]))) or pwrite(*a)
    )
    monkeypatch.setattr(os, "fsync", lambda h: events.append(("sync", name_of(h))) or fsync(h))
    monkeypatch.setattr(Journal, "_append", appended)
    convert(write_source(tmp_path / "source"), tmp_path / "out")
    file, lines = "model.safetensors", [i for i, e in enumerate(events) if e == ("line", "tensor")]
    assert len(lines) > 10
    for index in lines:
        before = [event for event in events[:index] if event[1] == file]
        assert before[-1] == ("sync", file)
        after = [event for event in events[index:] if event[0] != "line"]
        assert after[0] == ("sync", "journal.jsonl")


def swap_a_weight(source: Path) -> None:
    """Another file of equal size and modification time."""
    path = source / "model.safetensors"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap_a_letter(source: Path) -> None:
    path = source / "tokenizer.json"
    stat, text = path.stat(), path.read_text()
    path.write_text(text.replace('"!":0', '"!":1').replace('"!": 0', '"!": 1'))
    assert path.read_text() != text
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [swap_a_weight, swap_a_letter])
def test_source_changed_between_kill_and_resume_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("mlxinfer.convert.run.write_shard", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out)
    change(source)
    with pytest.raises(ConversionError, match=r"source has changed.*--restart"):
        convert(source, out, run={"resume": True})
    assert not out.exists()


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt
