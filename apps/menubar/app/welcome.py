"""The first run: choose a model and where it is kept, then watch it come. Nothing is modal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import toga

from ..memory import human_bytes
from .controller import View
from .menu import Act, Action, Do, shortened, status_of, transfer_text
from .platforms import Look, Platform
from .settings import Settings
from .windows import GAP, TITLE, bold, button, column, picture, quiet, row, space, wrapped

SIZE, CARD_WIDTH, NUM_CARDS = (700, 420), 208, 3
LINK_BITS_S = 100e6  # of the times on the cards
DEMO = "demo"  # comes with the server
PRIVATE = "It runs on this machine. What you write stays here."
TINY = "The demo comes with the app. It knows mlxinfer, and little else."


def cards_of(models: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most three suggestions: the best balance, then such as have half the size, if any."""
    chosen: list[Mapping[str, Any]] = []
    for model in models:
        if not chosen or model["weights_bytes"] <= chosen[-1]["weights_bytes"] / 2:
            chosen.append(model)
    return [*chosen, *(model for model in models if model not in chosen)][:NUM_CARDS]


def time_text(num_bytes: int) -> str:
    """The time of a download as one says it: "about 7 min"."""
    minutes = 8 * num_bytes / LINK_BITS_S / 60
    if minutes < 1:
        return "under a minute"
    return f"about {minutes:.0f} min" if minutes < 90 else f"about {minutes / 60:.1f} h"


