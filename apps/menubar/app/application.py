"""The app: a status item, windows, and a loop that shows what the server does.

It never depends on the status item being visible, opens nothing modal, starts no server unless it
was asked to, and leaves a server running when it ends unless asked to stop it.
"""

import asyncio
import contextlib
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, TypeVar

import toga

from ..errors import MlxinferError
from ..memory import human_bytes
from .client import ServerClient
from .controller import AppController, View
from .instance import Instance
from .menu import ANSWERING, Action, Do, MenuEntry, menu_of, rate_text, status_of
from .platforms import Platform, parse_hotkey
from .process import StartError
from .welcome import Introduction
from .windows import HIDE, RESOURCES, ChatWindow, MainWindow, SettingsForm

APP_ID = "io.mlxinfer.app"
RUNNING, NOT_RUNNING = RESOURCES / "status.png", RESOURCES / "status-off.png"
BUSY = RESOURCES / "status-answering.png"
WATCHED_S, IDLE_S = 1.0, 3.0  # between two looks at the server: a window is open, or none
EVERYTHING_EVERY = 10  # looks, to also read what changes rarely


class AttachError(MlxinferError):
    """No file can go with a question, or no part of the screen was chosen."""


P = ParamSpec("P")
R = TypeVar("R")
MAX_ATTACHED = 100 << 20  # bytes, as on the page
COMPACT = "/?compact=1&shell=1"


