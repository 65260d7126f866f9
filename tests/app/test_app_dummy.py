"""The app on Toga's dummy backend: its windows, its menu and its keys, beside a real server."""

import asyncio
import base64
import threading
import webbrowser
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_platform import FakePlatform
from page_driver import missing
from page_server import PageServer

try:
    import toga
    from toga_dummy.utils import (
        EventLog,
        assert_action_not_performed,
        assert_action_performed,
        assert_action_performed_with,
    )
except ImportError:
    missing("Toga", 'pip install -e ".[test]"', module=True)

from mlxinfer.app.application import COMPACT, MAX_ATTACHED, MenubarApp, in_thread
from mlxinfer.app.client import Activity, Chat, Transfer
from mlxinfer.app.controller import AppController, Phase, View
from mlxinfer.app.instance import Instance
from mlxinfer.app.menu import STATUS, Action, Do, menu_of
from mlxinfer.app.platforms import Hotkey
from mlxinfer.app.process import ServerProcess
from mlxinfer.app.settings import Settings
from mlxinfer.app.welcome import cards_of, time_text
from mlxinfer.memory import models_limit_bytes
from mlxinfer.memory.suggestions import to_begin_with
from tests.waiting import until


@pytest.fixture
def begun(controller: AppController, tmp_path: Path) -> Iterator[Any]:
    """Begins an app; what fails in a handler or a task fails the test."""
    problems: list[Any] = []

    @asynccontextmanager
    async def begun(
        platform: FakePlatform | None = None, **options: Any
    ) -> AsyncIterator[tuple[MenubarApp, FakePlatform]]:
        used, instance = platform or FakePlatform(), Instance(tmp_path / "app.sock")
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        app = MenubarApp(controller, used, instance, **options)
        try:
            await app.refresh()
            yield app, used
        finally:
            instance.close()

    yield begun
    assert problems == []


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that the browser was to open."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", addresses.append)
    return addresses


def scripts_of(app: MenubarApp) -> list[str]:
    """What the app had its page run."""
    actions = EventLog.performed_actions(app.chat.web, "evaluate_javascript")
    return [action["javascript"] for action in actions]


def lines(app: MenubarApp) -> list[str]:
    """Texts of the status item's commands, as Toga has them."""
    return [
        command.text for command in app.status_icons.commands if isinstance(command, toga.Command)
    ]


def buttons(widget: Any) -> dict[str, Any]:
    """All buttons below a widget, by text."""
    result = {widget.text: widget} if isinstance(widget, toga.Button) else {}
    for child in widget.children or ():
        result |= buttons(child)
    return result


def texts(widget: Any) -> list[str]:
    """What all labels and buttons below a widget say, and the rows of its lists."""
    if isinstance(widget, toga.OptionContainer):
        return [text for item in widget.content for text in texts(item.content)]
    if isinstance(widget, toga.DetailedList):
        return [row.title for row in widget.data]
    labels = [widget.text] if isinstance(widget, toga.Label | toga.Button | toga.Switch) else []
    return labels + [text for child in widget.children or () for text in texts(child)]


async def test_the_menu_is_what_the_view_says_and_its_commands_act(
    begun: Any, server: PageServer, opened: list[str]
) -> None:
    async with begun() as (app, platform):
        assert app.controller.view.phase is Phase.RUNNING
        assert lines(app)[0] == "● Ready · demo"
        assert app.status.icon.path.name == "status.png"
        app.show(replace(app.controller.view, activity=Activity(running=1)))
        assert app.status.icon.path.name == "status-answering.png"
        app.show(app.controller.view)
        assert {"Chat", "Settings…", "Quit", "Unpin", "Open Dashboard"} <= set(lines(app))
        assert len(lines(app)) >= len(menu_of(app.controller.view))
        by_text = {
            command.text: command
            for command in app.status_icons.commands
            if command.__class__ is toga.Command
        }
        by_text["Copy Address"].action()
        by_text["Open Dashboard"].action()
        await until(lambda: bool(platform.copied and opened))
        assert platform.copied == [f"{server.url}/v1"]
        assert opened == [f"{server.url}/#dashboard"]
        app.controller.view = View(url=server.url)
        await app.perform(Action(Do.SEARCH))
        assert len(opened) == 1, "there is no server to show it"


