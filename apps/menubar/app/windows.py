"""The windows: the chat, and the server with the settings. They show a View and ask for Actions.

An icon may be hidden or have no room, so the windows alone suffice: models, downloads and stored
chats are on the server's page.
"""

import base64
import json
import textwrap
import time
from collections.abc import Callable
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import toga

from .client import Chat, checked_url
from .controller import View
from .menu import (
    Act,
    Action,
    Do,
    MenuEntry,
    detail_text,
    first_action,
    server_actions,
    shortened,
    status_of,
    transfer_text,
)
from .platforms import BAD, Look, Platform, parse_hotkey
from .settings import Settings

RESOURCES = Path(__file__).parent / "resources"
MARGIN, GAP = 20, 8
TITLE = 15  # points
CHAT_SIZE, WINDOW_SIZE = (440, 640), (600, 420)
BUTTON_WIDTH = 140
PLACES = (
    ("models", "Models", "Find, download and load them", "Open Models", Do.SEARCH),
    ("chat", "Chats", "Read and search earlier chats", "Open Chats", Do.BROWSER),
    ("dashboard", "Dashboard", "What runs, and how full it is", "Open Dashboard", Do.DASHBOARD),
    ("log", "Log", "Of the server that the app started", "Show Log", Do.LOG),
    ("address", "For other programs", "", "Copy Address", Do.COPY_URL),
)
HIDE = "mlxinfer:hide"  # where the page goes when Esc is left over
ATTACH = """(function attach(name, type, data) {
  const field = document.getElementById("question");
  if (!field) return setTimeout(attach, 100, name, type, data);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], name, { type }));
  const fields = { bubbles: true, cancelable: true, dataTransfer: given };
  field.dispatchEvent(new DragEvent("drop", fields));
})"""  # as if the file had been dropped; the page may still be loading


def button(text: str, action: Action, act: Act) -> toga.Button:
    return toga.Button(text, on_press=lambda _: act(action))


def row(*widgets: toga.Widget) -> toga.Box:
    """Widgets beside each other."""
    return toga.Box(children=list(widgets), gap=GAP, align_items="center")


def column(*widgets: toga.Widget, margin: int = MARGIN, **style: Any) -> toga.Box:
    """Widgets below each other, with a margin around them."""
    style = {"direction": "column", "gap": GAP, "margin": margin, **style}
    return toga.Box(children=list(widgets), **style)


def space() -> toga.Box:
    """An empty box that takes all room, so that the next widgets stand at the edge."""
    return toga.Box(flex=1)


def picture(name: str, size: int) -> toga.ImageView:
    """A picture of the app's resources."""
    return toga.ImageView(toga.Image(RESOURCES / f"{name}.png"), width=size, height=size)


def bold(text: str = "", **style: Any) -> toga.Label:
    return toga.Label(text, font_weight="bold", **style)


def quiet(platform: Platform, text: str = "") -> toga.Label:
    """A label beside a more important one."""
    label = toga.Label(text)
    platform.style(label, Look.QUIET)
    return label


def wrapped(text: str) -> str:
    """A problem in a few lines that fit a window."""
    return textwrap.fill(shortened(text, 240), 58)


class WindowHead:
    """The head of a window: the server's state as icon and word, and the first thing to do.

    Args:
        text, action: the first thing to do with a server that answers.
    """

    def __init__(self, act: Act, platform: Platform, text: str, action: Action) -> None:
        self._usable, self._action = (text, action), action
        self.first = toga.Button(text, on_press=lambda _: act(self._action))
        platform.style(self.first, Look.PRIMARY)
        self.icon = toga.Label("", font_size=TITLE)
        self.word = bold(font_size=TITLE)
        self.detail, self.problem = quiet(platform), toga.Label("")
        lines = column(row(self.icon, self.word), self.detail, margin=0, gap=0)
        self.others = row()
        line = row(picture("icon", 48), lines, space(), self.others, self.first)
        self.content = column(line, self.problem, margin=0)

    def show(self, view: View) -> None:
        status = status_of(view)
        self.icon.text, self.word.text = status.icon, status.word
        is_dark = bool(toga.App.app.dark_mode)
        self.icon.style.color, self.problem.style.color = status.tones[is_dark], BAD[is_dark]
        self.detail.text, self.problem.text = detail_text(view), wrapped(view.problem)
        first = first_action(view, self._usable)
        self.first.text, self._action = first
        self.first.enabled = view.usable or first != self._usable


