"""A repository of the hub, converted shard by shard: nothing of it stays on the disk."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from convert_cases import contents, write_source

from mlxinfer.cli import main

sys.path.append(str(Path(__file__).parents[1] / "hub"))

from standin import Repo, StandIn

Convert = Callable[..., SimpleNamespace]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", shards=3)


@pytest.fixture
def convert(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Convert:
    def call(hub: StandIn, *options: str) -> SimpleNamespace:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        with pytest.raises(SystemExit) as stop:
            main(["convert", "org/tiny", str(tmp_path / "out"), "--check", "tensors", *options])
        return SimpleNamespace(code=stop.value.code, err=capsys.readouterr().err)

    return call


def repo(source: Path) -> dict[str, Repo]:
    return {"org/tiny": Repo({path.name: path.read_bytes() for path in source.iterdir()})}


@pytest.mark.parametrize("calibration", ["none", "text"])
def test_shards_are_fetched_once_and_go(
    source: Path, tmp_path: Path, convert: Convert, calibration: str
) -> None:
    (tmp_path / "text").write_text("some words and more of them " * 20)
    text = calibration if calibration == "none" else str(tmp_path / "text")
    with StandIn(repo(source)) as hub:
        seen = convert(hub, "--calibration", text)
        assert seen.code == 0, seen.err
        whole = [line for line in hub.asked_for("GET /cdn/") if "bytes=" not in line]
        assert len(whole) == len(set(whole)) == 3 + 1  # the shards, and the tokenizer
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_is_fetched_is_not_fetched_again(
    source: Path, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxinfer.convert.files import ShardFile

    right, calls = ShardFile.write, 0

    def failing(self, name, offset, data):
        nonlocal calls
        calls += 1
        if calls == 60:
            raise OSError(28, "No space left on device")
        return right(self, name, offset, data)

    with StandIn(repo(source)) as hub:
        with monkeypatch.context() as patch:
            patch.setattr(ShardFile, "write", failing)
            seen = convert(hub, "--calibration", "none")
        assert seen.code == 1
        assert "--resume" in seen.err
        hub.log.clear()
        seen = convert(hub, "--calibration", "none", "--resume")
        assert seen.code == 0, seen.err
        again = [line for line in hub.asked_for("GET /cdn/") if "bytes=" not in line]
        assert len(again) < 3  # of three shards
    assert "model.safetensors" in contents(tmp_path / "out")
