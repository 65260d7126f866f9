"""The settings of the app. Nothing is modal."""

from collections.abc import Callable
from typing import Any

import toga

from .client import checked_url
from .menu import shortened
from .platforms import Platform, parse_hotkey
from .settings import Settings
from .windows import column, row

LABEL_WIDTH = 150


class SettingsForm:
    """The settings of the app; they hold when Save is pressed.

    Args:
        settings: as they are.
        platform: knows whether the app starts at login.
        change: takes fields of Settings that change.
    """

    def __init__(self, settings: Settings, platform: Platform, change: Callable[..., None]) -> None:
        self._platform, self._change = platform, change
        self.url = toga.TextInput(value=settings.url, flex=1)
        self.key = toga.PasswordInput(value=settings.key, flex=1)
        self.folder = toga.TextInput(
            value=settings.models_folder, placeholder="the hub's usual folder", flex=1
        )
        self.hotkey = toga.TextInput(value=settings.hotkey, placeholder="none", flex=1)
        self.start_server = toga.Switch(
            "Start the server when the app starts", value=settings.start_server
        )
        self.at_login = toga.Switch("Open at login", value=platform.starts_at_login())
        self.show_rate = toga.Switch("Show tokens/s in the menu bar", value=settings.show_rate)
        self.said = toga.Label("")
        self.content = column(
            _field("Address", self.url),
            _field("API key", self.key),
            _field("Folder of models", self.folder),
            _field("Hotkey of the chat", self.hotkey),
            *(self.start_server, self.at_login, self.show_rate),
            row(toga.Button("Save", on_press=self.on_save), self.said),
        )

    def on_save(self, *_: Any) -> None:
        """Check and save what stands in the fields; a mistake is said below them."""
        try:
            hotkey = self.hotkey.value.strip()
            parse_hotkey(hotkey)
            url = checked_url(self.url.value)
        except ValueError as error:
            self.said.text = shortened(str(error), 90)
            return
        self.said.text = "Saved"
        self._change(
            url=url,
            key=self.key.value.strip(),
            models_folder=self.folder.value.strip(),
            hotkey=hotkey,
            start_server=self.start_server.value,
            show_rate=self.show_rate.value,
        )
        if self.at_login.value != self._platform.starts_at_login():
            self._set_login_item()

    def say(self, text: str) -> None:
        """Say something below the fields."""
        self.said.text = shortened(text, 90)

    def _set_login_item(self) -> None:
        wanted = self.at_login.value
        if self._platform.start_at_login(wanted) != wanted:
            self.at_login.value = not wanted
            self.say("The system did not change what opens at login.")


def _field(text: str, field: toga.Widget) -> toga.Box:
    return row(toga.Label(text, width=LABEL_WIDTH), field)
