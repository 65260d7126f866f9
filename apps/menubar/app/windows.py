"""The windows: the chat, and everything else on tabs. They show a View and ask for Actions.

What the status item's menu offers is here as well, since an icon may be hidden or have no room.
"""

import json
from collections.abc import Callable, Hashable
from typing import Any

import toga

from .controller import Phase, View
from .menu import (
    Act,
    Action,
    Do,
    Entry,
    batch_text,
    model_actions,
    model_text,
    server_actions,
    shortened,
    state_text,
    transfer_actions,
    transfer_text,
)

MARGIN, GAP = 14, 8
CHAT_SIZE, WINDOW_SIZE = (440, 640), (560, 360)
HIDE = "mlxinfer:hide"  # where the page goes when Esc is left over


class Rows:
    """A column of widgets that is built again only when what it shows has another shape.

    Args:
        build: an item -> its widget, and a function that shows a newer item of the same shape.
        shape: of an item.
    """

    def __init__(
        self,
        build: Callable[[Any], tuple[toga.Widget, Callable[[Any], None]]],
        shape: Callable[[Any], Hashable],
        empty: str,
    ) -> None:
        self.box = toga.Box(direction="column", gap=GAP)
        self._build, self._shape, self._empty = build, shape, empty
        self._shapes: list[Hashable] | None = None
        self._updates: list[Callable[[Any], None]] = []

    def show(self, items: tuple[Any, ...]) -> None:
        """Show the items of a new view."""
        shapes = [self._shape(item) for item in items]
        if shapes != self._shapes:
            self.box.clear()
            built = [self._build(item) for item in items]
            for widget, _ in built:
                self.box.add(widget)
            if not built:
                self.box.add(toga.Label(self._empty))
            self._shapes, self._updates = shapes, [update for _, update in built]
        for item, update in zip(items, self._updates, strict=True):
            update(item)


def buttons(entries: tuple[Entry, ...], act: Act) -> list[toga.Widget]:
    """A button for each entry that does something."""
    return [_button(entry.text, entry.action, act) for entry in entries if entry.action]


def _button(text: str, action: Action, act: Act) -> toga.Button:
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
        self.window = toga.Window(title="mlxinfer", size=CHAT_SIZE, on_close=self._on_close)
        self.web = _web_view() if web else None
        self._url = ""
        self._wanted = "#"  # the place of the page that is shown next
        self._text = toga.Label("", text_align="center")
        self._browser = _button("Open in the browser", Action(Do.BROWSER), act)
        self._start = _button("Start the server", Action(Do.START), act)
        self._help = column(
            self._text, self._browser, self._start, _button("Open mlxinfer", Action(Do.WINDOW), act)
        )
        self.window.content = self._help

    def go(self, fragment: str) -> None:
        """Show a place of the page as soon as there is a server: "#new", "#chat/ID"."""
        self._wanted = fragment

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
            self.web.url = address + self._wanted
        elif self._wanted != "#":
            self.web.evaluate_javascript(f"location.hash = {json.dumps(self._wanted)}")
        self._url, self._wanted = address, "#"

    def _set_content(self, widget: toga.Widget) -> None:
        if self.window.content is not widget:
            self.window.content = widget

    def hide(self) -> None:
        """Put the window away."""
        self.window.hide()

    def _on_close(self, window: Any, **_: Any) -> bool:
        self.hide()
        return False


def _web_view() -> toga.WebView | None:
    """The system's web view; None where it is not installed (Qt without its web engine)."""
    try:
        return toga.WebView(flex=1)
    except (ImportError, NotImplementedError, RuntimeError):
        return None