class ChatWindow:
    """The page in its compact form; without a server or a web view, the chats and what to do.

    It is hidden, not closed, so that an answer goes on and comes back as it was.
    """

    def __init__(self, act: Act, platform: Platform, *, web: bool = True) -> None:
        self._act = act
        self.window = toga.Window(title="mlxinfer", size=CHAT_SIZE, on_close=_hide)
        self.web = _web_view() if web else None
        self._url = ""
        self._wanted = "#"  # the place of the page that is shown next
        self._scripts: list[str] = []  # for the page that is being loaded
        self._loaded = False
        if self.web is not None:
            self.web.on_webview_load = self._on_load
        self._head = WindowHead(act, platform, "Open in Browser", Action(Do.BROWSER))
        self._icon = toga.Icon(str(RESOURCES / "chat.png"))
        self._shown: tuple[Chat, ...] = ()
        self.chats = toga.DetailedList(on_select=self._on_select, flex=1)
        self._recent = column(margin=0, flex=1)
        self._help = column(
            self._head.content,
            self._recent,
            row(space(), button("Open mlxinfer", Action(Do.WINDOW), act)),
        )
        self.window.content = self._help

    def go(self, fragment: str) -> None:
        """Show a place of the page as soon as there is a server: "#new", "#chat/ID"."""
        self._wanted = fragment

    def attach(self, name: str, data: bytes) -> bool:
        """Attach a file to the next question, once the page is there; False: no page is shown."""
        if self.web is None or not self._url:
            return False
        encoded = base64.b64encode(data).decode()
        given = (name, guess_type(name)[0] or "", encoded)
        self._scripts.append(f"{ATTACH}({', '.join(map(json.dumps, given))})")
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
            self._head.show(view)
            self._show_chats(view.chats)
            self._set_content(self._help)
            return
        self._set_content(self.web)
        if self._url != address:  # the server is another, or has been started again
            self._loaded = False
            self.web.url = address + self._wanted
        elif self._wanted != "#":
            self.web.evaluate_javascript(f"location.hash = {json.dumps(self._wanted)}")
        self._url, self._wanted = address, "#"

    def _show_chats(self, chats: tuple[Chat, ...]) -> None:
        if chats != self._shown:
            self._shown = chats
            self._recent.clear()
            self._recent.add(*([bold("Recent Chats"), self.chats] if chats else []))
            whens = [time.strftime("%d %B, %H:%M", time.localtime(c.changed_s)) for c in chats]
            titles = [shortened(chat.title, 44) or "Untitled" for chat in chats]
            self.chats.on_select = None  # what was selected is no choice among new rows
            self.chats.data = [(*row, self._icon) for row in zip(titles, whens, strict=True)]
            self.chats.on_select = self._on_select

    def _on_select(self, _: Any) -> None:
        if self.chats.selection is not None:
            chat = self._shown[self.chats.data.index(self.chats.selection)]
            self._act(Action(Do.BROWSER, f"#chat/{chat.id}"))

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

    def __init__(self, act: Act, platform: Platform, settings: toga.Widget) -> None:
        self._act, self._platform = act, platform
        self.window = toga.Window(title="mlxinfer", size=WINDOW_SIZE, on_close=_hide)
        self.head = WindowHead(act, platform, "Open Chat", Action(Do.CHAT))
        self.places: list[toga.Label] = []  # what is there, in the order of PLACES
        self._entries: tuple[MenuEntry, ...] = ()  # that the head has buttons for
        scrolled = toga.ScrollContainer(content=settings, horizontal=False)
        self.tabs = toga.OptionContainer(
            content=[("Server", self._server_tab()), ("Settings", scrolled)]
        )
        self.window.content = self.tabs

    def show(self, view: View) -> None:
        self.head.show(view)
        self.places[-1].text = f"{view.url}/v1"
        running = [
            f"{transfer.name}: {transfer_text(transfer)}"
            for transfer in view.transfers
            if transfer.open
        ]
        self.places[0].text = shortened(running[0], 56) if running else PLACES[0][2]
        entries = tuple(e for e in server_actions(view) if e.action != Action(Do.START))
        if entries != self._entries:
            self._entries = entries
            self.head.others.clear()
            self.head.others.add(
                *[button(e.text, e.action, self._act) for e in entries if e.action]
            )

    def show_settings(self) -> None:
        self.tabs.current_tab = "Settings"
        self.window.show()

    def _server_tab(self) -> toga.Box:
        rows = []
        for icon, title, about, label, do in PLACES:
            self.places.append(quiet(self._platform, about))
            lines = column(bold(title), self.places[-1], margin=0, gap=0)
            open_it = button(label, Action(do), self._act)
            open_it.style.width = BUTTON_WIDTH
            rows.append(row(picture(icon, 24), lines, space(), open_it))
        leave = row(space(), button("Quit", Action(Do.QUIT), self._act))
        return column(self.head.content, toga.Divider(), *rows, toga.Divider(), leave, gap=12)


