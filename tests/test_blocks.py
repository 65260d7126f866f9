"""Every block of every page runs in order, as it stands, or is listed here with a reason.

Names of the hub lead to bundled models: a cache of the hub is made of them. Only the port is
another one, since this machine may use 8080. Blocks of the kind `text` are what a page shows:
output, or commands for several machines and for files of the reader.
"""

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from adapters.drawn import dense_tensors, draw, write_peft
from huggingface_hub import constants
from PIL import Image, ImageDraw

from benchmarks.processes import free_port
from mlxinfer import LLM, hub
from mlxinfer.config.file import read_config_file
from tests.waiting import wait_until

pytestmark = [pytest.mark.ci, pytest.mark.demo]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: path for path in (ROOT / "docs").glob("*.md")}
PAGES |= {"../README.md": ROOT / "README.md"}
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
STANDINS = {  # names of pages -> the bundled models that stand for them
    "mlx-community/Qwen3.5-9B-4bit": "demo-vision",
    "mlx-community/Qwen3-8B-4bit": "demo",
    "mlx-community/Qwen3-0.6B-4bit": "demo-draft",
    "Qwen/Qwen3-4B": "demo",
    "org/name": "demo",
}
NOT_RUN = {  # how a block or a command begins -> why it is not run
    "python3 -m venv": ".ci/run runs it, in a clean checkout",
    ".venv/bin/pip install": ".ci/run runs it",
    "pip install": "it changes the environment of the tests",
    "python examples/": "tests/test_examples.py",
    "mlxinfer app": "it opens windows: tests/app",
    "npm ci": "tests/web builds the page",
    "mlx.launch": "tests/ranks starts it",
    "mlxinfer serve -m org/name --hostfile": "it needs a second machine: tests/ranks",
    "mlxinfer doctor": "minutes: tests/cli/test_doctor_report.py, and .ci/run",
    "mlxinfer bench": "minutes: benchmarks",
    "mlxinfer convert mlx-community/": "its source is not here: tests/convert",
    "mlxinfer convert model.gguf": "its source is not here: tests/convert",
    "mlxinfer convert org/name": "minutes: tests/convert",
    "mlxinfer serve -m ./Qwen3.5-9B-4bit": "no bundled model has a head: tests/speculation",
    "mlxinfer show org/name": "of a mixture of experts: tests/test_larger_than_memory.py",
    "mlxinfer run -m org/name --expert-memory": "the same",
    "mlxinfer serve -m org/name --expert-memory": "the same",
    'with LLM("org/name", expert_memory': "the same",
    "python -m examples.demo_model": "hours: tests/test_demo_assets.py looks at what came of it",
    "mlxinfer session import": "it needs a second machine: tests/server/test_sessions.py",
    'from mlxinfer import LLM\n\nllm = LLM("BAAI': "no bundled model embeds: tests/pooling",
    'from openai import OpenAI\n\nclient = OpenAI(base_url="http://127.0.0.1:8080/v1", '
    'api_key="unused")\nanswer = client.embeddings': "the same",
    'print(llm.chat("What happens?", videos': "the bundled model sees no videos: tests/images",
    "from langchain_openai": "tests/server/test_frameworks.py asks through it",
    "mlxinfer history": "there is no history yet: tests/cli/test_cli_history.py",
    'llm = LLM("demo", ranks=2)': "a process has one group for life: tests/ranks",
}
SHOWN = {  # pages with blocks of the kind `text` -> what these are
    "app.md": "the bundle, which is built on a Mac: .github/workflows/ci.yml",
    "architecture.md": "the tree of folders: tests/test_readme.py",
    "clients.md": "a command of Docker",
    "demo_model.md": "what the demo says: tests/test_readme.py",
    "from_mlx_lm.md": "commands for models of the reader: tests/convert, tests/adapters",
    "http.md": "a stream: tests/reference",
    "larger_than_memory.md": "commands for models of the reader, and an error: tests/test_fit.py",
    "notebook.md": "cells: tests/test_notebook.py",
    "peers.md": "two servers at two addresses: tests/server/test_peer_servers.py",
    "rag.md": "no bundled model scores texts: tests/pooling",
    "replicas.md": "three Macs: tests/server/test_replicas.py",
    "several_macs.md": "several servers: the same two",
    "terminal.md": "files, models and shells of the reader: tests/cli",
    "training.md": "commands on a model of the reader: tests/adapters/test_training.py",
}


