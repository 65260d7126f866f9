"""The menubar app: a thin client of a mlxinfer server's HTTP API, in Toga."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MlxinferError

if TYPE_CHECKING:
    from .platforms import Platform

TRY_QT = "from PySide6.QtWidgets import QApplication; QApplication([])"
APT = (
    "libegl1 libgl1 libxkbcommon-x11-0 libdbus-1-3 libfontconfig1 libglib2.0-0 libx11-xcb1 "
    "libxcb-{cursor0,icccm4,keysyms1,randr0,shape0,sync1,xfixes0}"
)


class ScreenError(MlxinferError):
    """The app cannot open windows here."""


def main(*, background: bool = False, folder: Path | None = None) -> None:
    """Run the app until it is quit; if it runs already, its window is shown instead.

    Args:
        background: open no window at the start, as at login.
        folder: of settings and the server's log; None: the user's data folder.

    Raises:
        ImportError: Toga is not installed.
    """
    from ..files import data_folder
    from .instance import Instance

    place = folder or data_folder()
    instance = Instance(place / "app.sock")
    if instance.show_other():
        return
    from .application import MenubarApp
    from .controller import AppController
    from .process import ServerProcess

    platform = platform_of_this_system()
    controller = AppController(place, ServerProcess(place), platform.notify)
    MenubarApp(controller, platform, instance, background=background).main_loop()


def platform_of_this_system() -> "Platform":
    """Return the parts that Toga does not have: of macOS, or of Qt for development."""
    if sys.platform == "darwin":
        from .cocoa import CocoaPlatform

        return CocoaPlatform(bundled=".app/Contents/" in sys.executable)
    _require_qt()
    from .qt import QtPlatform

    return QtPlatform()


def _require_qt() -> None:
    """Raise ScreenError where Qt has no windows; another process tries, since Qt would abort."""
    environment = {**os.environ, "QT_DEBUG_PLUGINS": "1"}  # names the library
    command = [sys.executable, "-c", TRY_QT]
    tried = subprocess.run(command, capture_output=True, text=True, env=environment)
    if tried.returncode == 0 or "ModuleNotFoundError" in tried.stderr:
        return
    lacks, remedy = "a screen", "Set DISPLAY or WAYLAND_DISPLAY"
    if library := re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object", tried.stderr):
        lacks, remedy = f"the library {library[1]}", f"On Debian or Ubuntu: apt-get install {APT}"
    raise ScreenError(
        f"The app's windows need {lacks}, which is not here. {remedy}; or run mlxinfer serve and "
        "open its page in a browser."
    )
