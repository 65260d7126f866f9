"""mlxinfer serve as a process: starts, logs, signals, models of a config file."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxinfer import hub

Process = subprocess.Popen[str]
URL = re.compile(r"http://127\.0\.0\.1:\d+")
SECRET = "a very private prompt"


def start(*options: str, **kwargs: Any) -> Process:
    command = [sys.executable, "-m", "mlxinfer.cli", "serve", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **kwargs)


def url_in(process: Process) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    match = URL.search(line)
    assert match, line
    return match.group()


@pytest.fixture
def process() -> Iterator[Process]:
    process = start(
        "--port",
        "0",
        env={**os.environ, "MLXINFER_SERVE_LOG_FORMAT": "json", "MLXINFER_SERVE_DRAIN_S": "20"},
    )
    yield process
    process.kill()
    process.communicate()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-request-id": "mine"},
    )
    return urllib.request.urlopen(request, timeout=60)


def test_it_serves_logs_no_prompts_and_ends_with_zero(process: Process) -> None:
    url = url_in(process)
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
    with post(url, body) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert SECRET not in log
    assert said not in log
    lines = [json.loads(text) for text in log.splitlines()]
    (line,) = [line for line in lines if line["logger"] == "mlxinfer.access"]
    assert (line["request_id"], line["status"], line["model"]) == ("mine", 200, "demo")
    assert line["answer_tokens"] == 3


LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "ignore_eos": True,
    "stream": True,
    "max_tokens": 1900,
}


@pytest.mark.ci
def test_a_second_signal_ends_streams_with_an_error(process: Process) -> None:
    with post(url_in(process), LONG) as answer:
        answer.readline()
        process.send_signal(signal.SIGINT)
        for _ in range(20):  # it goes on
            answer.readline()
        process.send_signal(signal.SIGINT)
        lines = [line for line in answer.read().split(b"\n") if line.startswith(b"data:")]
    assert json.loads(lines[-1].removeprefix(b"data:"))["error"]["code"] == "shutting_down"
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert "a second signal ends them" in process.stderr.read()


def run(*options: str) -> tuple[int, str]:
    process = start(*options)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.ci
def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run("--port", str(taken.getsockname()[1]))
    assert code == 1
    assert re.fullmatch(r"error: Cannot serve on 127\.0\.0\.1 port \d+: .* in use.*\n", said)


def test_an_unknown_model_is_one_clear_line() -> None:
    code, said = run("--port", "0", "-m", "./nowhere")
    assert code == 1
    assert said.startswith("error: ")
    assert len(said.splitlines()) <= 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "gives"),
    [([], False), (["--peer", "http://127.0.0.1:9"], True), (["--prefill-at", "http://a:9"], True)],
)
def test_a_server_that_asks_another_may_be_asked(options: list[str], gives: bool) -> None:
    process = start("-m", "demo-draft", "--port", "0", *options)
    try:
        url = f"{url_in(process)}/v1/kv/held"
        body = json.dumps({"namespace": "0" * 40, "keys": ""}).encode()
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=60)
        said = refusal.value.read().decode()
        assert ("gives no pages" not in said) is gives
        assert refusal.value.code == 404
    finally:
        process.kill()
        process.communicate()


def states(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        return {model["id"]: model["state"] for model in json.load(answer)["data"]}


@pytest.mark.ci
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
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert messages.count("model loaded") == 1


@pytest.mark.ci
def test_a_broken_model_at_the_start_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(hub.resolve("demo-draft"), folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    process = start("--port", "0", "-m", str(folder))
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 1
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1


IGNORES_WORK = """
import sys
from pathlib import Path

from mlxinfer.cli import main
from mlxinfer.engine.runner import Launched

mark = Path(sys.argv.pop(1))

def ignored(launched):
    mark.touch()
    raise RuntimeError(
        "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
    )

if not mark.exists():  # the GPU ignores this process, and works for the next
    Launched.token_ids = ignored
main()
"""


@pytest.mark.ci
def test_a_server_whose_gpu_takes_no_more_work_starts_again(tmp_path: Path) -> None:
    mark = tmp_path / "ignored"
    command = [sys.executable, "-c", IGNORES_WORK, str(mark), "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url_in(process), {**LONG, "stream": False, "max_tokens": 3})
        assert refused.value.code == 503
        assert json.load(refused.value)["error"]["code"] == "device_lost"
        assert mark.exists()
        assert process.stderr is not None
        assert any("starts again" in line for line in process.stderr)
        with post(url_in(process), {**LONG, "stream": False, "max_tokens": 3}) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    finally:
        process.kill()
        process.communicate()
