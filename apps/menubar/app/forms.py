"""The settings, and the first run in three steps: folder, server, model. Nothing is modal."""

from collections.abc import Callable
from typing import Any

import toga

from .client import checked_url
from .controller import View
from .menu import Act, Action, Do, server_actions, shortened, state_text
from .platforms import Platform, parse_hotkey
from .settings import Settings
from .windows import MARGIN, button, column, row

LABEL_WIDTH = 150
INTRODUCTION_SIZE = (520, 280)


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
        self.hide_icon = toga.Switch(
            "Hide the icon; open the app again to see this window", value=settings.hide_icon
        )
        self.said = toga.Label("")
        self.content = column(
            _field("Address", self.url),
            _field("API key", self.key),
            _field("Folder of models", self.folder),
            _field("Hotkey of the chat", self.hotkey),
            *(self.start_server, self.at_login, self.show_rate, self.hide_icon),
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
            hide_icon=self.hide_icon.value,
        )
        if self.at_login.value != self._platform.starts_at_login():
            self._set_login_item()

    def show(self, settings: Settings) -> None:
        """Take over what was chosen in the first run."""
        self.folder.value, self.start_server.value = settings.models_folder, settings.start_server

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


class Introduction:
    """The first run. Each step can be skipped, and closing the window ends it.

    Args:
        settings: as they are.
        act: does what is asked for.
        change: takes fields of Settings that change.
        finish: called at the end.
    """

    def __init__(
        self,
        settings: Settings,
        act: Act,
        change: Callable[..., None],
        finish: Callable[[], None],
    ) -> None:
        self._act, self._change, self._finish = act, change, finish
        self.window = toga.Window(
            title="Welcome to mlxinfer", size=INTRODUCTION_SIZE, on_close=self._end
        )
        self.folder = toga.TextInput(
            value=settings.models_folder, placeholder="the hub's usual folder", flex=1
        )
        self._server = toga.Label("")
        self._start = button("Start the server", Action(Do.START), act)
        self.start_with_app = toga.Switch(
            "Start it whenever the app starts", value=settings.start_server
        )
        self.model = toga.Selection(items=[], flex=1)
        self.step, self._steps = 0, (self._folder_step(), self._server_step(), self._model_step())
        self._show_step()

    def show(self, view: View) -> None:
        """Show what is known of the server and its models."""
        said = f"A server runs at {view.url}." if view.usable else view.problem or state_text(view)
        self._server.text = shortened(said, 90)
        self._start.enabled = any(each.action == Action(Do.START) for each in server_actions(view))
        names = [*(model.name for model in view.activity.models), *view.on_disk]
        if names != [item.value for item in self.model.items]:
            self.model.items = names

    def _show_step(self) -> None:
        count, last = len(self._steps), self.step == len(self._steps) - 1
        title = f"Step {self.step + 1} of {count}"
        self.window.content = toga.Box(
            children=[
                toga.Label(title, font_weight="bold", margin=(MARGIN, MARGIN, 0)),
                self._steps[self.step],
                toga.Box(flex=1),
                column(
                    row(
                        toga.Button("Done" if last else "Next", on_press=self.on_next),
                        toga.Button("Skip all", on_press=self._end),
                    )
                ),
            ],
            direction="column",
        )

    def _folder_step(self) -> toga.Box:
        return column(
            toga.Label("Models take gigabytes. Which folder are they to be in?"),
            row(self.folder, toga.Button("Choose…", on_press=self._choose)),
            toga.Label("Empty: where other programs that use the Hugging Face hub keep them."),
        )

    def _server_step(self) -> toga.Box:
        return column(
            toga.Label("A server answers the chat and other programs of this machine."),
            self._server,
            row(self._start),
            self.start_with_app,
        )

    def _model_step(self) -> toga.Box:
        return column(
            toga.Label("Which model is to answer? `demo` is small and comes with the app."),
            row(self.model),
            row(button("Look for one that fits this machine…", Action(Do.SEARCH), self._act)),
        )

    async def _choose(self, _: Any) -> None:
        found = await self.window.dialog(toga.SelectFolderDialog("Folder of models"))
        if found is not None:
            self.folder.value = str(found)

    def on_next(self, *_: Any) -> None:
        """Take over a step and go on; after the last one the chosen model is loaded."""
        folder, with_app = self.folder.value.strip(), self.start_with_app.value
        self._change(models_folder=folder, start_server=with_app)
        if self.step < len(self._steps) - 1:
            self.step += 1
            self._show_step()
            return
        if self.model.value is not None:
            self._act(Action(Do.SERVE, str(self.model.value)))
        self._end()

    def _end(self, *_: Any, **__: Any) -> bool:
        """Hide the window for good; False: Toga does not close it."""
        self._change(introduced=True)
        self.window.hide()
        self._finish()
        return False
