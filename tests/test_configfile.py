"""The config file: what is read, and errors that name the place."""

from pathlib import Path

import pytest

from mlxinfer.config.file import ConfigFile, find_config_file, parse_duration, read_config_file
from mlxinfer.errors import InvalidRequestError

GOOD = """
[serve]
port = 9000
max-memory = "8GB"

[models.chat]
source = "org/name"
aliases = ["a", "b"]
pin = true
ttl = "30m"
kv-bits = "8"

[models.small]
source = "demo"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_options_and_models_are_read(tmp_path: Path) -> None:
    config = read_config_file(write(tmp_path, GOOD))
    assert config.serve == {"port": 9000, "max_memory": "8GB"}
    chat = config.models["chat"]
    assert (chat.source, chat.aliases, chat.pin, chat.ttl_s) == ("org/name", ("a", "b"), True, 1800)
    assert chat.options == {"kv_bits": "8"}
    assert config.models["small"].ttl_s is None


WRONG = {  # the place that the error names, and files
    "sevre": ["[sevre]"],
    "serve": ["serve = 3"],
    "models.x": [
        "[models]\nx = 3",
        "[models.x]",
        '[models.x]\nsource = ""',
        '[models.x]\nsource = "demo"\naliases = ["x"]',
        '[models.x]\nsource = "demo"\naliases = ["y", "y"]',
    ],
    "models.x.aliases": ['[models.x]\nsource = "demo"\naliases = "y"'],
    "models.y": ['[models.x]\nsource = "demo"\naliases = ["y"]\n[models.y]\nsource = "a/b"'],
    "models.x.pin": ['[models.x]\nsource = "demo"\npin = 1'],
    "models.x.ttl": ['[models.x]\nsource = "demo"\nttl = "soon"'],
}


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for place, texts in WRONG.items():
        for text in texts:
            path = write(tmp_path, text)
            with pytest.raises(InvalidRequestError) as caught:
                read_config_file(path)
            assert f"{path}, {place}:" in str(caught.value), text


def test_a_config_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for raw in (b"[serve", b"\xff\xfe", b"x = " + b"9" * 5000, b"a = [" * 3000):
        path.write_bytes(raw)
        with pytest.raises(InvalidRequestError, match=r"is no TOML|there are two tables"):
            read_config_file(path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_config_file(tmp_path)


def test_a_named_config_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("MLXINFER_CONFIG", raising=False)
    assert find_config_file() is None
    assert read_config_file(None) == ConfigFile()
    (tmp_path / "mlxinfer").mkdir()
    usual = write(tmp_path / "mlxinfer", "")
    assert find_config_file() == usual
    named = write(tmp_path, "")
    monkeypatch.setenv("MLXINFER_CONFIG", str(named))
    assert find_config_file() == named
    named.unlink()
    with pytest.raises(InvalidRequestError, match="MLXINFER_CONFIG"):
        find_config_file()


def test_durations_have_units() -> None:
    assert [parse_duration(d) for d in (5, 1.5, "90", "90s", "1.5m", " 2h ", "1d")] == [
        5, 1.5, 90, 90, 90, 7200, 86400
    ]  # fmt: skip
    for wrong in ("", "m", "-1s", "1w", -1, True, None, [], "1m 30s"):
        with pytest.raises(InvalidRequestError):
            parse_duration(wrong)