class MenubarApp(toga.App):
    """The app on Toga.

    Args:
        controller: what it shows.
        platform: what Toga does not offer.
        instance: where a second start of the app announces itself.
        background: open no window at the start, as at login.
        web: use a web view for the chat; False: a browser.
    """

    def __init__(
        self,
        controller: AppController,
        platform: Platform,
        instance: Instance,
        *,
        background: bool = False,
        web: bool = True,
    ) -> None:
        self.controller, self.platform, self._instance = controller, platform, instance
        self._background, self._web = background, web
        self._menu: tuple[MenuEntry, ...] = ()
        self._image = NOT_RUNNING
        self._looks = 0
        self._wake = asyncio.Event()
        super().__init__("mlxinfer", APP_ID, app_name="mlxinfer", icon=str(RESOURCES / "icon.png"))

    # -- start -------------------------------------------------------------------------------------

    def startup(self) -> None:
        """Make the status item and the windows; Toga calls this."""
        settings = self.controller.settings
        self.main_window = toga.App.BACKGROUND
        self.form = SettingsForm(settings, self.platform, self.change)
        self.chat = ChatWindow(self.act, self.platform, web=self._web)
        self.main = MainWindow(self.act, self.platform, self.form.content)
        self.introduction: Introduction | None = None
        self.status: toga.MenuStatusIcon | None = None
        self.platform.on_escape(self.chat.window, self.chat.window.hide)
        if self.chat.web is not None:
            self.platform.watch_links(self.chat.web, self.may_follow)
        self._add_commands()
        self._apply(settings)
        self.platform.on_reopen(self, self.show_up)
        self._instance.listen(lambda: self.loop.call_soon_threadsafe(self.show_up))
        if not settings.introduced:
            self._introduce()
        elif not self._background:
            self.show_up()
        self.show(self.controller.view)

    async def on_running(self) -> None:
        """Look at the server again and again; Toga calls this once its loop runs."""
        await self.refresh()
        if self.controller.settings.start_server and not self.controller.view.usable:
            await self.perform(Action(Do.START))
        while True:
            watched = self.main.window.visible or self.chat.window.visible
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCHED_S if watched else IDLE_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.refresh()

    def on_exit(self) -> bool:
        """Let the app end; its server goes on, unless the settings end it too."""
        self.controller.end()
        self._instance.close()
        return True

    def _introduce(self) -> None:
        self.introduction = Introduction(
            self.controller.settings, self.platform, self.act, self.change, self.show_up
        )
        self.show_up()

    def _add_commands(self) -> None:
        """Add the keys of the app: its menu bar is hidden, and the keys work nevertheless."""
        key = toga.Key.MOD_1
        self.commands.add(
            self._command("New Chat", Action(Do.NEW_CHAT), key + "n", toga.Group.FILE),
            toga.Command.standard(
                self, toga.Command.PREFERENCES, action=lambda _: self.act(Action(Do.SETTINGS))
            ),
        )

    def _command(
        self, text: str, action: Action | None, shortcut: Any = None, group: Any = None, **rest: Any
    ) -> toga.Command:
        if action is None:
            return toga.Command(None, text, group=group, enabled=False, **rest)
        return toga.Command(
            lambda _: self.act(action), text, shortcut=shortcut, group=group, **rest
        )

    # -- what is shown -----------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Look at the server and show what is there."""
        everything = self._looks % EVERYTHING_EVERY == 0
        self._looks += 1
        self.show(await in_thread(self.controller.refresh, everything=everything))

    def show(self, view: View) -> None:
        self.main.show(view)
        self.chat.show(view, self.page_address())
        if self.introduction is not None:
            self.introduction.show(view)
        if self.status is not None:
            busy = BUSY if status_of(view) is ANSWERING else RUNNING
            self._show_icon(self.status, busy if view.usable else NOT_RUNNING)
            menu = menu_of(view)
            if menu != self._menu:
                self._menu = menu
                self._build_menu(menu)
            rate = rate_text(view) if self.controller.settings.show_rate else ""
            self.platform.set_title(self.status, rate)

    def _show_icon(self, status: toga.MenuStatusIcon, image: Path) -> None:
        if self._image != image:
            self._image = image
            status.icon = str(image)
            self.platform.style_icon(status)

    def show_up(self) -> None:
        """Show a window, since the app was opened and its icon may not be visible."""
        window = self.main.window
        if self.introduction is not None and not self.controller.settings.introduced:
            window = self.introduction.window
        window.show()
        self.platform.bring_to_front(window)
        self._wake.set()

    def page_address(self) -> str:
        """Address of the compact page, which asks for a key itself where one is needed."""
        return f"{self.controller.settings.url}{COMPACT}"

    def _build_menu(self, menu: tuple[MenuEntry, ...]) -> None:
        commands = self.status_icons.commands
        commands.on_change = None
        commands.clear()
        commands.add(*self._commands_of(menu, self.status))
        commands.on_change = self.status_icons._impl.create
        commands.on_change()
        self.platform.on_click(self.status, self.toggle_chat)
        self.platform.on_drop(self.status, self.ask_about)

    def _commands_of(self, entries: tuple[MenuEntry, ...], group: Any) -> list[toga.Command]:
        commands = []
        for order, entry in enumerate(entries):
            place = {"section": entry.section, "order": order}
            if entry.entries:
                submenu = toga.Group(entry.text, parent=group, **place)
                commands += self._commands_of(entry.entries, submenu)
            else:
                commands.append(self._command(entry.text, entry.action, group=group, **place))
        return commands

    # -- settings ----------------------------------------------------------------------------------

    def change(self, **fields: Any) -> None:
        """Store changed settings and act on them."""
        self.controller.change(replace(self.controller.settings, **fields))
        self._apply(self.controller.settings)
        self.form.show(self.controller.settings)
        self._looks = 0
        self._wake.set()

    def _apply(self, settings: Any) -> None:
        if settings.hide_icon and self.status is not None:
            self.status_icons.commands.on_change = None
            self.status_icons.commands.clear()
            self.status_icons.remove(self.status)
            self.status = None
        elif not settings.hide_icon and self.status is None:
            self.status = toga.MenuStatusIcon(icon=str(NOT_RUNNING), text="mlxinfer")
            self.status_icons.commands.clear()  # Toga's own: ours say what becomes of the server
            self.status_icons.add(self.status)
            self.platform.style_icon(self.status)
            self._menu, self._image = (), NOT_RUNNING
        hotkey = parse_hotkey(settings.hotkey)
        if not self.platform.set_hotkey(hotkey, self.toggle_chat):
            self.form.say(f"The hotkey {settings.hotkey} cannot be used here.")

    # -- the chat window ---------------------------------------------------------------------------

    def toggle_chat(self) -> None:
        """Show the chat, or hide it: what the icon and the hotkey do."""
        if self.chat.window.visible:
            self.chat.window.hide()
        else:
            self._show_chat()

    def _show_chat(self, fragment: str = "#") -> None:
        self.chat.go(fragment)
        self.chat.show(self.controller.view, self.page_address())
        self.chat.window.show()
        self.platform.place(self.chat.window, self.status)
        self.platform.bring_to_front(self.chat.window)
        self._wake.set()

    def may_follow(self, url: str) -> bool:
        """Whether the chat's web view goes to an address; other sites open in the browser."""
        if url.startswith(HIDE):
            self.chat.window.hide()
            return False
        if url.startswith((f"{self.controller.settings.url}/", "about:")):
            return True
        if url.startswith(("http://", "https://", "mailto:")):
            webbrowser.open(url)
        return False

    # -- actions -----------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Begin to do what was asked for; what goes wrong is shown, in no dialog."""
        self.loop.create_task(self.perform(action))

    async def perform(self, action: Action) -> None:
        """Do what was asked for, and show what has become of it."""
        try:
            await self._perform(action)
            if action.do in (Do.LOAD, Do.SERVE):
                self.controller.say("")
        except (MlxinferError, OSError) as error:
            self.controller.say(str(error))
        self._looks = 0
        await self.refresh()

    async def _perform(self, action: Action) -> None:
        if action.do in SERVER_ACTIONS:
            await in_thread(SERVER_ACTIONS[action.do], self.controller.client, action.target)
        elif action.do in PROCESS_ACTIONS:
            self._wake.set()
            await in_thread(PROCESS_ACTIONS[action.do], self.controller, action.target)
        elif action.do is Do.COPY_ANSWER:
            last_answer = self.controller.client.last_answer
            self.platform.copy(await in_thread(last_answer, action.target))
        elif action.do is Do.SCREENSHOT:
            await self._ask_about_screen()
        else:
            self._window_actions()[action.do](action.target)

    def ask_about(self, paths: list[Path]) -> None:
        """Attach files, which were dropped on the icon, to the next question of the chat."""
        self.loop.create_task(self._attach(paths))

    async def _attach(self, paths: list[Path]) -> None:
        try:
            for path in paths:
                if path.stat().st_size > MAX_ATTACHED:
                    raise AttachError(f"{path.name} is larger than {human_bytes(MAX_ATTACHED)}.")
                self._attach_file(path.name, await in_thread(path.read_bytes))
        except (MlxinferError, OSError) as error:
            self.controller.say(str(error))
            self.show_up()
        await self.refresh()

    def _attach_file(self, name: str, data: bytes) -> None:
        self._show_chat()
        if not self.chat.attach(name, data):
            raise AttachError("The chat is not shown here, so no file can go with it.")

    async def _ask_about_screen(self) -> None:
        """Attach a part of the screen, which the user chooses, to the next question of the chat."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "screenshot.png")
            if not await in_thread(self.platform.screenshot, path):
                raise AttachError("No part of the screen was chosen.")
            data = path.read_bytes()
        self._attach_file("screenshot.png", data)

    def _browse(self, fragment: str) -> None:
        if not self.controller.view.usable:
            raise StartError("The server does not answer yet; start it first.")
        webbrowser.open(f"{self.controller.settings.url}/{fragment}")

    def _window_actions(self) -> dict[Do, Callable[[str], Any]]:
        url = self.controller.settings.url
        return {
            Do.CHAT: lambda _: self._show_chat(),
            Do.NEW_CHAT: lambda _: self._show_chat("#new"),
            Do.OPEN_CHAT: lambda id: self._show_chat(f"#chat/{id}"),
            Do.COPY_URL: lambda _: self.platform.copy(f"{url}/v1"),
            Do.BROWSER: self._browse,
            Do.DASHBOARD: lambda _: self._browse("#dashboard"),
            Do.SEARCH: lambda _: self._browse("#models"),
            Do.LOG: lambda _: webbrowser.open(self.controller.log_path.as_uri()),
            Do.WINDOW: lambda _: self.show_up(),
            Do.SETTINGS: lambda _: self.main.show_settings(),
            Do.QUIT: lambda _: self.request_exit(),
        }


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Await a call that blocks, in a thread that does not keep the app from ending.

    The threads of an executor would: a model may load for minutes when the app is quit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def work() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # it is raised where the call is awaited
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

    threading.Thread(target=work, daemon=True).start()
    return await future


def _serve_and_load(client: ServerClient, model: str) -> None:
    client.serve(model)
    client.load(model)


SERVER_ACTIONS: dict[Do, Callable[[ServerClient, str], None]] = {
    Do.LOAD: ServerClient.load,
    Do.UNLOAD: ServerClient.unload,
    Do.PIN: lambda client, model: client.pin(model, True),
    Do.UNPIN: lambda client, model: client.pin(model, False),
    Do.SERVE: _serve_and_load,
    Do.PAUSE: lambda client, id: client.act(id, "pause"),
    Do.RESUME: lambda client, id: client.act(id, "resume"),
    Do.CANCEL: lambda client, id: client.act(id, "cancel"),
}
PROCESS_ACTIONS: dict[Do, Callable[[AppController, str], None]] = {
    Do.START: lambda controller, _: controller.start(),
    Do.STOP: lambda controller, _: controller.stop(),
    Do.RESTART: lambda controller, _: controller.restart(),
    Do.GET: AppController.get,
}
