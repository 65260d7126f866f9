"""`mlxinfer serve` with a config file of models: what it says, loads, and ends with."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from test_serve_process import post, start, url_in

from mlxinfer import hub


def states(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return {model["id"]: model["state"] for model in json.load(answer)["data"]}


def test_the_models_of_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[serve]\nport = 0\nttl = "1h"\nlog-format = "json"\n'
        '[models.big]\nsource = "demo"\nkv-bits = 8\n'
        '[models.small]\nsource = "demo-draft"\naliases = ["gpt"]\npin = true\n'
    )
    names = ("--default-model", "small", "--alias", "claude-*=big")
    process = start("--config", str(config), *names)
    try:
        url = url_in(process)
        assert states(url) == {"big": "unloaded", "small": "loaded"}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        asked = ("gpt", "claude-sonnet", "what-else")
        models = [json.load(post(url, {**body, "model": m}))["model"] for m in asked]
        assert models == ["small", "big", "small"]
        assert states(url) == {"big": "loaded", "small": "loaded"}
        process.terminate()
        _, log = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert messages.count("model loaded") == 1


def test_a_broken_model_at_the_start_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(hub.resolve("demo-draft"), folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    process = start("--port", "0", "-m", str(folder))
    try:
        _, said = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 1
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