class Introduction:
    """The first run. It can be left at any time; a download goes on.

    Args:
        change: takes fields of Settings that change.
        finish: called at the end.
    """

    def __init__(
        self,
        settings: Settings,
        platform: Platform,
        act: Act,
        change: Callable[..., None],
        finish: Callable[[], None],
    ) -> None:
        self._platform, self._act, self._change, self._finish = platform, act, change, finish
        self.window = toga.Window(title="Welcome to mlxinfer", size=SIZE, on_close=self.on_end)
        self.chosen, self.getting, self._view = "", False, View()
        self.cards: dict[str, tuple[toga.Box, toga.Button]] = {}  # by model
        self.title, self.about = bold(font_size=TITLE), quiet(platform)
        self.said = toga.Label("")
        self.bar = toga.ProgressBar(max=None, running=True)
        self.back = toga.Button("Back", on_press=self.on_back)
        self.next = toga.Button("Continue", on_press=self.on_next)
        platform.style(self.bar, Look.BAR)
        platform.style(self.next, Look.PRIMARY)
        self._models = toga.Box(gap=12, flex=1)
        folder, kept = "the hub's usual folder", settings.models_folder
        self.folder = toga.TextInput(value=kept, placeholder=folder, flex=1)
        progress = column(space(), self.bar, self.said, space(), margin=0, flex=1)
        self._steps = (self._model_step(), progress)
        self._body = toga.Box(flex=1)
        later = toga.Button("Not Now", on_press=self.on_end)
        self.window.content = column(
            row(picture("icon", 48), column(self.title, self.about, margin=0, gap=0)),
            self._body,
            row(later, space(), self.back, self.next),
            gap=16,
        )
        self._show_step()

    def _model_step(self) -> toga.Box:
        about = f"Times are estimates for a link of {LINK_BITS_S / 1e6:.0f} Mbit/s."
        self.demo = toga.Button("Try the Small Demo", on_press=lambda _: self.choose(DEMO))
        self.more = button("More Models…", Action(Do.SEARCH), self._act)
        choose = toga.Button("Choose Folder…", on_press=self._choose_folder)
        return column(
            self._models,
            row(quiet(self._platform, about), space(), self.demo, self.more),
            row(toga.Label("Kept in"), self.folder, choose),
            margin=0,
            flex=1,
        )

    def _card(self, model: Mapping[str, Any], first: bool) -> tuple[toga.Box, toga.Button]:
        """A model: its name, what it is good at, its size and the time of its download."""
        name, size, owner = model["name"], model["weights_bytes"], self._platform
        choose = toga.Button("Choose", on_press=lambda _: self.choose(name))
        inside = column(
            toga.Label("★ Recommended" if first else " "),
            bold(shortened(name.rpartition("/")[2].removesuffix("-4bit"), 22)),
            quiet(owner, f"Good at {', '.join(model['tasks'][:2])}"),
            toga.Label(human_bytes(size), font_size=TITLE, margin_top=GAP),
            quiet(owner, "On this disk" if model.get("here") else f"Download: {time_text(size)}"),
            *(space(), choose),
            margin=14,
            flex=1,
        )
        return toga.Box(children=[inside], width=CARD_WIDTH), choose

    # -- what is shown -----------------------------------------------------------------------------

    def show(self, view: View) -> None:
        """Show which models fit, or how far the chosen one is."""
        changed, self._view = view.suggested != self._view.suggested, view
        self.more.enabled = view.usable
        if changed:
            models = cards_of(view.suggested)
            self.cards = {model["name"]: self._card(model, model is models[0]) for model in models}
            self._models.clear()
            self._models.add(*[box for box, _ in self.cards.values()])
            self.choose(self.chosen or next(iter(self.cards), DEMO))
        if self.getting:
            self._show_progress(view)

    def choose(self, model: str) -> None:
        self.chosen = model
        self.about.text = TINY if model == DEMO else PRIVATE
        self.demo.text = "✓ The Small Demo" if model == DEMO else "Try the Small Demo"
        for name, (box, choose) in self.cards.items():
            choose.text = "✓ Chosen" if name == model else "Choose"
            self._platform.style(box, Look.CHOSEN if name == model else Look.CARD)

    def _show_step(self) -> None:
        self.title.text = "Choose a model"
        self.back.enabled, self.next.text, self.next.enabled = False, "Continue", True
        self._body.clear()
        self._body.add(self._steps[self.getting])

    def _show_progress(self, view: View) -> None:
        """One bar and one percentage: of the download. The server's start takes seconds."""
        ready = any(m.name == self.chosen and m.state == "loaded" for m in view.activity.models)
        transfer = next((one for one in view.transfers if one.name == self.chosen), None)
        name = self.chosen.rpartition("/")[2]
        self.title.text = f"{name} is ready" if ready else f"Getting {name}"
        self.next.text, self.next.enabled = "Open Chat", ready
        self.back.enabled = bool(transfer or view.problem)
        known = ready or view.problem or (transfer and transfer.total)
        self.bar.max = 1.0 if known else None
        if known:
            self.bar.value = (
                1.0 if ready else transfer.done / (transfer.total or 1) if transfer else 0.0
            )
        self.said.text = f"{status_of(view).word}…"
        if ready:
            self.said.text = f"Programs reach it at {view.url}/v1"
        elif view.problem:
            self.said.text = wrapped(view.problem)
        elif transfer:
            self.said.text = transfer_text(transfer)

    # -- what is done ------------------------------------------------------------------------------

    async def _choose_folder(self, _: Any) -> None:
        folder = await self.window.dialog(toga.SelectFolderDialog("Folder of models"))
        if folder is not None:
            self.folder.value = str(folder)

    def on_back(self, *_: Any) -> None:
        """Choose again; a download that runs is cancelled."""
        for transfer in self._view.transfers:
            if transfer.name == self.chosen and transfer.open:
                self._act(Action(Do.CANCEL, transfer.id))
        self.getting = False
        self._show_step()

    def on_next(self, *_: Any) -> None:
        """Get the chosen model; once it is ready, open the chat."""
        if self.getting:
            self.on_end()
            self._act(Action(Do.CHAT))
            return
        self.getting = True
        self._show_step()
        self._change(models_folder=self.folder.value.strip())
        self._act(Action(Do.GET, self.chosen))
        self._show_progress(self._view)

    def on_end(self, *_: Any, **__: Any) -> bool:
        """Hide the window for good; False: Toga does not close it."""
        self._change(introduced=True)
        self.window.hide()
        self._finish()
        return False
