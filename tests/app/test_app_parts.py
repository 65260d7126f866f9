"""Parts of the app without server and widgets: menu, settings, hotkeys, one instance, login."""

import plistlib
import re
import stat
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlxinfer.app import settings as stored
from mlxinfer.app.client import (
    Activity,
    Chat,
    ModelStatus,
    Transfer,
    checked_url,
    is_local,
    port_of,
)
from mlxinfer.app.controller import Phase, View
from mlxinfer.app.instance import Instance
from mlxinfer.app.menu import Action, Do, MenuEntry, menu_of, state_text, transfer_text
from mlxinfer.app.platforms import (
    ACCENT,
    BAD,
    KEYS,
    MODIFIERS,
    Hotkey,
    LoginAgent,
    Look,
    below,
    guarded,
    parse_hotkey,
)
from mlxinfer.app.settings import Settings
from mlxinfer.errors import InvalidRequestError
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

URL = "http://127.0.0.1:8080"
LOADED = ModelStatus(name="chat", state="loaded", weights_bytes=4_620_000_000)
OPEN = Transfer(id="t", kind="download", name="org/a", state="running", done=42, total=100)


def lines(entries: tuple[MenuEntry, ...], path: str = "") -> dict[str, Action | None]:
    """Every line of a menu by its path: "Server > Stop"."""
    by_name: dict[str, Action | None] = {}
    for entry in entries:
        by_name[path + entry.text] = entry.action
        by_name |= lines(entry.entries, f"{path}{entry.text} > ")
    return by_name


def running(**fields: Any) -> View:
    activity = Activity(models=(LOADED, ModelStatus(name="small", state="unloaded")))
    return View(**{"url": URL, "phase": Phase.RUNNING, "activity": activity, "hub": True, **fields})


# -- the menu -------------------------------------------------------------------------------------


def test_a_server_that_is_stopped_can_be_started_and_nothing_else() -> None:
    menu = lines(menu_of(View(url=URL)))
    assert menu["Server > Start"] == Action(Do.START)
    assert not {line for line in menu if "> Stop" in line or "Models" in line}
    assert menu["Quit"] == Action(Do.QUIT)


def test_only_a_server_of_the_app_can_be_ended() -> None:
    ends = {"Server > Stop", "Server > Restart"}
    for ours in (True, False):
        menu = lines(menu_of(running(ours=ours)))
        assert ends & set(menu) == (ends if ours else set())
        assert ("Server > Started by another program; it stops there" in menu) is not ours
        assert "Server > Start" not in menu
        assert [line for line in menu if line.startswith("Quit")] == ["Quit"]


def test_each_model_can_be_loaded_or_unloaded_as_its_state_is() -> None:
    menu = lines(menu_of(running(on_disk=("other",))))
    chat, small = "Models > chat: loaded, 4.6 GB", "Models > small: unloaded"
    assert menu[f"{chat} > Unload"] == Action(Do.UNLOAD, "chat")
    assert menu[f"{chat} > Keep Loaded"] == Action(Do.PIN, "chat")
    assert menu[f"{small} > Load"] == Action(Do.LOAD, "small")
    assert f"{small} > Unload" not in menu
    assert menu["Models > Serve other"] == Action(Do.SERVE, "other")
    pinned = running(
        activity=Activity(models=(ModelStatus(name="a", state="loaded", pinned=True),))
    )
    menu = lines(menu_of(pinned))
    assert menu["Models > a: loaded, pinned > Unpin"] == Action(Do.UNPIN, "a")
    assert "Models > a: loaded, pinned > Unload" not in menu
    loading = running(activity=Activity(models=(ModelStatus(name="a", state="loading"),)))
    assert lines(menu_of(loading))["Models > a: loading > loading"] is None


def test_downloads_show_their_progress_and_what_can_be_done() -> None:
    paused = Transfer(id="p", kind="download", name="org/b", state="paused", done=1, total=4)
    done = Transfer(id="d", kind="conversion", name="c", state="done", done=7, total=7)
    menu = lines(menu_of(running(transfers=(OPEN, paused, done))))
    assert menu["Downloads > org/a: 42 %, 42 B of 100 B > Pause"] == Action(Do.PAUSE, "t")
    assert menu["Downloads > org/b: paused, 25 %, 1 B of 4 B > Resume"] == Action(Do.RESUME, "p")
    assert menu["Downloads > c: done, 100 %"] is None
    failed = Transfer(id="f", kind="download", name="org/c", state="failed", error="no space")
    assert transfer_text(failed) == "failed: no space"