async def test_the_chat_is_a_hotkey_a_click_and_an_escape_away(
    begun: Any, server: PageServer
) -> None:
    async with begun() as (app, platform):
        window = app.chat.window
        assert platform.hotkey == Hotkey("space", frozenset({"ctrl", "shift"}))
        assert not window.visible
        platform.press_hotkey()
        assert window.visible
        assert app.chat.web.url == f"{server.url}{COMPACT}#"
        platform.press_hotkey()
        assert not window.visible
        platform.click()
        assert window.visible
        assert platform.placed == [app.status, app.status]
        assert platform.front_window is window
        platform.escape()
        assert not window.visible
        platform.click()
        app.chat.web._impl.simulate_navigation_starting("mlxinfer:hide")
        assert not window.visible


async def test_cmd_n_and_recent_chats_turn_the_page_to_its_places(
    begun: Any, server: PageServer
) -> None:
    async with begun() as (app, platform):
        new = next(
            command for command in app.commands if getattr(command, "text", "") == "New Chat"
        )
        assert new.shortcut == toga.Key.MOD_1 + "n"
        new.action()
        await until(lambda: app.chat.window.visible)
        assert app.chat.web.url == f"{server.url}{COMPACT}#"
        await app.perform(Action(Do.OPEN_CHAT, "a" * 16))
        script = f'location.hash = "#chat/{"a" * 16}"'
        assert_action_performed_with(app.chat.web, "evaluate_javascript", javascript=script)
        stored, parent = "b" * 16, None
        for role, text in (("user", "Why?"), ("assistant", "Because."), ("user", "And then?")):
            body = {"conversation": stored, "id": f"{stored}{len(text)}", "parent": parent}
            body |= {"role": role, "content": text}
            await asyncio.to_thread(server.post, "/history/messages", body)
            parent = body["id"]
        await app.perform(Action(Do.COPY_ANSWER, stored))
        assert platform.copied == ["Because."]


async def test_a_part_of_the_screen_goes_with_the_next_question(
    begun: Any, server: PageServer
) -> None:
    async with begun() as (app, platform):
        assert "Ask About a Part of the Screen" in [
            entry.text for entry in menu_of(app.controller.view)
        ]
        await app.perform(Action(Do.SCREENSHOT))
        assert app.chat.window.visible
        assert_action_not_performed(
            app.chat.web, "evaluate_javascript"
        )  # the page is not there yet
        app.chat.web._impl.simulate_page_loaded()
        [script] = scripts_of(app)
        assert base64.b64encode(b"a picture").decode() in script
        assert '"screenshot.png"' in script
        platform.missing = True
        await app.perform(Action(Do.SCREENSHOT))
        assert app.controller.view.problem == "No part of the screen was chosen."


async def test_dropped_files_go_with_a_question(
    begun: Any, server: PageServer, tmp_path: Path
) -> None:
    notes, large = tmp_path / "notes.txt", tmp_path / "large.bin"
    notes.write_text("Buy milk.")
    with large.open("wb") as file:
        file.truncate(MAX_ATTACHED + 1)
    async with begun() as (app, platform):
        platform.drop([notes])
        await app._attach([notes])
        app.chat.web._impl.simulate_page_loaded()
        assert '("notes.txt", "text/plain", "QnV5IG1pbGsu")' in scripts_of(app)[-1]
        assert app.chat.window.visible
        await app._attach([large])
        assert app.controller.view.problem == "large.bin is larger than 105 MB."
        await app._attach([tmp_path / "none"])
        assert "none" in app.controller.view.problem


async def test_a_picture_may_spell_anything_in_base64(begun: Any) -> None:
    async with begun() as (app, _):
        app._show_chat()
        app.chat.web._impl.simulate_page_loaded()
        for spelled in ("NAME", "DATA"):
            assert app.chat.attach("a.png", base64.b64decode(spelled))
            assert scripts_of(app)[-1].endswith(f'("a.png", "image/png", "{spelled}")')


async def test_links_of_answers_open_in_the_browser(
    begun: Any, server: PageServer, opened: list[str]
) -> None:
    async with begun() as (app, _):
        assert app.may_follow(f"{server.url}/page/app.js")
        for url in ("https://a.example/", "file:///etc/passwd", "javascript:1", f"{server.url}0/"):
            assert not app.may_follow(url)
        assert opened == ["https://a.example/", f"{server.url}0/"]


