"""Models on the page: what is here, what fits of the hub, downloads, conversions."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from page_driver import PageDriver
from page_server import PageServer
from standin import Repo, StandIn

from mlxinfer import hub
from tests.waiting import wait_until

pytestmark = pytest.mark.ci

DEMO = {file.name: file.read_bytes() for file in hub.resolve("demo").iterdir() if file.is_file()}
HUGE = {
    **{"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2**26},
    **{"model_type": "llama", "eos_token_id": 2, "rms_norm_eps": 1e-6},
}


@pytest.fixture
def models(standin: StandIn, page: PageDriver) -> PageDriver:
    """The page's place of models, with a hub of three repositories."""
    huge = DEMO | {"config.json": json.dumps(HUGE).encode()}
    odd = DEMO | {"config.json": b'{"model_type": "nonsense"}'}
    standin.repos |= {
        "org/small-chat": Repo(dict(DEMO), downloads=900),
        "org/long-chat": Repo(huge, downloads=50),
        "org/odd-chat": Repo(odd, downloads=7, tags=("safetensors",)),
    }
    page.open("/#models")
    page.reload()
    page.wait_for_selector("td:has-text('demo-draft')")
    return page


def search(page: PageDriver, words: str, *, everything: bool = False) -> None:
    page.get_by_label("Search the hub").fill(words)
    page.get_by_label("include models in other formats").set_checked(everything)
    page.click("Search")


def card(page: PageDriver, name: str) -> Any:
    return page.locator("ul[aria-label='Models of the hub'] .card", has_text=name)


def job(page: PageDriver, name: str) -> Any:
    return page.locator("ul[aria-label='Downloads and conversions'] .card", has_text=name)


def test_search_says_what_fits_before_a_download(models: PageDriver) -> None:
    search(models, "chat")
    card(models, "org/small-chat").locator(".badge.good:has-text('fits')").wait_for()
    assert "whole 2,048 tokens of context" in card(models, "org/small-chat").inner_text()
    card(models, "org/long-chat").locator(".badge:has-text('fits, shorter')").wait_for()
    assert "with an 8-bit KV cache" in card(models, "org/long-chat").inner_text()
    assert card(models, "org/odd-chat").count() == 0
    search(models, "chat", everything=True)
    card(models, "org/odd-chat").locator(".badge:has-text('unsupported')").wait_for()
    assert "nonsense" in card(models, "org/odd-chat").inner_text()
    search(models, "no such thing")
    models.wait_for_selector("text=The hub has no such model")


def test_models_that_fit_come_first(models: PageDriver) -> None:
    cards = models.locator("ul[aria-label='Models that fit'] .card")
    cards.first.wait_for()
    assert models.texts(".column h2")[0] == "Fits this machine"
    first = cards.first.inner_text()
    assert "best balance" in first
    assert "at most 30 to 40 tokens/s (estimate)" in first
    cards.first.get_by_role("button", name="Download").click()
    cards.first.locator(".error").wait_for()  # this hub does not have it
    assert "The hub has no" in cards.first.locator(".error").inner_text()


def test_a_hub_that_cannot_be_reached_is_said(models: PageDriver, standin: StandIn) -> None:
    standin.faults.status = 500
    search(models, "chat")
    problem = models.locator(".error", has_text="The hub cannot be searched")
    problem.wait_for()
    assert models.evaluate("document.querySelector('aside').getBoundingClientRect().top") == 0
    lowest = problem.evaluate("element => element.getBoundingClientRect().bottom")
    assert lowest <= models.viewport_size["height"], "it is below the window"
    models.errors.clear()


def test_a_download_is_paused_and_resumed(
    models: PageDriver, standin: StandIn, cache: Path
) -> None:
    standin.faults.on_chunk = lambda: time.sleep(0.005)  # some twenty seconds for all of it
    search(models, "small")
    card(models, "org/small-chat").get_by_role("button", name="Download").click()
    result = job(models, "org/small-chat")
    result.get_by_text("kB of 4.").wait_for()
    result.get_by_role("button", name="Pause").click()
    result.locator(".badge:has-text('paused')").wait_for()
    paused = card(models, "org/small-chat").get_by_role("button", name="Download")
    assert paused.inner_text() == "Go on with the download"
    assert paused.is_enabled()
    standin.faults.on_chunk = None
    before = len(standin.log)
    result.get_by_role("button", name="Resume").click()
    result.locator(".badge:has-text('done')").wait_for()
    assert [line for line in standin.log[before:] if "bytes=" in line and "bytes=0-" not in line]
    models.wait_for_selector("td.name:has-text('org/small-chat')")
    result.get_by_role("button", name="Chat with it").click()
    models.wait_for_selector('textarea[placeholder="Ask org/small-chat"]')
    answer = models.answered("What is a KV cache?")
    assert answer.inner_text().startswith("A KV cache keeps the keys and values")
    assert "org/small-chat" in models.facts(answer)