def test_recent_chats_open_by_their_titles() -> None:
    chats = (Chat(id="a" * 16, title="x" * 200), Chat(id="b" * 16, title=" "))
    menu = lines(menu_of(running(chats=chats)))
    assert menu[f"Recent Chats > {'x' * 47}…"] == Action(Do.OPEN_CHAT, "a" * 16)
    assert menu["Recent Chats > Untitled"] == Action(Do.OPEN_CHAT, "b" * 16)


def test_the_state_is_said_in_one_line() -> None:
    loading = ModelStatus(name="a", state="loading", loaded=0.4)
    busy, key = Activity(models=(LOADED,), running=2, waiting=1), "key that may administer it"
    for view, text in (
        (View(url=URL), f"○ Stopped · {URL}"),
        (View(url=URL, phase=Phase.LOCKED), f"▲ Locked · It needs a {key}"),
        (View(url=URL, phase=Phase.FOREIGN), f"▲ Address taken · Another program answers at {URL}"),
        (running(), "● Ready · chat"),
        (running(activity=Activity()), "● Ready · no model is loaded"),
        (running(activity=Activity(models=(loading,))), "◌ Loading · a 40 %"),
        (
            running(activity=Activity(models=(LOADED,), reading=((300, 1200, 8.7),), waiting=2)),
            "◉ Answering · chat · reading 1,200 tokens: 25 %, 9 s left, 2 waiting",
        ),
        (
            running(activity=Activity(models=(LOADED,), reading=((1100, 1200, 0.4),))),
            "◉ Answering · chat · reading 1,200 tokens: 91 %",
        ),
        (
            running(activity=busy, rate=31.4),
            "◉ Answering · chat · 2 answers, 1 waiting, 31 tokens/s",
        ),
    ):
        assert state_text(view).partition(": see ")[0] == text


# -- settings -------------------------------------------------------------------------------------


def test_settings_are_kept_and_private(tmp_path: Path) -> None:
    place = tmp_path / "new" / "app.json"
    assert stored.load(place) == Settings()
    chosen = Settings(url="http://a:1", key="secret", show_rate=True)
    stored.save(place, chosen)
    assert stored.load(place) == chosen
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert list(place.parent.iterdir()) == [place]


