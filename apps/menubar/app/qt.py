"""The parts of the app on Qt, for development on Linux: a Mac has `cocoa.py`."""

from collections.abc import Callable
from typing import Any

import toga
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QKeySequence, QShortcut
from PySide6.QtWidgets import QSystemTrayIcon

from .platforms import ACCENT, Look, Platform, guarded

SHOWN_MS = 8000  # of a message
CARD = "background: palette(base); border-radius: 10px; border: 2px solid {0};"
STYLES = {  # {0}: the accent
    Look.PRIMARY: "QPushButton {{ padding: 4px 16px; border-radius: 4px; }} "
    "QPushButton:enabled {{ background: {0}; color: palette(base); }} "
    "QPushButton:!enabled {{ background: palette(midlight); }}",
    Look.QUIET: "color: palette(placeholder-text);",
    Look.CARD: CARD.replace("{0}", "palette(midlight)"),
    Look.CHOSEN: CARD,
    Look.BAR: "QProgressBar {{ color: transparent; border: 1px solid palette(mid); }} "
    "QProgressBar::chunk {{ background: {0}; }}",
}


class QtPlatform(Platform):
    """Qt has no template images and no global hotkeys, and its web view does not ask."""

    def __init__(self) -> None:
        self._icon: Any = None

    def style_icon(self, icon: Any) -> None:
        """Remember the icon, which shows messages."""
        self._icon = icon

    @guarded()
    def style(self, widget: Any, look: Look) -> None:
        """By colours of the palette, which is another in a dark theme."""
        widget._impl.native.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        widget._impl.native.setStyleSheet(STYLES[look].format(ACCENT[bool(toga.App.app.dark_mode)]))

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

    @guarded()
    def on_escape(self, window: Any, action: Callable[[], object]) -> None:
        """A shortcut of the window."""
        shortcut = QShortcut(QKeySequence("Esc"), window._impl.native)
        shortcut.activated.connect(lambda: action())

    @guarded()
    def bring_to_front(self, window: Any) -> None:
        window._impl.native.raise_()
        window._impl.native.activateWindow()

    @guarded()
    def notify(self, title: str, text: str) -> None:
        """A message at the tray icon."""
        if self._icon is not None and self._icon._impl.native is not None:
            self._icon._impl.native.showMessage(title, text, msecs=SHOWN_MS)

    @guarded()
    def copy(self, text: str) -> None:
        """To Qt's clipboard."""
        QGuiApplication.clipboard().setText(text)
