"""The menu of the status item, as data: entries that follow from what is shown."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..memory import human_bytes
from .client import ModelStatus, Transfer, is_local
from .controller import Phase, View
from .platforms import ACCENT, BAD, Tones

MAX_TITLE = 48  # characters of a conversation's title


class Do(StrEnum):
    """Actions of the user; most name a model, a transfer or a conversation beside it."""

    CHAT = "chat"
    NEW_CHAT = "new chat"
    SCREENSHOT = "ask about the screen"
    OPEN_CHAT = "open chat"
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    COPY_URL = "copy address"
    COPY_ANSWER = "copy last answer"
    BROWSER = "open in the browser"
    DASHBOARD = "dashboard"
    SEARCH = "search models"
    LOG = "show log"
    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"
    SERVE = "serve"
    GET = "get"  # download where it is not here, serve and load
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    WINDOW = "window"
    SETTINGS = "settings"
    QUIT = "quit"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do, with what it is done to."""

    do: Do
    target: str = ""


Act = Callable[[Action], object]


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """A line of the menu; without an action it only says something."""

    text: str
    action: Action | None = None
    section: int = 0  # entries of different sections have a line between them
    entries: "tuple[MenuEntry, ...]" = ()  # of the submenu that it opens


def menu_of(view: View) -> tuple[MenuEntry, ...]:
    head = [MenuEntry(state_text(view))]
    if view.problem:
        head.append(MenuEntry(shortened(view.problem, 90), Action(Do.WINDOW)))
    return (
        *head,
        MenuEntry("Chat", Action(Do.CHAT), 1),
        MenuEntry("New Chat", Action(Do.NEW_CHAT), 1),
        MenuEntry("Ask About a Part of the Screen", Action(Do.SCREENSHOT), 1),
        *_chats(view),
        *_models(view),
        *_transfers(view),
        MenuEntry("Server", section=2, entries=_server(view)),
        MenuEntry("Open mlxinfer", Action(Do.WINDOW), 3),
        MenuEntry("Settings…", Action(Do.SETTINGS), 3),
        MenuEntry("Quit", Action(Do.QUIT), 4),
    )


class Status(NamedTuple):
    """The state as an icon and a word; no two differ in colour alone."""

    icon: str
    word: str
    tones: Tones


AMBER, GREY, RED = Tones("#9a6200", "#ff9f0a"), Tones("#6e6e73", "#8e8e93"), BAD
ANSWERING, LOADING = Status("◉", "Answering", ACCENT), Status("◌", "Loading", AMBER)
STATUS = {
    Phase.RUNNING: Status("●", "Ready", ACCENT),
    Phase.STOPPED: Status("○", "Stopped", GREY),
    Phase.STARTING: Status("◌", "Starting", AMBER),
    Phase.STOPPING: Status("◌", "Stopping", AMBER),
    Phase.LOCKED: Status("▲", "Locked", RED),
    Phase.SILENT: Status("▲", "No answer", RED),
    Phase.FOREIGN: Status("▲", "Address taken", RED),
}


def status_of(view: View) -> Status:
    """The state of the server, and of its answers while there are some."""
    if view.activity.busy:
        return ANSWERING
    loading = any(model.state == "loading" for model in view.activity.models)
    return LOADING if loading else STATUS[view.phase]


def detail_text(view: View) -> str:
    """The loaded models and running requests; or the reason why the server cannot be used."""
    if not view.usable:
        texts = {
            Phase.LOCKED: "It needs a key that may administer it: see Settings",
            Phase.FOREIGN: f"Another program answers at {view.url}",
        }
        return texts.get(view.phase, view.url)
    named = [loaded_text(m) for m in view.activity.models if m.state in ("loaded", "loading")]
    parts = [shortened(", ".join(named), 32) or "no model is loaded"]
    if view.activity.busy:
        parts.append(batch_text(view))
    return " · ".join(parts)


def state_text(view: View) -> str:
    """The state in one line: "● Ready · demo"."""
    status = status_of(view)
    return f"{status.icon} {status.word} · {detail_text(view)}"


def first_action(view: View, usable: tuple[str, Action]) -> tuple[str, Action]:
    """The label and the action of the main button: `usable`, or what makes the server usable."""
    if view.phase in (Phase.RUNNING, Phase.STARTING, Phase.STOPPING):
        return usable
    if view.phase is Phase.STOPPED and is_local(view.url):
        return "Start the Server", Action(Do.START)
    return "Open Settings", Action(Do.SETTINGS)


def loaded_text(model: ModelStatus) -> str:
    """A model that is loaded by its short name, or how far it is: "demo 42 %"."""
    name = model.name.rpartition("/")[2]
    return name if model.state == "loaded" else f"{name} {model.loaded:.0%}".replace("%", " %")


def batch_text(view: View) -> str:
    """The requests: "1 answer, reading 12,000 tokens: 42 %, 31 s left, 1 waiting, 31 tokens/s"."""
    running, waiting = view.activity.running, view.activity.waiting
    parts = [f"{running} {'answer' if running == 1 else 'answers'}"] if running else []
    for read, total, left_s in view.activity.reading:
        parts.append(f"reading {total:,} tokens: {100 * read // total} %")
        if left_s >= 1:
            parts.append(f"{left_s:.0f} s left")
    if waiting:
        parts.append(f"{waiting} waiting")
    return ", ".join([*parts, *filter(None, [rate_text(view)])])