def test_settings_that_cannot_be_read_are_the_defaults(tmp_path: Path) -> None:
    for content in ("", "[1]", "{", '{"url": 7, "later": 1, "show_rate": 1}'):
        (tmp_path / "app.json").write_text(content)
        assert stored.load(tmp_path / "app.json") == Settings(), content


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (" localhost:8080/v1/ ", "http://localhost:8080"),
        ("https://studio.local", "https://studio.local"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses_are_taken_as_they_are_copied(text: str, url: str) -> None:
    assert checked_url(text) == url


def test_what_is_no_address_is_refused() -> None:
    texts = ("", "ftp://a", "http://", "http://a:99999", "http://a/chat", "http://u:p@a", "a:0")
    for text in texts:
        with pytest.raises(InvalidRequestError, match="no address of a server"):
            checked_url(text)


def test_an_address_is_this_machine_or_another() -> None:
    assert is_local(URL)
    assert not is_local("http://studio.local:8080")
    assert [port_of(url) for url in (URL, "http://a", "https://a")] == [8080, 80, 443]


# -- parts of the system --------------------------------------------------------------------------


def test_hotkeys_are_read_as_people_write_them() -> None:
    assert parse_hotkey("Ctrl + Option+Space") == Hotkey("space", frozenset({"ctrl", "alt"}))
    assert parse_hotkey(" ") is None
    for wrong in ("space", "ctrl", "ctrl+", "meta+a", "ctrl+a+b", "a+ctrl"):
        with pytest.raises(InvalidRequestError, match="no hotkey"):
            parse_hotkey(wrong)


def test_a_part_that_fails_is_missed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    @guarded(missing=False)
    def broken() -> bool:
        raise AttributeError("NSNothing")

    assert broken() is False
    assert "broken does not work here: NSNothing" in caplog.text


def test_a_window_hangs_below_the_icon_and_stays_on_the_screen() -> None:
    assert below((600, 640), 25, (0, 1440), (440, 640)) == (400, 25)
    assert below((1400, 1440), 25, (0, 1440), (440, 640)) == (1000, 25)
    assert below((-1400, -1380), 30, (-1440, 0), (440, 640)) == (-1440, 30)


def test_the_login_agent_starts_the_app_once_in_the_background(tmp_path: Path) -> None:
    agent = LoginAgent(home=tmp_path)
    assert agent.set(True)
    content = plistlib.loads(agent.path.read_bytes())
    assert content["ProgramArguments"][-2:] == ["app", "--background"]
    assert content["RunAtLoad"] is True
    assert "KeepAlive" not in content
    assert agent.path == tmp_path / "Library/LaunchAgents/io.mlxinfer.app.plist"
    assert not agent.set(False)
    assert not agent.path.exists()
    assert not agent.set(False)


def test_a_second_start_shows_the_first_app(short_folder: Path) -> None:
    place = short_folder / "app.sock"
    assert not Instance(place).show_other()
    place.touch()  # left over from a crash
    shown = threading.Event()
    first = Instance(place)
    first.listen(shown.set)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert Instance(place).show_other()
    assert shown.is_set()
    shown.clear()
    assert Instance(place).show_other()
    first.close()
    wait_until(lambda: not place.exists())
    assert not Instance(place).show_other()


def test_a_start_is_answered_after_one_whose_windows_could_not_be_shown(short_folder: Path) -> None:
    place, shown = short_folder / "app.sock", threading.Event()
    starts = iter([lambda: 1 / 0, shown.set])
    first = Instance(place)
    first.listen(lambda: next(starts)())
    assert not Instance(place).show_other()
    assert Instance(place).show_other()
    assert shown.is_set()
    first.close()


def test_two_apps_may_run_where_there_can_be_no_more_threads(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    Instance(short_folder / "app.sock").listen(lambda: None)
    assert not Instance(short_folder / "app.sock").show_other()


@pytest.fixture
def cocoa(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module for macOS over stand-ins for Objective-C: its flow, not what a Mac does."""
    objc = MagicMock(NSObject=object, objc_method=lambda method: method)
    objc.objc_property.return_value = None
    for name, module in {
        "rubicon": MagicMock(),
        "rubicon.objc": objc,
        "rubicon.objc.runtime": MagicMock(),
        "toga_cocoa": MagicMock(),
        "toga_cocoa.app": MagicMock(AppDelegate=object),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mlxinfer.app.cocoa", raising=False)
    import mlxinfer.app.cocoa as module

    yield module
    sys.modules.pop("mlxinfer.app.cocoa", None)


def test_every_key_and_modifier_has_a_code_on_a_mac(cocoa: Any) -> None:
    assert set(cocoa.KEY_CODES) == set(KEYS)
    assert len(set(cocoa.KEY_CODES.values())) == len(KEYS)
    assert set(cocoa.CARBON_MODIFIERS) == set(MODIFIERS)


def test_the_parts_of_a_mac_touch_their_files(cocoa: Any, caplog: pytest.LogCaptureFixture) -> None:
    platform, icon, window = cocoa.CocoaPlatform(bundled=True), MagicMock(), MagicMock()
    platform.style_icon(icon)
    icon._impl.native.button.image.setTemplate.assert_called_once_with(True)
    card = MagicMock()
    for look, width in ((Look.CHOSEN, cocoa.BORDER), (Look.CARD, 0)):
        platform.style(card, look)
        assert card._impl.native.layer.borderWidth == width
    platform.style(card, Look.PRIMARY)
    assert card._impl.native.keyEquivalent == "\r"
    platform.set_title(icon, "12 tokens/s")
    assert icon._impl.native.button.title == "12 tokens/s"
    frame = icon._impl.native.button.window.frame
    frame.origin.x, frame.origin.y, frame.size.width = 600, 875, 40
    screen = icon._impl.native.button.window.screen.frame
    screen.origin.x, screen.size.width, window.size = 0, 1440, (440, 640)
    cocoa.ObjCClass.return_value.screens[0].frame.size.height = 900
    platform.place(window, icon)
    assert window.position == (400, 25)
    assert window._impl.native.level == cocoa.FLOATING
    web = MagicMock()
    platform.watch_links(web, lambda url: url == "yes")
    assert [web.on_navigation_starting(web, url=url) for url in ("yes", "no")] == [True, False]
    cocoa.ObjCClass.return_value.mainAppService.status = cocoa.LOGIN_ENABLED
    assert platform.start_at_login(True)
    assert caplog.text == ""


def test_a_click_shows_the_chat_and_the_other_button_the_menu(cocoa: Any) -> None:
    cocoa.ClickTarget = MagicMock()
    platform, icon, clicks = cocoa.CocoaPlatform(bundled=True), MagicMock(), []
    menu = icon._impl.native.menu
    platform.on_click(icon, lambda: clicks.append(1))
    assert icon._impl.native.menu is None, "else any click opens it"
    clicked = cocoa.ClickTarget.alloc().init().clicked
    event = cocoa.ObjCClass.return_value.sharedApplication.currentEvent
    event.type, event.modifierFlags = 2, 0
    clicked()
    assert clicks == [1]
    shown: list[Any] = []
    icon._impl.native.button.performClick = lambda _: shown.append(icon._impl.native.menu)
    event.type = 4
    clicked()
    assert (clicks, shown) == ([1], [menu])
    assert icon._impl.native.menu is None


def test_a_hotkey_is_registered_or_replaced(cocoa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    carbon, pressed = MagicMock(), []
    carbon.GetApplicationEventTarget.return_value = 1
    carbon.RegisterEventHotKey.return_value = 0
    monkeypatch.setattr(cocoa.ctypes, "CDLL", lambda _: carbon)
    platform = cocoa.CocoaPlatform(bundled=True)
    assert platform.set_hotkey(parse_hotkey("ctrl+shift+space"), lambda: pressed.append("a"))
    code, modifiers, id, *_ = carbon.RegisterEventHotKey.call_args.args
    assert (code.value, modifiers.value) == (49, 0x1000 | 0x200)
    assert id.signature.to_bytes(4, "big") == b"mlxi"
    handler = carbon.InstallEventHandler.call_args.args[1]
    assert handler(None, None, None) == 0
    platform._hotkey.value = 7  # as Carbon writes it
    assert platform.set_hotkey(parse_hotkey("cmd+k"), lambda: pressed.append("b"))
    handler(None, None, None)
    assert pressed == ["a", "b"]
    carbon.UnregisterEventHotKey.assert_called_once()
    carbon.InstallEventHandler.assert_called_once()
    carbon.RegisterEventHotKey.return_value = -9878  # eventHotKeyExistsErr
    assert not platform.set_hotkey(parse_hotkey("cmd+l"), print)
    assert platform.set_hotkey(None, print)


def test_files_that_are_dropped_on_a_macs_icon_are_handed_over(cocoa: Any) -> None:
    platform, icon, dropped = cocoa.CocoaPlatform(bundled=True), MagicMock(), list[Path]()
    target = cocoa.DropTarget()
    cocoa.DropTarget = MagicMock()
    cocoa.DropTarget.alloc().init.return_value = target
    platform.on_drop(icon, dropped.extend)
    window = icon._impl.native.button.window
    window.registerForDraggedTypes.assert_called_once_with([cocoa.FILE_NAMES])
    drag = MagicMock()
    drag.draggingPasteboard.propertyListForType.return_value = ["/a/notes.txt", "/a/b.png"]
    assert window.delegate.draggingEntered_(drag) == cocoa.COPY
    assert window.delegate.performDragOperation_(drag)
    assert dropped == [Path("/a/notes.txt"), Path("/a/b.png")]


def test_the_app_has_the_colours_of_the_page() -> None:
    style = (ROOT / "apps" / "web" / "src" / "style.css").read_text(encoding="utf-8")
    for name, tones in (("accent", ACCENT), ("bad", BAD)):
        assert re.findall(rf"--{name}: (#\w+);", style)[:2] == list(tones)
