"""Takes hold of single steps of a live engine: one that fails, one that hangs. Knows no HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from live_server import LiveServer

from tests.waiting import LIMIT_S

SECRET = "/Users/somebody/secret"


def break_next_step(server: LiveServer) -> None:
    """Let one launch of the engine fail, on its own thread, as an exception in MLX would."""
    loop: Any = server.model.session.engine._loop
    runner = loop.runner

    def fail(*args: Any) -> Any:
        del vars(runner)["launch"]  # the class's is seen again, whatever a later test makes of it
        raise RuntimeError(f"[metal] out of memory at 0x7ffe in {SECRET}")

    server.model.session.engine.call(lambda _: setattr(runner, "launch", fail))


@contextmanager
def hanging(server: LiveServer, *, behind: int = -1) -> Iterator[threading.Event]:
    """A step does not end before the block does or the event is set, as when a GPU has hung.

    Args:
        behind: it is the first that samples a later token than this one of an answer; else the
            next step.
    """
    loop: Any = server.model.session.engine._loop
    runner, go_on = loop.runner, threading.Event()
    launch = runner.launch

    def hang(batch: Any, previous: Any) -> Any:
        if max([0, *batch.sampling.output_index.tolist()]) > behind:
            go_on.wait(LIMIT_S)
            del vars(runner)["launch"]
        return launch(batch, previous)

    server.model.session.engine.call(lambda _: setattr(runner, "launch", hang))
    try:
        yield go_on
    finally:
        go_on.set()
