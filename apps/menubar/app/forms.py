"""The settings."""

from collections.abc import Callable
from typing import Any

import toga

from .client import checked_url
from .menu import shortened
from .platforms import Look, Platform, parse_hotkey
from .settings import Settings
from .windows import bold, column, row, space

LABEL_WIDTH = 150
SWITCHES = {
    "start_server": "Start the server when the app starts",
    "stop_server": "Stop that server when the app is quit",
    "show_rate": "Show tokens/s in the menu bar",
    "hide_icon": "Hide the icon; open the app again to see this window",
}


class SettingsForm:
    """The settings of the app; they hold when Save is pressed.

    Args:
        settings: as they are.
        platform: knows whether the app starts at login.
        change: takes fields of Settings that change.

    Attributes:
        texts, switches: the widgets, by the fields of Settings.
    """

    def __init__(self, settings: Settings, platform: Platform, change: Callable[..., None]) -> None:
        self._platform, self._change = platform, change
        folder, none = "the hub's usual folder", "none"
        self.texts = {
            "url": toga.TextInput(value=settings.url, flex=1),
            "key": toga.PasswordInput(value=settings.key, flex=1),
            "models_folder": toga.TextInput(
                value=settings.models_folder, placeholder=folder, flex=1
            ),
            "hotkey": toga.TextInput(value=settings.hotkey, placeholder=none, flex=1),
        }
        self.switches = {
            name: toga.Switch(text, value=getattr(settings, name))
            for name, text in SWITCHES.items()
        }
        self.at_login = toga.Switch("Open at login", value=platform.starts_at_login())
        self.said = toga.Label("")
        save = toga.Button("Save", on_press=self.on_save)
        platform.style(save, Look.PRIMARY)
        start, stop, *others = self.switches.values()
        self.content = column(
            bold("Server"),
            self._field("Address", "url"),
            self._field("API key", "key"),
            self._field("Folder of models", "models_folder"),
            *(start, stop, toga.Divider(), bold("App")),
            self._field("Hotkey of the chat", "hotkey"),
            *(self.at_login, *others, row(self.said, space(), save)),
        )

    def on_save(self, *_: Any) -> None:
        """Check and save what stands in the fields; a mistake is said below them."""
        found = {name: field.value.strip() for name, field in self.texts.items()}
        try:
            parse_hotkey(found["hotkey"])
            found["url"] = checked_url(found["url"])
        except ValueError as error:
            self.say(str(error))
            return
        self.said.text = "Saved"
        self._change(**found, **{name: each.value for name, each in self.switches.items()})
        if self.at_login.value != self._platform.starts_at_login():
            self._set_login_item()

    def show(self, settings: Settings) -> None:
        """Take over what was chosen in the first run."""
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
