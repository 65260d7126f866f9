"""One app for each user: a second start shows the windows of the first and ends.

The first listens on a socket file that only its user can reach; a file that is left over from a
crash gives no answer and is replaced.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

ANSWER_S = 2.0
SHOW, SHOWN = b"show\n", b"ok\n"


class Instance:
    """The app of this user.

    Args:
        place: of the socket file.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._listener: socket.socket | None = None

    def show_other(self) -> bool:
        """Ask an app that runs already to show itself; False: none runs."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(ANSWER_S)
            try:
                asking.connect(str(self._place))
                asking.sendall(SHOW)
                return asking.recv(len(SHOWN)) == SHOWN
            except OSError:
                return False

    def listen(self, show: Callable[[], object]) -> None:
        """Call `show` in another thread whenever the app is started again."""
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._place.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._place))
            self._place.chmod(0o600)
            listener.listen()
            answer = threading.Thread(target=self._answer, args=(listener, show), daemon=True)
            answer.start()
        except (OSError, RuntimeError):
            listener.close()  # too long a path, or no more threads: two apps may run then
            return
        self._listener = listener

    def close(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends a waiting accept
            self._listener.close()
            self._place.unlink(missing_ok=True)
            self._listener = None

    def _answer(self, listener: socket.socket, show: Callable[[], object]) -> None:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return
            with asking, contextlib.suppress(Exception):  # the next start is answered too
                asking.settimeout(ANSWER_S)
                if asking.recv(len(SHOW)) == SHOW:
                    show()
                    asking.sendall(SHOWN)
