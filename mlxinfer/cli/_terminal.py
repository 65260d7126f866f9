"""The terminal's own settings while something is drawn on it. Knows nothing of what is drawn."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Let Ctrl-C not be written as ^C: it would put out of place what is drawn again and again.

    Does nothing where stdin is no terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    changed = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
