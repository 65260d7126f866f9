"""A headless browser, and servers with the page, their models as a test tells them."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
sys.path.append(str(Path(__file__).parents[1] / "hub"))

from page_driver import PageDriver, missing, new_profile
from page_server import PageServer
from standin_fixtures import cache, standin

__all__ = ["cache", "standin"]

INSTALL = 'apt-get install chromium, and pip install -e ".[test]"'
# The first is Debian's browser without a window's parts: a tab takes two thirds of the time.
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    # A process for each tab, and one to draw, would cost a third more.
    "--renderer-process-limit=1", "--disable-site-isolation-trials", "--in-process-gpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Iterator[Any]:
    """One browser a file: playwright's loop would be in the way of other tests of the process."""
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        missing("browser", INSTALL)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright", INSTALL)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=[*ARGUMENTS])
        yield new_profile(chromium)
        chromium.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with a history and a model that follows a script."""
    with PageServer(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def page(profile: Any, server: PageServer, request: pytest.FixtureRequest) -> Iterator[PageDriver]:
    """A new tab at the page with nothing stored, and a model that answers at once.

    `window` gives it another size, or other media.
    """
    server.script.reset()
    with PageDriver(profile, server, **getattr(request, "param", {})) as driver:
        driver.open()
        yield driver
    server.script.reset()