@dataclass
class Reader:
    """Somebody who reads a page from its beginning, and runs what stands there.

    Attributes:
        folder: works there.
        environment: of commands.
        port: takes the place of 8080.
        namespace: of the page's programs.
    """

    folder: Path
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def read(self, language: str, text: str) -> None:
        """Run or check one block."""
        text = text.replace(":8080", f":{self.port}")
        if language == "python":
            exec(compile(text, "block", "exec"), self.namespace)
        elif language == "sh":
            for line in map(str.strip, text.replace("\\\n", " ").splitlines()):
                if line and not line.startswith("#") and not is_listed(line):
                    self.run(line)
        elif language == "toml":
            tomllib.loads(text)
            file = self.folder / "config.toml"
            file.write_text(text)
            read_config_file(file)
        elif language in ("json", "yaml", "ini"):
            {"json": json.loads, "yaml": yaml.safe_load, "ini": read_ini}[language](text)
        else:
            assert language in ("text", ""), f"nothing is known of {language} here"

    def run(self, line: str) -> None:
        """Run a command to its end, or start a server in place of the last one."""
        if line.startswith("mlxinfer serve"):
            self.stop()
            command = line.partition("#")[0].split()
            self.servers.append(subprocess.Popen(command, env=self.environment, cwd=self.folder))
            wait_until(self.answers)
            return
        done = subprocess.run(
            ["bash", "-c", line],
            env=self.environment,
            cwd=self.folder,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (line, done.stderr)
        if line.startswith("curl"):
            assert done.stdout, line

    def answers(self) -> bool:
        """Whether the server is ready; it must not have ended."""
        assert self.servers[-1].poll() is None, "the server has ended"
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """End the server."""
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        self.servers.clear()

    def close(self) -> None:
        """End all that the page has begun."""
        self.stop()
        for value in self.namespace.values():
            if isinstance(value, LLM):
                value.close()


def read_ini(text: str) -> None:
    configparser.ConfigParser().read_string(text)


def is_listed(text: str) -> bool:
    return text.startswith(tuple(NOT_RUN))


def blocks(name: str) -> list[tuple[str, str]]:
    return BLOCK.findall(PAGES[name].read_text())


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    cache = tmp_path / "hub"
    for name, bundled in STANDINS.items():
        place = cache / f"models--{name.replace('/', '--')}"
        shutil.copytree(hub.resolve(bundled), place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
    folder = tmp_path / "here"
    folder.mkdir()
    pictures(folder)
    adapters(folder)
    port = free_port()
    variables = {
        "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data"),
        "MLXINFER_CONFIG": "", "MLXINFER_SERVE_PORT": str(port),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # for mlx-lm, which may be loaded
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    someone = Reader(folder, dict(os.environ), port)
    yield someone
    someone.close()


def pictures(folder: Path) -> None:
    """The files that pages name."""
    drawing = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(drawing).ellipse((20, 20, 70, 70), fill="red")
    for name in ("drawing.png", "photo.jpg", "before.png", "after.png"):
        drawing.save(folder / name)


def adapters(folder: Path) -> None:
    """The adapters that pages name."""
    base = hub.resolve("demo")
    drawn = draw(dense_tensors(base), seed=1, strength=0.02)
    for name in ("pirate", "adapters/poet"):
        write_peft(folder / name, drawn)


@pytest.mark.alike
@pytest.mark.parametrize("name", sorted(name for name in PAGES if blocks(name)))
def test_the_blocks_of_a_page_run_in_order(name: str, reader: Reader) -> None:
    for language, text in blocks(name):
        if not is_listed(text):
            reader.read(language, text)


def test_each_reason_is_of_a_block_that_is_there() -> None:
    texts = [text for name in PAGES for _, text in blocks(name)]
    begins = [*texts, *(line.strip() for text in texts for line in text.splitlines())]
    shown = {name for name in PAGES for kind, _ in blocks(name) if kind in ("", "text")}
    assert shown == set(SHOWN)
    assert [b for b in NOT_RUN if not any(text.startswith(b) for text in begins)] == []
