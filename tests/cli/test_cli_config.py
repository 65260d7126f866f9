"""mlxinfer config: what counts, and where it was said."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from mlxinfer.cli._configuration import RequestedModel, checked_settings
from mlxinfer.config.file import ModelEntry, read_config_file

SERVE = ("port", "host", "max-memory", "ttl")  # options of the file that init writes


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('[serve]\nport = 9000\nhost = "localhost"\napi-key = ["secret-one"]\n')
    monkeypatch.setenv("MLXINFER_CONFIG", str(path))
    return path


def test_command_line_before_environment_before_file(
    file: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXINFER_SERVE_PORT", "9001")
    shown = json.loads(outcome("config", "show", "--json").out)
    assert shown["file"] == str(file)
    assert shown["serve"]["port"] == {"value": 9001, "origin": "environment"}
    assert shown["serve"]["host"] == {"value": ["localhost"], "origin": "config file"}
    assert shown["serve"]["drain"] == {"value": 30.0, "origin": "default"}


def test_paths_are_shown_as_texts(
    file: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page too, which gets the same values."""
    monkeypatch.setenv("MLXINFER_SERVE_KEYS_FILE", str(file))
    monkeypatch.setenv("MLXINFER_SERVE_HOSTFILE", str(file))
    shown = json.loads(outcome("config", "show", "--json").out)["serve"]
    for name in ("keys-file", "hostfile"):
        assert shown[name] == {"value": str(file), "origin": "environment"}


def test_the_table_names_the_origin_and_hides_keys(file: Path, outcome: Any) -> None:
    lines = outcome("config", "show", "--origin").out.splitlines()
    assert lines[0] == f"# {file}"
    assert ["--port", "9000", "config", "file"] in [line.split() for line in lines]
    assert "secret-one" not in "".join(lines)
    assert ["--api-key", "1", "set", "config", "file"] in [line.split() for line in lines]


MISTAKES = [
    ("[serve]\nprot = 1\n", "Did you mean port?"),
    ('[serve]\nport = "x"\n', "config.toml, serve.port: 'x' is not"),
    ('[serve]\nmodel = "demo"\n', "expected a list, such as ['demo']"),
    ("[serve]\nport = true\n", "serve.port: 'True' is not"),
    ("[serve]\nport = 80.5\n", "serve.port: '80.5' is not"),
    ('[models.a]\nsorce = "demo"\n', "not 'sorce'"),
    ("[server]\n", "config.toml, server: a file has a table [serve]"),
    ("[serve", "is no TOML"),
]
SERVED = [  # which are seen where the server is made
    ('tool-format = "morse"', "morse"),
    ("kv-window = 0", "kv_window"),
    ("deadline = 0", "deadline"),
    ('allowed-host = ["http://chat.example"]', "allowed"),
]


def test_mistakes_are_wrong_usage(file: Path, outcome: Any) -> None:
    for text, said in MISTAKES:
        file.write_text(text)
        ended = outcome("config", "show")
        assert (ended.code, said in ended.err) == (2, True), text
    for setting, said in SERVED:
        file.write_text(f"[serve]\nport = 0\n{setting}\n")
        ended = outcome("serve", "--config", str(file))
        assert (ended.code, said in ended.err) == (2, True), setting


def test_config_init_writes_a_file_that_holds(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "config.toml"
    monkeypatch.setenv("MLXINFER_CONFIG", str(place))
    assert outcome("config", "init").out.strip() == str(place)
    assert list(read_config_file(place).models) == ["demo"]
    assert outcome("config", "init").code == 2
    place.write_text("changed")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
        assert outcome("config", "init", "--force").code == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(file, file.read_text()) for file in place.parent.iterdir()] == [(place, "changed")]
    assert outcome("config", "init", "--force").code == 0
    plain = place.read_text()
    options = [line.removeprefix("# ") for line in plain.splitlines() if " = " in line]
    place.write_text("\n".join(["[serve]", *[o for o in options if o.startswith(SERVE)]]))
    assert outcome("config", "show").code == 0


def test_a_model_has_its_own_context_batch_and_effort() -> None:
    given = {"max_context": 512, "reasoning_effort": "low"}
    requested = RequestedModel(
        name="a", place="a", entry=ModelEntry(source="demo", options=given), preload=False
    )
    server = {"max_context": 1024, "max_batch": 3, "reasoning_effort": "high"}
    options, served = checked_settings(requested, server)
    assert (options.max_context, options.max_batch) == (512, 3)
    assert served["reasoning_effort"] == "low"
    wrong = replace(requested, entry=ModelEntry(source="demo", options={"reasoning_effort": "x"}))
    with pytest.raises(click.UsageError, match="expected one of none, minimal"):
        checked_settings(wrong, server)
