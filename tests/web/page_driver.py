"""The page as a person uses it: what is typed, what is seen. Any error in its console is one."""

import os
from typing import Any, NoReturn, Self

import pytest
from live_server import LiveServer

from tests.waiting import wait_until

LIMIT_MS = 30_000  # of every wait
REQUIRED = "MLXINFER_REQUIRE_WEB"  # environment variable: tests of the page may not be skipped


def missing(what: str, install: str, *, module: bool = False) -> NoReturn:
    """Skip a test or a whole module, or fail where nothing may be skipped."""
    message = f"there is no {what}; {install}"
    if os.environ.get(REQUIRED):
        pytest.fail(message)
    pytest.skip(message, allow_module_level=module)


def new_profile(browser: Any) -> Any:
    """A browser context, to be used by many tests: it parses and compiles the page once."""
    profile = browser.new_context(locale="en-GB", reduced_motion="reduce")
    profile.set_default_timeout(LIMIT_MS)
    profile.new_page()  # without an open tab the browser forgets what it has compiled
    return profile


def window(**given: Any) -> pytest.MarkDecorator:
    """Decorate a test whose `page` is in another window: PageDriver's `size` and `media`."""
    return pytest.mark.parametrize("page", [given], indirect=True, ids=["window"])


class PageDriver:
    """Tabs at one server, with nothing stored at first.

    Args:
        profile: of the browser, see `new_profile`; tests that share one follow one another.
        server: of the page.
        size: of the window, in pixels.
        media: what playwright's `emulate_media` takes.

    Attributes:
        page: playwright's page.
        errors: of the console and of scripts; a test that expects some clears it.
        asked: addresses that were fetched.
    """

    def __init__(
        self, profile: Any, server: LiveServer, *, size: tuple[int, int] = (1100, 760), **media: Any
    ) -> None:
        self.server = server
        self._profile, self._size, self._media = profile, size, media
        self._tabs: list[Any] = []
        self.errors: list[str] = []
        self.asked: list[str] = []
        profile.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        self.page = self.new_tab()
        stored = {"origin": server.url, "storageTypes": "local_storage,cookies"}
        profile.new_cdp_session(self.page).send("Storage.clearDataForOrigin", stored)

    def new_tab(self) -> Any:
        page = self._profile.new_page()
        self._tabs.append(page)
        page.set_viewport_size(dict(zip(("width", "height"), self._size, strict=True)))
        page.emulate_media(**self._media)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        page.on("request", lambda request: self.asked.append(request.url))
        return page

    def __getattr__(self, name: str) -> Any:
        """What playwright's page has, of the first tab."""
        return getattr(self.page, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tab in self._tabs:
            tab.close()
        if kind is None:
            assert self.errors == []
            foreign = [url for url in self.asked if not url.startswith(self.server.url)]
            assert foreign == [], "the page asked another host"

    def open(self, place: str = "/", *, tab: Any = None) -> None:
        """Go to the page and wait until it knows its models."""
        tab = tab or self.page
        tab.goto(self.server.url + place)
        if "#" not in place:
            tab.wait_for_selector('textarea[placeholder^="Ask "]')

    def ask(self, text: str, *, tab: Any = None) -> None:
        """Send a message; does not wait for the answer."""
        tab = tab or self.page
        tab.fill("#question", text)
        tab.press("#question", "Enter")

    def answered(self, text: str, *, tab: Any = None) -> Any:
        """Send a message and wait until its answer is complete; returns the answer's element."""
        tab = tab or self.page
        before = tab.locator("article.assistant").count()
        self.ask(text, tab=tab)
        wait_until(lambda: tab.locator("article.assistant").count() > before, LIMIT_MS / 1000)
        self.wait_idle(tab=tab)
        return tab.locator("article.assistant").last

    def wait_for_answer(self, text: str, *, whole: bool = False, tab: Any = None) -> None:
        """Wait until an answer's own text has this: what is drawn beside it may have it as well.

        Args:
            whole: wait until no answer arrives, too.
        """
        selector = f"article.assistant .markdown:has-text('{text}')"
        (tab or self.page).wait_for_selector(selector)
        if whole:
            self.wait_idle(tab=tab)

    def wait_idle(self, *, tab: Any = None) -> None:
        """Wait until no answer arrives."""
        (tab or self.page).wait_for_selector('button[aria-label="Send"]')

    def wait_for(self, script: str) -> None:
        """Wait until a script is true. The page's policy forbids playwright's own way, by eval."""
        wait_until(lambda: self.page.evaluate(script), LIMIT_MS / 1000)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def click(self, label: str, *, at: int = -1) -> None:
        """Click the last button of that label, or the one at `at`."""
        button = self.page.get_by_role("button", name=label, exact=True)
        (button.last if at == -1 else button.nth(at)).click()

    def new_chat(self) -> None:
        self.click("New chat", at=0)
        self.page.wait_for_selector(".welcome")

    @property
    def settings(self) -> Any:
        """The form with the settings of the conversation, where it is open."""
        return self.page.get_by_role("form", name="Settings of this conversation")

    def set_up(self, **fields: str) -> None:
        """Change settings of the conversation by the labels of their fields."""
        self.click("Settings of this conversation")
        self.settings.locator("summary").click()  # tools
        for label, value in fields.items():
            field = self.settings.get_by_label(label.replace("_", " "))
            if field.evaluate("e => e.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        self.click("Close the settings")

    def facts(self, answer: Any) -> str:
        """Open what is behind the last button of an answer, and read it."""
        answer.get_by_role("button", name="About this answer").click()
        return str(answer.locator(".about").inner_text())

    def clipboard(self) -> str:
        return str(self.page.evaluate("navigator.clipboard.readText()"))