async def test_an_app_without_an_icon_offers_everything_in_its_window(
    begun: Any, controller: AppController, server: PageServer, opened: list[str]
) -> None:
    async with begun() as (app, platform):
        app.form.switches["hide_icon"].value = True
        assert app.status is None
        assert len(app.status_icons) == 0
        assert controller.settings.hide_icon
        app.main.window.hide()
        platform.reopen()
        assert app.main.window.visible
        assert platform.front_window is app.main.window
        result = buttons(app.main.tabs.content[0].content)
        assert {"Open Chat", "Open Chats", "Copy Address", "Quit"} <= set(result)
        result["Open Models"].on_press()
        await until(lambda: opened == [f"{server.url}/#models"])
        await app.refresh()
        app.form.switches["hide_icon"].value = False
        await app.refresh()
        assert "Chat" in lines(app)


async def test_where_no_part_of_the_platform_works_the_app_does(begun: Any) -> None:
    async with begun(platform=FakePlatform(missing=True)) as (app, _):
        assert "cannot be used" in app.form.said.text
        app.form.at_login.value = True
        assert app.form.at_login.value is False
        assert "did not change" in app.form.said.text
        await app.perform(Action(Do.CHAT))
        assert app.chat.window.visible


async def test_settings_are_checked_and_apply_at_once(
    begun: Any, controller: AppController
) -> None:
    before = controller.settings
    async with begun() as (app, platform):
        texts, switches = app.form.texts, app.form.switches
        for field, wrong in ((texts["url"], "nowhere at all"), (texts["hotkey"], "a")):
            right, field.value = field.value, wrong
            field.on_lose_focus()
            assert "expected" in app.form.said.text or "looks like" in app.form.said.text
            assert controller.settings == before
            field.value = right
        texts["hotkey"].value = "cmd+shift+m"
        texts["hotkey"].on_confirm()
        switches["show_rate"].value = app.form.at_login.value = True
        assert platform.hotkey == Hotkey("m", frozenset({"cmd", "shift"}))
        assert controller.settings.show_rate
        assert platform.at_login


async def test_tokens_a_second_stand_beside_the_icon_if_asked_for(
    begun: Any, controller: AppController, server: PageServer
) -> None:
    server.script.says("word " * 30)
    async with begun() as (app, platform):
        for shown in (False, True):
            app.change(show_rate=shown)
            await app.refresh()
            platform.titles.clear()
            body = {"messages": [{"role": "user", "content": "Go"}]}
            await asyncio.to_thread(server.post, "/v1/chat/completions", body)
            await app.refresh()
            # The app looks by itself too: whichever look comes first after the answer has the rate.
            assert any(title.endswith("tokens/s") for title in platform.titles) is shown


async def test_closing_a_window_hides_it_and_the_app_goes_on(begun: Any) -> None:
    async with begun() as (app, _):
        for window in (app.main.window, app.chat.window):
            window.show()
            window._impl.simulate_close()
            assert not window.visible
            assert window in app.windows
        app.show_up()
        assert app.main.window.visible


@pytest.mark.parametrize("background", [True, False])
async def test_at_login_no_window_opens(begun: Any, background: bool) -> None:
    async with begun(background=background) as (app, _):
        assert app.main.window.visible is not background


async def test_the_first_run_begins_with_three_models_and_is_not_repeated(
    begun: Any, controller: AppController, tmp_path: Path
) -> None:
    controller.change(Settings(url=controller.settings.url))
    async with begun() as (app, _):
        first = app.introduction
        assert first.window.visible
        assert not app.main.window.visible
        assert len(first.cards) == 3
        best = app.controller.view.suggested[0]["name"]
        assert [name for name, (_, choose) in first.cards.items() if "✓" in choose.text] == [best]
        first.folder.value = str(tmp_path)
        first.choose("demo-draft")
        first.on_next()
        assert not first.next.enabled
        await until(lambda: first.title.text == "demo-draft is ready")
        assert (first.bar.value, first.next.text, first.next.enabled) == (1, "Open Chat", True)
        first.on_back()
        assert first.title.text == "Choose a model"
        first.on_end()
        assert not first.window.visible
        assert app.main.window.visible
        await asyncio.to_thread(app.controller.client.unload, "demo-draft")
    assert (controller.settings.introduced, controller.settings.models_folder) == (
        True,
        str(tmp_path),
    )


async def test_a_first_run_alone_offers_what_fits(begun: Any, controller: AppController) -> None:
    controller.change(Settings(url="http://127.0.0.1:9"))
    async with begun() as (app, _):
        limit = models_limit_bytes()
        assert set(app.introduction.cards) <= {item.name for item in to_begin_with(limit)}
        assert len(app.introduction.cards) == min(3, len(to_begin_with(limit)))
        assert app.main.head.first.text == "Start the Server"