# -- the settings ---------------------------------------------------------------------------------

LABEL_WIDTH = 150
SWITCHES = {
    "start_server": "Start the server when the app starts",
    "stop_server": "Stop that server when the app is quit",
    "show_rate": "Show tokens/s in the menu bar",
    "hide_icon": "Hide the icon; open the app again to see this window",
}


class SettingsForm:
    """The settings of the app. A switch applies at once, a field when it is left, or by Enter.

    Args:
        settings: as they are.
        platform: knows whether the app starts at login.
        change: takes fields of Settings that change.

    Attributes:
        texts, switches: the widgets, by the fields of Settings.
    """

    def __init__(self, settings: Settings, platform: Platform, change: Callable[..., None]) -> None:
        self._platform, self._change, self._settings = platform, change, settings
        folder, none = "the hub's usual folder", "none"
        self.texts = {
            "url": toga.TextInput(value=settings.url, flex=1),
            "key": toga.PasswordInput(value=settings.key, flex=1),
            "models_folder": toga.TextInput(
                value=settings.models_folder, placeholder=folder, flex=1
            ),
            "hotkey": toga.TextInput(value=settings.hotkey, placeholder=none, flex=1),
        }
        for field in self.texts.values():
            field.on_confirm = field.on_lose_focus = self.apply
        self.switches = {
            name: toga.Switch(text, value=getattr(settings, name), on_change=self.apply)
            for name, text in SWITCHES.items()
        }
        starts = platform.starts_at_login()
        self.at_login = toga.Switch("Open at login", value=starts, on_change=self.apply)
        self.said = toga.Label("")
        start, stop, *others = self.switches.values()
        self.content = column(
            bold("Server"),
            self._field("Address", "url"),
            self._field("API key", "key"),
            self._field("Folder of models", "models_folder"),
            *(start, stop, toga.Divider(), bold("App")),
            self._field("Hotkey of the chat", "hotkey"),
            *(self.at_login, *others, self.said),
        )

    def apply(self, *_: Any, **__: Any) -> None:
        """Check and take over what has changed; a mistake is said below the fields."""
        values = {name: field.value.strip() for name, field in self.texts.items()}
        try:
            parse_hotkey(values["hotkey"])
            values["url"] = checked_url(values["url"])
        except ValueError as error:
            self.say(str(error))
            return
        self.said.text = ""
        values |= {name: switch.value for name, switch in self.switches.items()}
        if values != {name: getattr(self._settings, name) for name in values}:
            self._change(**values)
        if self.at_login.value != self._platform.starts_at_login():
            self._set_login_item()

    def show(self, settings: Settings) -> None:
        """Take over what was chosen here or in the first run."""
        self._settings = settings
        self.texts["models_folder"].value = settings.models_folder

    def say(self, text: str) -> None:
        """Say something below the fields."""
        self.said.text = shortened(text, 90)

    def _set_login_item(self) -> None:
        wanted = self.at_login.value
        if self._platform.start_at_login(wanted) != wanted:
            self.at_login.value = not wanted
            self.say("The system did not change what opens at login.")

    def _field(self, text: str, name: str) -> toga.Box:
        return row(toga.Label(text, width=LABEL_WIDTH), self.texts[name])
