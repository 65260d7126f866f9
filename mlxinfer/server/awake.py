"""Keeps a Mac awake while requests run: `caffeinate` holds the system, and the screen may sleep."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

log = logging.getLogger("mlxinfer.server")

RELEASE_S = 30.0  # without a request: one that follows at once starts no other process
# It ends by itself when this process ends, however that ends.
COMMAND = ("caffeinate", "-i", "-w", str(os.getpid())) if sys.platform == "darwin" else ()


class Awake:
    """Holds the machine awake. Lives on one event loop.

    Args:
        command: runs as long as the machine is to stay awake; empty: nothing is done.
        release_s: seconds from the last request until it is ended.
    """

    def __init__(self, command: Sequence[str], release_s: float = RELEASE_S) -> None:
        self._command, self._release_s = command, release_s
        self._process: subprocess.Popen[bytes] | None = None
        self._release: asyncio.TimerHandle | None = None
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the machine awake inside the context."""
        self._holders += 1
        self._hold()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders and self._process is not None:
                loop = asyncio.get_running_loop()
                self._release = loop.call_later(self._release_s, self.close)

    def _hold(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None
        if not self._command or (self._process is not None and self._process.poll() is None):
            return
        null = subprocess.DEVNULL
        try:  # file descriptors of Python are not inherited, and this way no memory is copied
            self._process = subprocess.Popen(
                self._command, stdin=null, stdout=null, stderr=null, close_fds=False
            )
        except OSError as error:
            log.warning("the machine may sleep during requests: %s", error)
            self._command = ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
