"""The page is accessible: axe finds nothing, 360 pixels are enough, both themes are readable."""

from typing import Any

import pytest
from page_driver import PageDriver
from page_server import PageServer

from tests.waiting import wait_until

pytestmark = pytest.mark.ci

MARKDOWN = """# T

Text with [a link](https://a.example), `code` and $x$.

```python
x = 1  # c
```

> q

| a |
|---|
| 1 |
"""
HIDE = "mlxinfer:hide"
WIDE, NARROW = (1100, 760), (360, 640)


def violations(page: Any) -> list[str]:
    """Return axe's findings as `rule: element`."""
    from axe_playwright_python.sync_playwright import Axe

    breaches = Axe().run(page).response["violations"]
    return [f"{item['id']}: {node['html'][:120]}" for item in breaches for node in item["nodes"]]


def overflow(page: Any) -> list[str]:
    """Elements that stick out of the window, but for what scrolls by itself."""
    script = """() => [...document.querySelectorAll('main *')].filter(e =>
        e.getBoundingClientRect().right > innerWidth + 1 &&
        !e.closest('pre, .table, .math, svg, .off-screen')).map(e => e.outerHTML.slice(0, 90))"""
    return list(page.evaluate(script))


@pytest.mark.alike
@pytest.mark.parametrize(
    ("scheme", "size"), [("light", WIDE), ("dark", NARROW)], ids=["wide", "narrow"]
)
def test_every_place_is_accessible_and_fits(
    profile: Any, server: PageServer, scheme: str, size: tuple[int, int]
) -> None:
    server.script.reset()
    server.script.says(f"<think>Hm.</think>{MARKDOWN}", pause_s=0.002)
    with PageDriver(
        profile, server, color_scheme=scheme, reduced_motion="reduce", size=size
    ) as page:
        page.open()
        answer = page.answered("Show everything")
        answer.locator(".thoughts summary").click()
        assert overflow(page.page) == []
        page.facts(answer)
        page.click("Settings of this conversation")
        page.page.get_by_label("Temperature").fill("warm")
        page.page.wait_for_selector(".wrong:has-text('Type a number.')")
        assert violations(page.page) == []
        assert overflow(page.page) == []
        page.click("Close the settings")
        for place in ("dashboard", "models"):
            page.page.evaluate(f"location.hash = '{place}'")
            page.page.wait_for_selector(".cards, td.name")
            page.page.evaluate("document.querySelectorAll('details').forEach(e => (e.open = true))")
            assert violations(page.page) == []
            assert overflow(page.page) == []


def test_narrow_screens_reach_everything_through_the_menu(profile: Any, server: PageServer) -> None:
    server.script.reset()
    with PageDriver(profile, server, size=NARROW) as page:
        page.open()
        page.answered("Narrow")
        assert not page.page.locator("#search").is_visible()
        page.click("Conversations")
        page.page.locator("#search").wait_for()
        page.page.get_by_role("link", name="Dashboard").click()
        page.page.wait_for_selector("h1:has-text('Dashboard')")
        page.click("Conversations")
        page.page.locator("#search").wait_for()
        page.page.go_back()
        page.page.wait_for_selector("#question")
        assert not page.page.locator("#search").is_visible(), "the menu hides the place"


def test_the_small_window_has_the_conversation_alone(profile: Any, server: PageServer) -> None:
    server.script.reset()
    with PageDriver(profile, server, size=(380, 480)) as page:
        page.open("/?compact=1")
        assert not page.page.locator("aside").is_visible()
        assert page.answered("Quick").inner_text().startswith("ok")
        assert violations(page.page) == []
        assert overflow(page.page) == []
        page.click("New chat")
        page.page.wait_for_selector(".welcome")


def test_the_app_is_told_of_an_escape_that_the_page_does_not_need(page: PageDriver) -> None:
    page.server.script.says("begun ", rest="never")
    page.open("/?compact=1&shell=1")
    page.ask("Wait")
    page.page.get_by_text("begun").wait_for()
    page.page.keyboard.press("Escape")  # stops the answer
    page.wait_idle()
    assert HIDE not in page.asked
    page.page.keyboard.press("Escape")
    wait_until(lambda: HIDE in page.asked)
    page.asked.remove(HIDE)
    page.errors.clear()  # this browser knows no such scheme


def test_links_open_a_new_chat_or_a_stored_one(page: PageDriver) -> None:
    page.open("/?compact=1")
    page.answered("Linked question")
    result = page.server.get("/history/conversations").json()["data"]
    id = next(item["id"] for item in result if item["title"] == "Linked question")
    page.page.evaluate("location.hash = '#new'")
    page.page.wait_for_selector(".welcome")
    page.page.evaluate(f"location.hash = '#chat/{id}'")
    page.page.get_by_role("article").get_by_text("Linked question").wait_for()
    tab = page.new_tab()
    tab.goto(f"{page.server.url}/?compact=1#chat/{id}")
    tab.get_by_role("article").get_by_text("Linked question").wait_for()
    assert tab.url.endswith(f"#chat/{id}")


def test_a_screen_reader_hears_the_answer_once(page: PageDriver) -> None:
    page.server.script.says("Spoken words")
    page.answered("Say")
    assert page.page.get_by_role("status").inner_text() == "Answer: Spoken words"
    roles = page.page.get_by_role("article").all()
    assert [role.get_attribute("aria-label") for role in roles] == ["You", "Assistant"]


def test_the_theme_is_kept(profile: Any, server: PageServer) -> None:
    server.script.reset()
    with PageDriver(profile, server, color_scheme="light") as page:
        page.open()
        for expected in ("light", "dark"):
            page.page.locator("button[aria-label^='Theme']").click()
            assert page.page.evaluate("document.documentElement.dataset.theme") == expected
        page.open()
        back = "getComputedStyle(document.body).backgroundColor"
        assert page.page.evaluate(back) == "rgb(23, 26, 24)"
