"""The menubar app: a thin client of a mlxinfer server's HTTP API, in Toga."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .platforms import Platform


def main(*, background: bool = False, folder: Path | None = None) -> None:
    """Run the app until it is quit; if it runs already, its window is shown instead.

    Args:
        background: open no window at the start, as at login.
        folder: of settings and the server's log; None: the user's data folder.

    Raises:
        ImportError: Toga is not installed.
    """
    from ..history import data_folder
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
    from .qt import QtPlatform

    return QtPlatform()
