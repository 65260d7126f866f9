"""A live server of the demo model on a free port, for all tests of this folder."""

from collections.abc import Iterator

import pytest
from bad_input import unharmed
from live_server import LiveServer
from scripted import ScriptedServer, fill_gaps
from sdk_clients import client_fixture, openai_client


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """One server for all tests that change nothing about it."""
    with LiveServer() as server:
        yield server


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    """The live server; afterwards it must be idle, whole and still able to answer."""
    yield live
    live.check_idle()


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    """A server with a model that says what a test tells it to."""
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="module")
def coder() -> Iterator[ScriptedServer]:
    """A scripted model with tokens for filling in the middle."""
    with ScriptedServer() as server:
        fill_gaps(server.model)
        yield server


client = client_fixture("scripted", openai_client)
demo = client_fixture("live", openai_client)


@pytest.fixture(scope="module")
def whole(live: LiveServer) -> Iterator[None]:
    """Around a module of cases: the server is as it was."""
    yield from unharmed(live)
