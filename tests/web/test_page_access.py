"""The page is accessible: axe finds nothing, 360 pixels are enough, both themes are readable."""

from typing import Any

import pytest
from page_driver import PageDriver, window

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
NARROW = (360, 640)


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


def check_access(page: PageDriver) -> None:
    assert violations(page.page) == []
    assert overflow(page.page) == []


@pytest.mark.alike
@pytest.mark.parametrize(
    "page",
    [{"color_scheme": "light"}, {"color_scheme": "dark", "size": NARROW}],
    ids=["wide", "narrow"],
    indirect=True,
)
def test_every_place_is_accessible_and_fits(page: PageDriver) -> None:
    page.server.script.says(f"<think>Hm.</think>{MARKDOWN}", pause_s=0.002)
    answer = page.answered("Show everything")
    answer.locator(".thoughts summary").click()
    assert overflow(page.page) == []
    page.facts(answer)
    page.click("Settings of this conversation")
    page.get_by_label("Temperature").fill("warm")
    page.wait_for_selector(".wrong:has-text('Type a number.')")
    check_access(page)
    page.click("Close the settings")
    for place in ("dashboard", "models"):
        page.evaluate(f"location.hash = '{place}'")
        page.wait_for_selector(".cards, td.name")
        page.evaluate("document.querySelectorAll('details').forEach(e => (e.open = true))")
        check_access(page)


@window(size=NARROW)
def test_narrow_screens_reach_everything_through_the_menu(page: PageDriver) -> None:
    page.answered("Narrow")
    assert not page.locator("#search").is_visible()
    page.click("Conversations")
    page.locator("#search").wait_for()
    page.get_by_role("link", name="Dashboard").click()
    page.wait_for_selector("h1:has-text('Dashboard')")
    page.click("Conversations")
    page.locator("#search").wait_for()
    page.go_back()
    page.wait_for_selector("#question")
    assert not page.locator("#search").is_visible(), "the menu hides the place"


@window(size=(380, 480))
def test_the_small_window_has_the_conversation_alone(page: PageDriver) -> None:
    page.open("/?compact=1")
    assert not page.locator("aside").is_visible()
    assert page.answered("Quick").inner_text().startswith("ok")
    check_access(page)
    page.click("New chat")
    page.wait_for_selector(".welcome")


def test_the_app_is_told_of_an_escape_that_the_page_does_not_need(page: PageDriver) -> None:
    page.server.script.says("begun ", rest="never")
    page.open("/?compact=1&shell=1")
    page.ask("Wait")
    page.get_by_text("begun").wait_for()
    page.keyboard.press("Escape")  # stops the answer
    page.wait_idle()
    assert HIDE not in page.asked
    page.keyboard.press("Escape")
    wait_until(lambda: HIDE in page.asked)
    page.asked.remove(HIDE)
    page.errors.clear()  # this browser knows no such scheme


def test_links_open_a_new_chat_or_a_stored_one(page: PageDriver) -> None:
    page.open("/?compact=1")
    page.answered("Linked question")
    result = page.server.get("/history/conversations").json()["data"]
    id = next(item["id"] for item in result if item["title"] == "Linked question")
    page.evaluate("location.hash = '#new'")
    page.wait_for_selector(".welcome")
    page.evaluate(f"location.hash = '#chat/{id}'")
    page.get_by_role("article").get_by_text("Linked question").wait_for()
    tab = page.new_tab()
    tab.goto(f"{page.server.url}/?compact=1#chat/{id}")
    tab.get_by_role("article").get_by_text("Linked question").wait_for()
    assert tab.url.endswith(f"#chat/{id}")


def test_a_screen_reader_hears_the_answer_once(page: PageDriver) -> None:
    page.server.script.says("Spoken words")
    page.answered("Say")
    assert page.get_by_role("status").inner_text() == "Answer: Spoken words"
    roles = page.get_by_role("article").all()
    assert [role.get_attribute("aria-label") for role in roles] == ["You", "Assistant"]


@window(color_scheme="light")
def test_the_theme_is_kept(page: PageDriver) -> None:
    for expected in ("light", "dark"):
        page.locator("button[aria-label^='Theme']").click()
        assert page.evaluate("document.documentElement.dataset.theme") == expected
    page.open()
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(23, 26, 24)"
