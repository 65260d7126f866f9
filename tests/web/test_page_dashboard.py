"""The dashboard shows what the server does, and changes what it may."""

from pathlib import Path
from typing import Any

import pytest
from lazy_server import MB, LazyServer
from page_driver import PageDriver
from page_server import LivePageServer, PageServer

from mlxinfer.config import KVOptions

pytestmark = [pytest.mark.ci, pytest.mark.demo]


class LazyPage(LivePageServer, LazyServer):
    """Two models that load when they are asked for, with the page."""


def test_memory_batch_and_settings_are_shown(page: PageDriver) -> None:
    server = page.server
    assert isinstance(server, PageServer)
    server.script.says("Working", " on it")
    page.ask("A question that runs")
    page.wait_for_answer("Working")
    page.keyboard.press("Alt+3")
    row = page.locator("[aria-label='Running requests'] tbody tr")
    row.locator("text=answering").wait_for()
    assert "demo" in row.inner_text()
    why = row.locator(".why")
    assert why.inner_text() == "16 reused: evicted at 16"
    assert "was there and was evicted" in (why.get_attribute("title") or "")
    assert "A question" not in page.locator("main").inner_text()
    card = page.locator("article.card[aria-label='demo']")
    card.locator("summary").click()
    text = card.inner_text()
    assert "300 kB in use, 500 kB kept for later prompts, of 1.0 MB" in text
    assert "Kept on disk\n12.0 MB" in text
    assert "1 running, 0 waiting" in text
    assert "No proposals by draft\nValueError: odd (2 requests)" in text
    page.locator("summary", has_text="2 of 3 differ from the defaults").click()
    settings = page.locator("[aria-label='Settings of the server']").inner_text()
    assert "30m\tconfig file" in settings
    assert "1 set\tenvironment" in settings
    server.script.go_on.set()
    page.wait_for_selector(".busy:has-text('Idle')")
    page.route("**/*", lambda route: route.abort())
    page.wait_for_selector(".busy:has-text('Not reachable; before that: Idle')")
    page.errors.clear()


def test_errors_of_the_log_are_shown_without_prompts(page: PageDriver) -> None:
    import logging

    log = logging.getLogger("mlxinfer.server")
    log.error("model not loaded: %s", "a file is missing", extra={"model": "big"})
    page.open("/#dashboard")
    page.wait_for_selector(".problems:has-text('big: model not loaded: a file is missing')")


def test_models_are_loaded_and_unloaded(profile: Any, tmp_path: Path) -> None:
    fields = {"small": {"ttl_s": 900.0, "kv": KVOptions(bits=(8, 4))}}
    with LazyPage(tmp_path, 200 * MB, fields) as server, PageDriver(profile, server) as page:
        page.open("/#dashboard")
        small = page.locator("article.card", has_text="small")
        small.get_by_role("button", name="Load", exact=True).click()
        small.locator(".badge:has-text('loaded')").wait_for()
        assert "KV cache 8/4 bit" in small.inner_text()
        assert "15 min 0 s" in small.inner_text()
        small.get_by_role("button", name="Pin", exact=True).click()
        small.locator(".badge", has_text="pinned").wait_for()
        assert small.get_by_role("button", name="Unload").is_disabled()
        assert server.post("/admin/models/unload", {"model": "small"}).status_code == 400
        small.get_by_role("button", name="Unpin").click()
        small.get_by_role("button", name="Unload").click()
        small.locator(".badge:has-text('unloaded')").wait_for()
        assert server.states() == {"big": "unloaded", "small": "unloaded"}
