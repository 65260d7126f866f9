"""mlxinfer config: what counts, and where it was said."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlxinfer.cli import serve
from mlxinfer.cli._commands import cli
from mlxinfer.cli._configuration import RequestedModel, checked_settings, requested_models
from mlxinfer.cli._options import ENGINE_NAMES
from mlxinfer.config.file import ModelEntry, read_config_file
from mlxinfer.errors import ModelError
from mlxinfer.session.options import EngineArguments

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
    shown = outcome.json("config", "show")
    assert shown["file"] == str(file)
    assert shown["serve"]["port"] == {"value": 9001, "origin": "environment"}
    assert shown["serve"]["host"] == {"value": ["localhost"], "origin": "config file"}
    assert shown["serve"]["drain"] == {"value": 30.0, "origin": "default"}


def test_paths_are_shown_as_text(file: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the page too, which gets the same values."""
    monkeypatch.setenv("MLXINFER_SERVE_KEYS_FILE", str(file))
    monkeypatch.setenv("MLXINFER_SERVE_HOSTFILE", str(file))
    shown = outcome.json("config", "show")["serve"]
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


def test_init_writes_a_valid_file(
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


def test_a_model_of_the_file_that_cannot_be_reached_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named with its place; the default model that is not here is the first that is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "config.toml"
    file.write_text('[models.gone]\nsource = "org/nothing"\n[models.here]\nsource = "demo-draft"\n')
    config = read_config_file(file)
    options = {
        "max_memory": None, "default_model": "gone", "aliases": (), "adapters": (), "ttl": None,
    }  # fmt: skip
    models = serve.registry(requested_models((), config, by_default=True), dict(options))
    assert models.names() == ["here"]
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "models.gone is not served, the others are: org/nothing" in record.message


@pytest.mark.parametrize("given", [("gone",), ("here=org/nothing", "demo-draft")])
def test_a_model_of_the_command_line_has_to_be_there(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "config.toml"
    file.write_text('[models.gone]\nsource = "org/nothing"\n[models.demo]\nsource = "demo"\n')
    requested = requested_models(given, read_config_file(file), by_default=False)
    with pytest.raises(ModelError, match="org/nothing"):
        serve.entries_of(requested, {}, None)


VALUES = {"kv_bits": ("8", 8), "speculate": ("ngram", "ngram"), "dtype": ("float32", "float32")}
VALUES |= {
    "max_draft": (4, 4),
    "acceptance": ("rejection", "rejection"),
    "disk_cache_dir": ("kv", "kv"),
}


@pytest.mark.parametrize("place", ["serve", "models"])
@pytest.mark.parametrize("name", [n for n in ENGINE_NAMES if n not in ("draft", "chat_template")])
def test_every_engine_option_stands_in_the_file_for_all_models_or_for_one(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = str(EngineArguments.__annotations__[name])
    value, wanted = VALUES.get(name, (True, True) if "bool" in kind else (64, 64))
    if "memory" in name or name == "disk_cache":
        value = wanted = "1GB"
    more = {"kv_sinks": {"kv_window": 64}, "slow_experts": {"expert_memory": "1GB"}}.get(name, {})
    more = {"disk_cache": "1GB"} if name == "disk_cache_dir" else more
    more = {"kv_bits": "8"} if "plain" in name else more
    lines = [f"{n.replace('_', '-')} = {json.dumps(v)}" for n, v in {**more, name: value}.items()]
    model = ["[models.one]", 'source = "demo"']
    file = tmp_path / "config.toml"
    file.write_text(
        "\n".join(["[serve]", *lines, *model] if place == "serve" else [*model, *lines])
    )
    config = read_config_file(file)
    [requested] = requested_models((), config, by_default=True)
    if place == "models" or name != "max_memory":  # of a server's that of all models
        options, _ = checked_settings(requested, config.serve)
        assert getattr(options, name) == wanted
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli, ["config", "show", "--json", "--config", str(file)])
    assert shown.exit_code == 0, shown.output