def test_cancelled_downloads_go(models: PageDriver, standin: StandIn, cache: Path) -> None:
    standin.faults.on_chunk = lambda: time.sleep(0.005)
    search(models, "long")
    card(models, "org/long-chat").get_by_role("button", name="Download").click()
    result = job(models, "org/long-chat")
    result.get_by_text("kB of 4.").wait_for()
    result.get_by_role("button", name="Cancel").click()
    result.wait_for(state="detached")
    wait_until(lambda: not list(cache.glob("models--org--long-chat/blobs/*")))


def test_a_failed_download_says_why_and_is_retried(models: PageDriver, standin: StandIn) -> None:
    search(models, "odd", everything=True)
    card(models, "org/odd-chat").locator(".badge").wait_for()
    standin.faults.gate_files = True
    card(models, "org/odd-chat").get_by_role("button", name="Download").click()
    result = job(models, "org/odd-chat")
    result.locator(".error").wait_for()
    assert "gated" in result.locator(".error").inner_text()
    assert "gated" in card(models, "org/odd-chat").locator(".error").inner_text()
    assert re.search("mlxinfer |hf |`", result.locator(".error").inner_text()) is None
    standin.faults.gate_files = False
    result.get_by_role("button", name="Retry").click()
    result.locator(".badge:has-text('done')").wait_for()
    assert result.count() == 1
    search(models, "long", everything=True)
    card(models, "org/long-chat").locator(".badge").wait_for()
    standin.faults.gate_files = True
    card(models, "org/long-chat").get_by_role("button", name="Download").click()
    failed = job(models, "org/long-chat")
    failed.get_by_role("button", name="Dismiss").click()
    failed.wait_for(state="detached")


def test_a_model_is_converted_and_its_report_shown(models: PageDriver) -> None:
    models.get_by_role("button", name="Convert demo-draft").click()
    models.get_by_label("Recipe").select_option("8bit")
    models.get_by_label("Compare its logits").uncheck()
    models.get_by_role("dialog").get_by_role("button", name="Convert").click()
    card = job(models, "demo-draft-8bit")
    card.locator(".badge:has-text('done')").wait_for(timeout=40_000)
    assert "bits per weight, recipe 8bit" in card.locator(".report").inner_text()
    row = models.locator("tr", has_text="demo-draft-8bit")
    row.locator(".badge:has-text('converted')").wait_for()
    row.get_by_role("button", name="Delete").click()
    models.click("Delete it")
    row.wait_for(state="detached")
    assert list((models.server.folder / "models").iterdir()) == []  # type: ignore[attr-defined]


def test_an_added_model_is_served_after_the_next_start_until_it_is_removed(tmp_path: Path) -> None:
    def served(server: PageServer) -> list[str]:
        return [item["id"] for item in server.get("/v1/models").json()["data"]]

    with PageServer(tmp_path) as server:
        assert server.post("/hub/serve", {"model": "demo-draft"}).status_code == 200
        assert server.client.delete("/hub/serve/demo").status_code == 400, "it was not added"
    (tmp_path / "served.json").write_text('["demo-draft", "org/gone", 7]')
    with PageServer(tmp_path) as server:
        assert served(server) == ["demo"]
        server.routes.restore(server.service)
        assert served(server) == ["demo", "demo-draft"]
        assert server.client.delete("/hub/serve/demo-draft").status_code == 200
        assert served(server) == ["demo"]
    assert json.loads((tmp_path / "served.json").read_text()) == ["org/gone"]
    (tmp_path / "served.json").write_text("{")
    with PageServer(tmp_path) as server:
        server.routes.restore(server.service)
        assert served(server) == ["demo"]


def test_an_added_model_is_removed_on_the_page(models: PageDriver) -> None:
    row = models.locator("tr", has=models.get_by_text("demo-draft", exact=True))
    models.server.post("/hub/serve", {"model": "demo-draft"})
    models.reload()  # the page reads the list when it is opened
    row.locator(".badge:has-text('served')").wait_for()
    row.get_by_role("button", name="Serve demo-draft no longer").click()
    row.locator(".badge:has-text('bundled')").wait_for()


def test_names_are_never_paths(models: PageDriver) -> None:
    post = models.server.post
    for name in ("/etc", "../..", "~", str(models.server.folder)):  # type: ignore[attr-defined]
        assert post("/hub/serve", {"model": name}).status_code == 404
        assert post("/hub/downloads", {"model": name}).status_code == 404
        for given in ({"model": name, "name": "x"}, {"model": "demo", "name": name}):
            answer = post("/hub/conversions", {**given, "recipe": "4bit"})
            assert answer.status_code in (400, 404), name
    assert models.server.client.delete("/hub/models/demo").status_code == 400
    answer = models.server.client.delete("/hub/models/demo@main")
    assert (answer.status_code, "is served" in answer.text) == (400, True), "a revision of it"
    assert post("/hub/jobs/nothing", {"action": "pause"}).status_code == 404
