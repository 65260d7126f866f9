"""`python qt_app.py URL FOLDER`: the app on Qt without a screen; writes what it saw as JSON.

Screenshots of its windows are left in FOLDER.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu, QSystemTrayIcon

from mlxinfer.app import settings as stored
from mlxinfer.app.application import MenubarApp, in_thread
from mlxinfer.app.controller import AppController, View
from mlxinfer.app.instance import Instance
from mlxinfer.app.menu import Action, Do
from mlxinfer.app.process import ServerProcess
from mlxinfer.app.qt import QtPlatform
from mlxinfer.app.settings import Settings

TABS = ("Server", "Settings")


def lines(menu: QMenu) -> list[Any]:
    """A menu as nested lists: a submenu follows its line."""
    collected: list[Any] = []
    for action in menu.actions():
        collected.append(action.text() or "-")
        if action.menu():
            collected.append(lines(action.menu()))
    return collected


def shoot(window: Any, name: str, folder: Path) -> None:
    window.as_image().save(folder / f"{name}.png")


async def scenario(app: MenubarApp, folder: Path) -> dict[str, Any]:
    """Use the app as a person does; the order matters."""
    said: dict[str, Any] = {}
    await app.refresh()
    first = app.introduction
    shoot(first.window, "welcome-models", folder)
    first.choose("org/large-model")  # which the server downloads
    first.getting = True
    first._show_step()
    first.show(app.controller.view)
    shoot(first.window, "welcome-download", folder)
    first.on_back()
    first.choose("demo")
    first.on_next()
    async with asyncio.timeout(120):
        while not first.next.enabled:
            await asyncio.sleep(0.05)
    shoot(first.window, "welcome-ready", folder)
    first.on_end()
    said["main shown"] = app.main.window.visible
    await app.refresh()
    for tab in TABS:
        app.main.tabs.current_tab = tab
        await asyncio.sleep(0.05)
        shoot(app.main.window, f"main-{tab.lower()}", folder)
    native = app.status._impl.native
    said["menu"] = lines(native.contextMenu())
    native.activated.emit(QSystemTrayIcon.ActivationReason.Trigger)
    said["click"] = app.chat.window.visible
    shoot(app.chat.window, "chat-without-web-view", folder)
    app.chat.window._impl.native.activateWindow()
    await asyncio.sleep(0.05)
    QTest.keyClick(app.chat.window._impl.native, Qt.Key.Key_Escape)
    said["escape"] = app.chat.window.visible
    await app.perform(Action(Do.COPY_URL))
    said["copied"] = QGuiApplication.clipboard().text()
    app.main.window._impl.native.close()
    app.main.tabs.current_tab = "Server"
    app.show(View(url="http://127.0.0.1:8080", problem="Start `mlxinfer serve` there. " * 4))
    shoot(app.main.window, "main-stopped", folder)
    said["closed"] = app.main.window.visible
    said["second start"] = await in_thread(Instance(folder / "app.sock").show_other)
    await asyncio.sleep(0.1)
    said["shown again"] = app.main.window.visible
    return said


def main(url: str, folder: Path) -> None:
    stored.save(folder / "app.json", Settings(url=url, hotkey=""))
    platform = QtPlatform()
    controller = AppController(folder, ServerProcess(folder), platform.notify)
    app = MenubarApp(controller, platform, Instance(folder / "app.sock"), web=False)
    problems: list[str] = []
    app.loop.set_exception_handler(lambda _, context: problems.append(str(context)))

    async def drive() -> None:
        said: dict[str, Any] = {}
        try:
            said = await asyncio.wait_for(scenario(app, folder), 50)
        finally:
            print(json.dumps({**said, "problems": problems}), flush=True)
            app.request_exit()

    app.loop.call_soon(lambda: app.loop.create_task(drive()))
    app.main_loop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
