"""The menubar app: a thin client of a mlxinfer server's HTTP API, in Toga."""

import platform
import sys
from pathlib import Path

from ..errors import InvalidRequestError


def main(*, background: bool = False, folder: Path | None = None) -> None:
    """Run the app until it is quit; if it runs already, its window is shown instead.

    Args:
        background: open no window at the start, as at login.
        folder: of settings and the server's log; None: the user's data folder.

    Raises:
        ImportError: Toga is not installed.
        InvalidRequestError: this is no Mac.
    """
    from ..files import data_folder
    from .instance import Instance

    place = folder or data_folder()
    instance = Instance(place / "app.sock")
    if instance.show_other():
        return
    if platform.system() != "Darwin":
        raise InvalidRequestError(
            "The menubar app needs a Mac; run mlxinfer serve, and open its page in a browser."
        )
    from .application import MenubarApp
    from .cocoa import CocoaPlatform
    from .controller import AppController
    from .process import ServerProcess

    desktop = CocoaPlatform(bundled=".app/Contents/" in sys.executable)
    controller = AppController(place, ServerProcess(place), desktop.notify)
    MenubarApp(controller, desktop, instance, background=background).main_loop()