def rate_text(view: View) -> str:
    """Tokens a second while there are some, else nothing."""
    if not view.rate:
        return ""
    return f"{view.rate:.0f} tokens/s" if view.rate >= 10 else f"{view.rate:.1f} tokens/s"


def transfer_text(transfer: Transfer) -> str:
    """The progress of a transfer in words: "42 %, 3.1 of 7.2 GB"."""
    if transfer.error:
        return f"{transfer.state}: {shortened(transfer.error, 90)}"
    if not transfer.total:
        return transfer.state
    share = f"{100 * transfer.done / transfer.total:.0f} %"
    if transfer.kind == "download":
        share += f", {human_bytes(transfer.done)} of {human_bytes(transfer.total)}"
    return share if transfer.state == "running" else f"{transfer.state}, {share}"


def model_text(model: ModelStatus) -> str:
    """A model with its state: "chat: loaded, 4.6 GB, pinned"."""
    parts = [model.state if not model.failure else f"failed: {shortened(model.failure, 60)}"]
    if model.weights_bytes:
        parts.append(human_bytes(model.weights_bytes))
    if model.pinned:
        parts.append("pinned")
    return f"{model.name}: {', '.join(parts)}"


def shortened(text: str, most: int) -> str:
    """A text of one line and at most `most` characters, without backticks."""
    line = " ".join(text.replace("`", "").split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def model_actions(model: ModelStatus) -> tuple[MenuEntry, ...]:
    """Entries for the actions that a served model allows now."""
    loaded = model.state == "loaded"
    entries = []
    if loaded and not model.pinned:
        entries.append(MenuEntry("Unload", Action(Do.UNLOAD, model.name)))
    if model.state == "unloaded":
        entries.append(MenuEntry("Load", Action(Do.LOAD, model.name)))
    if model.pinned:
        entries.append(MenuEntry("Unpin", Action(Do.UNPIN, model.name)))
    elif loaded:
        entries.append(MenuEntry("Keep Loaded", Action(Do.PIN, model.name)))
    return tuple(entries) or (MenuEntry(model.state),)


def transfer_actions(transfer: Transfer) -> tuple[MenuEntry, ...]:
    """Entries for the actions that a transfer allows now."""
    if transfer.state == "running":
        first = MenuEntry("Pause", Action(Do.PAUSE, transfer.id))
    elif transfer.state == "paused":
        first = MenuEntry("Resume", Action(Do.RESUME, transfer.id))
    else:
        return ()
    return first, MenuEntry("Cancel", Action(Do.CANCEL, transfer.id))


def server_actions(view: View) -> tuple[MenuEntry, ...]:
    """Start, stop and restart, as far as they are possible now."""
    if view.phase is Phase.STOPPED and is_local(view.url):
        return (MenuEntry("Start", Action(Do.START)),)
    if view.ours and view.phase is not Phase.STOPPING:
        return MenuEntry("Stop", Action(Do.STOP)), MenuEntry("Restart", Action(Do.RESTART))
    return ()


def _chats(view: View) -> list[MenuEntry]:
    entries = tuple(
        MenuEntry(shortened(chat.title, MAX_TITLE) or "Untitled", Action(Do.OPEN_CHAT, chat.id))
        for chat in view.chats
    )
    if not entries:
        return []
    copy = MenuEntry("Copy Last Answer", Action(Do.COPY_ANSWER, view.chats[0].id), 1)
    return [copy, MenuEntry("Recent Chats", section=1, entries=entries)]


def _models(view: View) -> list[MenuEntry]:
    if not view.usable:
        return []
    entries = [
        MenuEntry(model_text(model), entries=model_actions(model)) for model in view.activity.models
    ]
    entries += [MenuEntry(f"Serve {name}", Action(Do.SERVE, name), 1) for name in view.on_disk]
    if view.hub:
        entries.append(MenuEntry("Look for Models…", Action(Do.SEARCH), 2))
    return [MenuEntry("Models", section=2, entries=tuple(entries))]


def _transfers(view: View) -> list[MenuEntry]:
    entries = tuple(
        MenuEntry(f"{transfer.name}: {transfer_text(transfer)}", entries=transfer_actions(transfer))
        for transfer in view.transfers
    )
    return [MenuEntry("Downloads", section=2, entries=entries)] if entries else []


def _server(view: View) -> tuple[MenuEntry, ...]:
    entries = [*server_actions(view)]
    if view.usable and not view.ours:
        entries.append(MenuEntry("Started by another program; it stops there"))
    if view.usable:
        entries.append(MenuEntry("Open Dashboard", Action(Do.DASHBOARD), 1))
    entries.append(MenuEntry("Copy Address", Action(Do.COPY_URL), 1))
    if view.ours or view.problem:
        entries.append(MenuEntry("Show Log", Action(Do.LOG), 1))
    return tuple(entries)
