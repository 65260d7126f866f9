"""The process of an engine: MLX does not work in a fork, and a process does not end inside it.

MLX has threads and locks of its own. A fork has the locks without the threads, and waits for ever;
a process that ends while a thread is inside MLX is aborted.
"""

import atexit
import os
import sys
import threading
from _thread import LockType as Lock

from ..errors import EngineClosedError

ADVICE = "start processes with multiprocessing's 'spawn' or 'forkserver', and build an LLM there"

_claimed: list[int] = []  # the process that first ran an engine; in a fork of it, still that one


def claim_process() -> int:
    """The id of this process, which is about to use MLX.

    Raises:
        EngineClosedError: it was forked from one that did.
    """
    pid = os.getpid()
    if not _claimed:
        _claimed.append(pid)
    if pid not in _claimed:
        raise EngineClosedError(
            f"This process was forked from one that has used MLX, which does not live on here; "
            f"{ADVICE}."
        )
    return pid


def is_fork(pid: int) -> bool:
    """Whether this is no longer process `pid`, where an engine runs."""
    return os.getpid() != pid


def require_process(pid: int) -> None:
    """Raise EngineClosedError in a fork of process `pid`, where an engine runs."""
    if is_fork(pid):
        raise EngineClosedError(
            f"The engine runs in the process that this one was forked from; {ADVICE}."
        )


def await_end(running: Lock) -> None:
    """Wait for a lock that a thread holds as long as it uses MLX.

    Ctrl-C ends the wait, and then the process waits at its own end. There a further Ctrl-C ends it
    at once. The thread is not joined for this: after an interrupted `join` Python 3.11 takes it for
    ended.
    """
    try:
        with running:
            pass
    except KeyboardInterrupt:
        if not threading.main_thread().is_alive():  # that is how Python says that it ends
            os._exit(130)
        atexit.register(await_end, running)
        raise


def leave() -> None:
    """End a process with an engine stuck inside MLX; else it would wait for the engine."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if getattr(sys, "last_value", None) is None else 1)