def test_the_cards_are_the_best_balance_and_smaller_ones() -> None:
    sizes = [9e9, 8e9, 4e9, 3e9, 1e9, 20e9]
    result = [{"name": f"{size:.0f}", "weights_bytes": size} for size in sizes]
    assert [item["weights_bytes"] for item in cards_of(result)] == [9e9, 4e9, 1e9]
    assert [item["weights_bytes"] for item in cards_of(result[:2])] == [9e9, 8e9]
    times = [time_text(int(size)) for size in (5e8, 5e9, 100e9)]
    assert times == ["under a minute", "about 7 min", "about 2.2 h"]


async def test_a_download_has_one_percentage_throughout(
    begun: Any, controller: AppController
) -> None:
    controller.change(Settings(url=controller.settings.url))
    async with begun() as (app, _):
        first = app.introduction
        first.chosen, first.getting = "org/a", True
        for done, said in ((0, "0 %, 0 B of 200 B"), (84, "42 %, 84 B of 200 B")):
            moving = Transfer(
                id="t", kind="download", name="org/a", state="running", done=done, total=200
            )
            first.show(replace(app.controller.view, transfers=(moving,)))
            assert (first.bar.value, first.said.text) == (done / 200, said)
            assert (first.back.enabled, first.next.enabled) == (True, False)
        first.show(replace(app.controller.view, problem="No room."))
        assert (first.bar.value, first.said.text, first.back.enabled) == (0, "No room.", True)
        first.show(app.controller.view)
        assert (first.bar.max, first.back.enabled) == (None, False)


async def test_no_text_of_a_window_has_the_backticks_of_a_terminal(begun: Any) -> None:
    async with begun(web=False) as (app, _):
        problem, chats = "Run `mlxinfer pull a/b` first.", (Chat(id="a" * 16, title="Why `x`?"),)
        for phase in Phase:
            app.show(View(phase=phase, problem=problem, chats=chats))
            assert app.main.head.problem.text == "Run mlxinfer pull a/b first."
            assert app.main.head.word.text == STATUS[phase].word
            assert "`" not in " ".join(
                texts(app.main.window.content) + texts(app.chat.window.content)
            )


async def test_a_chat_of_the_list_opens_in_the_browser(
    begun: Any, server: PageServer, opened: list[str]
) -> None:
    async with begun(web=False) as (app, _):
        view = replace(app.controller.view, chats=(Chat(id="b" * 16, title="A question"),))
        app.chat.show(view, "")
        assert [row.title for row in app.chat.chats.data] == ["A question"]
        app.chat.chats._impl.simulate_selection(0)
        await until(lambda: opened == [f"{server.url}/#chat/{'b' * 16}"])
        app.chat.show(replace(view, chats=(Chat(id="c" * 16, title="Another"), *view.chats)), "")
        await app.refresh()
        assert len(opened) == 1  # a chat that is added opens none


async def test_what_goes_wrong_is_shown_in_no_dialog(begun: Any) -> None:
    async with begun() as (app, _):
        await app.perform(Action(Do.LOAD, "nothing"))
        assert "nothing" in app.main.head.problem.text
        assert "nothing" in lines(app)[1]
        await app.perform(Action(Do.LOAD, "demo"))
        assert app.main.head.problem.text == ""


async def test_no_server_is_started_or_ended_by_the_app_s_own_start_and_end(
    begun: Any, controller: AppController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ServerProcess, "start", lambda *_: calls.append("start"))
    monkeypatch.setattr(ServerProcess, "stop", lambda *_: calls.append("stop"))
    controller.change(Settings(url="http://127.0.0.1:9", introduced=True))
    async with begun() as (app, _):
        await until(lambda: app._looks > 1)
        assert calls == []
        assert app.status.icon.path.name == "status-off.png"
        app.request_exit()
        await asyncio.sleep(0)
        assert_action_performed(app, "exit")
        assert calls == []
        await app.perform(Action(Do.START))
        assert calls == ["start"]
    calls.clear()
    controller.change(Settings(url="http://127.0.0.1:9", introduced=True, start_server=True))
    async with begun() as (app, _):
        await until(lambda: calls == ["start"])
    assert calls == ["start"]


def test_a_call_ends_whatever_becomes_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        asyncio.run(in_thread(leave))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(in_thread(int))
