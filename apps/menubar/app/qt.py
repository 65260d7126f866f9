"""The parts of the app on Qt, for development on Linux: a Mac has `cocoa.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtGui import QGuiApplication, QKeySequence, QShortcut
from PySide6.QtWidgets import QSystemTrayIcon

from .platforms import Hotkey, LoginAgent, guarded

SHOWN_MS = 8000  # of a message


class QtPlatform:
    """Qt has no template images and no global hotkeys; the rest is here."""

    def __init__(self) -> None:
        self._icon: Any = None

    def style_icon(self, icon: Any) -> None:
        """Nothing: the image is drawn as it is."""
        self._icon = icon

    @guarded()
    def set_title(self, icon: Any, text: str) -> None:
        """Trays show no text; it is the tooltip."""
        icon._impl.native.setToolTip(text or icon.text)

    @guarded()
    def on_click(self, icon: Any, action: Callable[[], object]) -> None:
        """Replace Toga's handler, which opens the menu at any click."""
        native = icon._impl.native
        native.activated.disconnect()

        def activated(reason: QSystemTrayIcon.ActivationReason) -> None:
            if reason == QSystemTrayIcon.ActivationReason.Trigger:
                action()

        native.activated.connect(activated)

    def on_reopen(self, app: Any, action: Callable[[], object]) -> None:
        """Nothing: a second start of the app asks the first (`instance.py`)."""

    @guarded()
    def on_escape(self, window: Any, action: Callable[[], object]) -> None:
        """A shortcut of the window."""
        shortcut = QShortcut(QKeySequence("Esc"), window._impl.native)
        shortcut.activated.connect(lambda: action())

    def watch_links(self, web: Any, may_follow: Callable[[str], bool]) -> None:
        """Nothing: Toga's web view on Qt cannot ask."""

    def set_hotkey(self, hotkey: Hotkey | None, action: Callable[[], object]) -> bool:
        """Qt has no global hotkeys."""
        return hotkey is None

    def place(self, window: Any, icon: Any) -> None:
        """Nothing: trays are in many places, and the window has its own."""

    @guarded()
    def bring_to_front(self, window: Any) -> None:
        """Raise it."""
        window._impl.native.raise_()
        window._impl.native.activateWindow()

    def starts_at_login(self) -> bool:
        """Whether the agent's file is there, which only a Mac reads."""
        return LoginAgent(home=Path.home()).path.exists()

    @guarded(missing=False)
    def start_at_login(self, on: bool) -> bool:
        """Refused: Linux desktops each have a way of their own."""
        return False

    @guarded()
    def notify(self, title: str, text: str) -> None:
        """A message at the tray icon."""
        if self._icon is not None and self._icon._impl.native is not None:
            self._icon._impl.native.showMessage(title, text, msecs=SHOWN_MS)

    @guarded()
    def copy(self, text: str) -> None:
        """To Qt's clipboard."""
        QGuiApplication.clipboard().setText(text)
