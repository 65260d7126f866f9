"""The `mlxinfer` command, from the start of the process to its exit code.

Errors end at one place, `_commands.guarded`, which says them to the user.
"""

import os
import sys
from collections.abc import Sequence

from ._process import (
    INTERRUPTED,
    end_at_next_interrupt,
    ending_at_interrupts,
    ensure_home,
    open_missing_streams,
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    with ending_at_interrupts():  # imports take a while, and leave nothing to clean up
        from ._commands import cli, guarded
    open_missing_streams()
    ensure_home()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # retries are our business, and quiet
    code = guarded(lambda: cli.main(args, prog_name="mlxinfer", standalone_mode=False))
    if code == INTERRUPTED:
        end_at_next_interrupt()
    sys.exit(code)
