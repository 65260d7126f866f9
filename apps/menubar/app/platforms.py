"""Parts that Toga does not have, behind one class: a Mac's own, or Qt's for development.

Every call is guarded: a part that fails is logged once and missed, and the app goes on without it.
So nothing may depend on these parts alone; windows offer what the status item offers.
"""

import functools
import logging
import plistlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ..errors import InvalidRequestError

log = logging.getLogger("mlxinfer.app")

LABEL = "io.mlxinfer.app"
MODIFIERS = ("ctrl", "alt", "shift", "cmd")
KEYS = ("space", *"abcdefghijklmnopqrstuvwxyz0123456789", *(f"f{n}" for n in range(1, 13)))
P = ParamSpec("P")
R = TypeVar("R")


class Tones(NamedTuple):
    """A colour, as it is on a light and on a dark ground."""

    light: str
    dark: str


ACCENT, BAD = Tones("#0a6b52", "#55cba8"), Tones("#a52a2a", "#ff9d92")  # those of the page


class Look(StrEnum):
    """Looks of widgets that Toga does not have."""

    PRIMARY = "the button that Return presses"
    QUIET = "a label beside a more important one"
    CARD = "a box with a background and round corners"
    CHOSEN = "a card with a border"
    BAR = "a progress bar without a text of its own"


@dataclass(frozen=True, slots=True)
class Hotkey:
    """A key with modifiers that works in every program."""

    key: str
    modifiers: frozenset[str]


def parse_hotkey(text: str) -> Hotkey | None:
    """A hotkey of "ctrl+alt+space"; None for an empty text.

    Raises:
        InvalidRequestError: a part is unknown, or there is no modifier, or not one key.
    """
    parts = [part.strip().lower() for part in text.split("+")] if text.strip() else []
    if not parts:
        return None
    *modifiers, key = [
        {"option": "alt", "control": "ctrl", "command": "cmd"}.get(p, p) for p in parts
    ]
    if key not in KEYS or not modifiers or not set(modifiers) <= set(MODIFIERS):
        raise InvalidRequestError(
            f"{text!r} is no hotkey; expected one or more of {', '.join(MODIFIERS)} and a key, "
            "such as ctrl+alt+space."
        )
    return Hotkey(key, frozenset(modifiers))


class Platform:
    """The parts of a desktop that the app uses beside Toga; each is missed here.

    Windows and icons are Toga's.
    """

    def style_icon(self, icon: Any) -> None:
        """Let the system colour the status icon for light, dark and tinted bars."""

    def style(self, widget: Any, look: Look) -> None:
        """Give a widget of Toga a look."""

    def set_title(self, icon: Any, text: str) -> None:
        """Show a text beside the icon; empty: the icon alone."""

    def on_click(self, icon: Any, action: Callable[[], object]) -> None:
        """Call `action` when the icon is clicked; its menu opens by the other button."""

    def on_drop(self, icon: Any, action: Callable[[list[Path]], object]) -> None:
        """Call `action` with the files that are dropped on the icon."""

    def on_reopen(self, app: Any, action: Callable[[], object]) -> None:
        """Call `action` when the app is opened while it runs."""

    def on_escape(self, window: Any, action: Callable[[], object]) -> None:
        """Call `action` when Esc is pressed in a window and nothing in it takes it."""

    def watch_links(self, web: Any, may_follow: Callable[[str], bool]) -> None:
        """Ask before a web view goes to another address."""

    def set_hotkey(self, hotkey: Hotkey | None, action: Callable[[], object]) -> bool:
        """Have one hotkey, in place of the last, or none; False: it is taken or not possible."""
        return hotkey is None

    def bring_to_front(self, window: Any) -> None:
        """Make the app the active one and a window the first: it may be opened from elsewhere."""

    def place(self, window: Any, icon: Any) -> None:
        """Put a window below the status icon and above other windows."""

    def starts_at_login(self) -> bool:
        """Whether the app is started when the user logs in."""
        return False

    def start_at_login(self, on: bool) -> bool:
        """Turn starting at login on or off; return whether it is on."""
        return False

    def notify(self, title: str, text: str) -> None:
        """Show a message of the system."""

    def copy(self, text: str) -> None:
        """Put a text on the clipboard."""

    def screenshot(self, path: Path) -> bool:
        """Let the user choose a part of the screen and write it as PNG; blocks meanwhile.

        False: nothing was chosen, or this is not possible here.
        """
        return False


def guarded(missing: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for the parts of a platform: a failure is logged, and `missing` is returned.

    The broad except is on purpose: these calls reach into a system that differs between versions,
    and a menubar app without a title or a hotkey is better than none.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # foreign code: it raises nearly anything
                log.warning("%s does not work here: %s", call.__name__, error)
                return missing

        return attempt

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginAgent:
    """The app as a launchd agent, which is started at login; for an app without a bundle.

    It is started once and not again when it ends. Source: launchd.plist(5).
    """

    home: Path  # of the user
    # the command line of the app
    program: Sequence[str] = (sys.executable, "-m", "mlxinfer.cli", "app", "--background")

    @property
    def path(self) -> Path:
        """The property list; it is there or it is not."""
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def set(self, on: bool) -> bool:
        """Write the property list, or delete it."""
        if not on:
            self.path.unlink(missing_ok=True)
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "Label": LABEL,
            "ProgramArguments": list(self.program),
            "RunAtLoad": True,
            "LimitLoadToSessionType": "Aqua",
            "ProcessType": "Interactive",
        }
        self.path.write_bytes(plistlib.dumps(content))
        return True


def below(
    icon: tuple[float, float], bar_bottom: float, screen: tuple[float, float], size: tuple[int, int]
) -> tuple[int, int]:
    """Return the position at which a window hangs below the icon and stays on the screen.

    Args:
        icon: left and right edge.
        bar_bottom: lower edge of the menu bar, from the top.
        screen: left and right edge.
        size: width and height of the window.
    """
    left, right = screen
    x = (icon[0] + icon[1] - size[0]) / 2
    return round(max(left, min(x, right - size[0]))), round(bar_bottom)


def run_quietly(arguments: Sequence[str], text: str | None = None) -> None:
    """Run a program of the system with a text as its input; raises OSError, CalledProcessError."""
    subprocess.run(list(arguments), input=text, text=True, check=True, capture_output=True)
