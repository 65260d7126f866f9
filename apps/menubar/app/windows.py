"""The windows: the chat, and the server with the settings. They show a View and ask for Actions.

An icon may be hidden or have no room, so the windows alone suffice: models, downloads and stored
chats are on the server's page.
"""

import base64
import json
from typing import Any

import toga

from .controller import View
from .menu import (
    Act,
    Action,
    Do,
    MenuEntry,
    batch_text,
    server_actions,
    shortened,
    state_text,
)

MARGIN, GAP = 14, 8
CHAT_SIZE, WINDOW_SIZE = (440, 640), (560, 360)
HIDE = "mlxinfer:hide"  # where the page goes when Esc is left over
ATTACH = """(function attach(name, data) {
  const field = document.getElementById("question");
  if (!field) return setTimeout(attach, 100, name, data);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], name, { type: "image/png" }));
  const fields = { bubbles: true, cancelable: true, dataTransfer: given };
  field.dispatchEvent(new DragEvent("drop", fields));
})"""  # as if the file had been dropped; the page may still be loading


def button(text: str, action: Action, act: Act) -> toga.Button:
    """A button that asks for an action."""
    return toga.Button(text, on_press=lambda _: act(action))


def row(*widgets: toga.Widget) -> toga.Box:
    """Widgets beside each other."""
    return toga.Box(children=list(widgets), direction="row", gap=GAP, align_items="center")


def column(*widgets: toga.Widget) -> toga.Box:
    """Widgets below each other, with a margin around them."""
    return toga.Box(children=list(widgets), direction="column", gap=GAP, margin=MARGIN)


class ChatWindow:
    """The page in its compact form; where there is no server, what to do about it.

    It is hidden, not closed, so that an answer goes on and comes back as it was.
    """

    def __init__(self, act: Act, *, web: bool = True) -> None:
        self._act = act
        self.window = toga.Window(title="mlxinfer", size=CHAT_SIZE, on_close=_hide)
        self.web = _web_view() if web else None
        self._url = ""
        self._wanted = "#"  # the place of the page that is shown next
        self._scripts: list[str] = []  # for the page that is being loaded
        self._loaded = False
        if self.web is not None:
            self.web.on_webview_load = self._on_load
        self._text = toga.Label("", text_align="center")
        self._browser = button("Open in the browser", Action(Do.BROWSER), act)
        self._start = button("Start the server", Action(Do.START), act)
        self._help = column(
            self._text, self._browser, self._start, button("Open mlxinfer", Action(Do.WINDOW), act)
        )
        self.window.content = self._help

    def go(self, fragment: str) -> None:
        """Show a place of the page as soon as there is a server: "#new", "#chat/ID"."""
        self._wanted = fragment

    def attach(self, name: str, data: bytes) -> bool:
        """Attach a PNG to the next question, once the page is there; False: no page is shown."""
        if self.web is None or not self._url:
            return False
        encoded = base64.b64encode(data).decode()
        self._scripts.append(f"{ATTACH}({json.dumps(name)}, {json.dumps(encoded)})")
        if self._loaded:
            self._on_load()
        return True

    def _on_load(self, *_: Any, **__: Any) -> None:
        assert self.web is not None
        self._loaded = True
        for script in self._scripts:
            self.web.evaluate_javascript(script)
        self._scripts.clear()

    def show(self, view: View, address: str) -> None:
        """Show the page at an address of the server, or why it cannot be shown."""
        if not view.usable or self.web is None:
            self._url = ""
            self._text.text = shortened(view.problem, 60) or state_text(view)
            self._browser.enabled = view.usable
            self._start.enabled = bool(server_actions(view)) and not view.ours
            self._set_content(self._help)
            return
        self._set_content(self.web)
        if self._url != address:  # the server is another, or has been started again
            self._loaded = False
            self.web.url = address + self._wanted
        elif self._wanted != "#":
            self.web.evaluate_javascript(f"location.hash = {json.dumps(self._wanted)}")
        self._url, self._wanted = address, "#"

    def _set_content(self, widget: toga.Widget) -> None:
        if self.window.content is not widget:
            self.window.content = widget


def _hide(window: toga.Window, **_: Any) -> bool:
    """Put a window away instead of closing it."""
    window.hide()
    return False


def _web_view() -> toga.WebView | None:
    """The system's web view; None where it is not installed (Qt without its web engine)."""
    try:
        return toga.WebView(flex=1)
    except (ImportError, NotImplementedError, RuntimeError):
        return None


class MainWindow:
    """The server and the settings on tabs. Closing it hides it; the server goes on."""

    def __init__(self, act: Act, settings: toga.Widget) -> None:
        self._act = act
        self.window = toga.Window(title="mlxinfer", size=WINDOW_SIZE, on_close=_hide)
        self.state = toga.Label("", font_weight="bold")
        self.batch, self.problem = toga.Label(""), toga.Label("", color="#b3261e")
        self._quit = button("Quit and stop the server", Action(Do.QUIT_AND_STOP), act)
        self._actions = row()
        self._entries: tuple[MenuEntry, ...] = ()  # that `_actions` has buttons for
        scrolled = toga.ScrollContainer(content=settings, horizontal=False)
        self.tabs = toga.OptionContainer(
            content=[("Server", self._server_tab()), ("Settings", scrolled)]
        )
        self.window.content = self.tabs

    def show(self, view: View) -> None:
        """Show a view."""
        self.state.text = state_text(view)
        self.batch.text = f"{view.url}: {batch_text(view)}" if view.usable else view.url
        self._quit.enabled = view.ours
        self.problem.text = shortened(view.problem, 200)
        if (entries := server_actions(view)) != self._entries:
            self._entries = entries
            self._actions.clear()
            self._actions.add(*[button(e.text, e.action, self._act) for e in entries if e.action])

    def show_settings(self) -> None:
        """Show the settings."""
        self.tabs.current_tab = "Settings"
        self.window.show()

    def _server_tab(self) -> toga.Box:
        places = {
            "Chat": Do.CHAT,
            "All chats": Do.BROWSER,
            "Models and downloads": Do.SEARCH,
            "Dashboard": Do.DASHBOARD,
        }
        return column(
            *(self.state, self.batch, self.problem, self._actions),
            row(*[button(text, Action(do), self._act) for text, do in places.items()]),
            row(
                button("Copy address", Action(Do.COPY_URL), self._act),
                button("Show log", Action(Do.LOG), self._act),
            ),
            row(button("Quit", Action(Do.QUIT), self._act), self._quit),
        )