class MainWindow:
    """Server, models, downloads and chats on tabs. Closing it hides it; the server goes on."""

    def __init__(self, act: Act, settings: toga.Widget) -> None:
        self._act = act
        self.window = toga.Window(title="mlxinfer", size=WINDOW_SIZE, on_close=self._on_close)
        self.state = toga.Label("", font_weight="bold")
        self._batch, self._problem = toga.Label(""), toga.Label("", color="#b3261e")
        self._quit = toga.Button(
            "Quit and stop the server", on_press=lambda _: act(Action(Do.QUIT_AND_STOP))
        )
        self._actions = Rows(self._server_row, lambda entries: entries, "")
        self._models = Rows(
            self._model_row, lambda model: (model.name, model_actions(model)), "No model."
        )
        self._disk = toga.Selection(items=[], flex=1)
        self._serve = toga.Button("Serve", on_press=self._on_serve)
        self._name = toga.TextInput(
            placeholder="org/name of the Hugging Face hub", flex=1, on_confirm=self._on_download
        )
        self._transfers = Rows(
            self._transfer_row, lambda t: (t.id, transfer_actions(t)), "Nothing is downloaded."
        )
        self._chats = Rows(self._chat_row, lambda chat: chat, "No conversation is stored.")
        self.tabs = toga.OptionContainer(
            content=[
                ("Server", self._server_tab()),
                ("Models", self._scrolled(self._models_tab())),
                ("Downloads", self._scrolled(self._downloads_tab())),
                ("Chats", self._scrolled(column(self._chats.box))),
                ("Settings", self._scrolled(settings)),
            ]
        )
        self.window.content = self.tabs

    def show(self, view: View) -> None:
        """Show a view."""
        self.state.text = state_text(view)
        self._batch.text = f"{view.url}: {batch_text(view)}" if view.usable else view.url
        self._quit.enabled = view.ours
        self._problem.text = shortened(view.problem, 200)
        self._actions.show((server_actions(view),))
        self._models.show(view.activity.models)
        if list(view.on_disk) != [item.value for item in self._disk.items]:
            self._disk.items = list(view.on_disk)
        self._serve.enabled = self._disk.enabled = bool(view.on_disk)
        self._transfers.show(view.transfers)
        self._chats.show(view.chats)

    def show_settings(self) -> None:
        """Show the settings."""
        self.tabs.current_tab = "Settings"
        self.window.show()

    # -- tabs --------------------------------------------------------------------------------------

    def _scrolled(self, content: toga.Widget) -> toga.ScrollContainer:
        return toga.ScrollContainer(content=content, horizontal=False)

    def _server_tab(self) -> toga.Box:
        return column(
            self.state,
            self._batch,
            self._problem,
            self._actions.box,
            row(
                _button("Chat", Action(Do.CHAT), self._act),
                _button("Copy address", Action(Do.COPY_URL), self._act),
                _button("Open dashboard", Action(Do.DASHBOARD), self._act),
                _button("Show log", Action(Do.LOG), self._act),
            ),
            row(
                _button("Quit", Action(Do.QUIT), self._act),
                self._quit,
            ),
        )

    def _models_tab(self) -> toga.Box:
        return column(
            self._models.box,
            toga.Divider(),
            toga.Label("On this machine, not served yet"),
            row(self._disk, self._serve),
            _button("Look for models that fit…", Action(Do.SEARCH), self._act),
        )

    def _downloads_tab(self) -> toga.Box:
        start = toga.Button("Download", on_press=self._on_download)
        return column(row(self._name, start), self._transfers.box)

    def _server_row(self, entries: tuple[Entry, ...]) -> tuple[toga.Widget, Callable[[Any], None]]:
        return row(*buttons(entries, self._act)), lambda _: None

    def _model_row(self, model: Any) -> tuple[toga.Widget, Callable[[Any], None]]:
        label = toga.Label("", flex=1)

        def update(model: Any) -> None:
            label.text = shortened(model_text(model), 60)

        return row(label, *buttons(model_actions(model), self._act)), update

    def _transfer_row(self, transfer: Any) -> tuple[toga.Widget, Callable[[Any], None]]:
        label, bar = toga.Label(""), toga.ProgressBar(max=1.0, flex=1)

        def update(transfer: Any) -> None:
            label.text = shortened(f"{transfer.name}: {transfer_text(transfer)}", 80)
            bar.value = min(transfer.done / transfer.total, 1.0) if transfer.total else 0.0

        line = row(bar, *buttons(transfer_actions(transfer), self._act))
        return toga.Box(children=[label, line], direction="column", gap=4), update

    def _chat_row(self, chat: Any) -> tuple[toga.Widget, Callable[[Any], None]]:
        text = shortened(chat.title, 60) or "Untitled"
        return _button(text, Action(Do.OPEN_CHAT, chat.id), self._act), lambda _: None

    # -- handlers ----------------------------------------------------------------------------------

    def _on_serve(self, _: Any) -> None:
        if self._disk.value is not None:
            self._act(Action(Do.SERVE, str(self._disk.value)))

    def _on_download(self, _: Any) -> None:
        name = self._name.value.strip()
        if name:
            self._name.value = ""
            self._act(Action(Do.DOWNLOAD, name))

    def _on_close(self, window: Any, **_: Any) -> bool:
        self.window.hide()
        return False


def greeting_of(view: View) -> str:
    """The server's state in the words of the first run's second step."""
    if view.usable:
        return f"A server runs at {view.url}."
    if view.phase is Phase.STARTING:
        return "The server starts…"
    return view.problem or f"{state_text(view)}. Its address is to be {view.url}."
