"""A rank that follows opens a model with the options that rank 0 opens it with."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer.cli import _commands, _configuration
from mlxinfer.cli import run as run_module
from mlxinfer.ranks import follower


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_follower_opens_a_file_with_the_tower_and_dtype_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []

    def fetch(name: str, **how: Any) -> Path:
        opened.append((name, how))
        return tmp_path

    def follow(place: Any, secret: bytes, find: Any, **how: Any) -> None:
        assert find("the model of rank 0") == tmp_path

    monkeypatch.setattr(follower, "follow", follow)
    for module in (run_module, _configuration):
        monkeypatch.setattr(module, "fetch", fetch)
    monkeypatch.setenv("MLXINFER_RANKS_SECRET", "0123456789abcdef" * 2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["127.0.0.1:5001"], ["127.0.0.1:5002"]]))
    options = ["--mmproj", "tower.gguf", "--dtype", "float32", "--hostfile", str(hosts)]
    done = CliRunner().invoke(
        _commands.cli, [command, "-m", "a.gguf", *options, "--rank", "1"], input=""
    )
    assert done.exit_code == 0, done.output
    assert opened == [("a.gguf", {"mmproj": "tower.gguf", "dtype": "float32"})]
