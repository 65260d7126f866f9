"""The app beside a server with the page; the server's model says what a test tells it to."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
sys.path.append(str(Path(__file__).parents[1] / "hub"))
sys.path.append(str(Path(__file__).parents[1] / "web"))

from page_server import PageServer
from standin_fixtures import cache, standin

from mlxinfer.app import settings as stored
from mlxinfer.app.controller import AppController
from mlxinfer.app.process import ServerProcess
from mlxinfer.app.settings import Settings

os.environ.setdefault("TOGA_BACKEND", "toga_dummy")  # read when toga is first used
__all__ = ["cache", "standin"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server that the app did not start."""
    with PageServer(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket file: on a Mac tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="mlx", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def notices() -> list[tuple[str, str]]:
    """Messages of the app to the user."""
    return []


@pytest.fixture
def controller(
    server: PageServer, tmp_path: Path, notices: list[tuple[str, str]]
) -> Iterator[AppController]:
    """An app's controller with the server in its settings."""
    server.script.reset()
    stored.save(tmp_path / "app.json", Settings(url=server.url, introduced=True))
    controller = AppController(
        tmp_path, ServerProcess(tmp_path), lambda *said: notices.append(said)
    )
    yield controller
    controller.stop()
