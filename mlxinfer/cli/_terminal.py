"""The terminal: reads a user's messages with history, and is set while drawing."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..history import data_folder
from ._output import note

if TYPE_CHECKING:
    from prompt_toolkit.history import History


Reader = Callable[[str], str]  # default text -> what was typed; EOFError, KeyboardInterrupt

PROMPT, CONTINUED = "> ", ". "


def open_reader(commands: Iterable[str]) -> Reader:
    """Return a reader with editing and history on a terminal, a plain one elsewhere."""
    return terminal_reader(commands) if sys.stdin.isatty() else plain_reader


def plain_reader(_: str = "") -> str:
    """Read one message from stdin; a line that ends with a backslash continues in the next."""
    lines = [input()]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


def terminal_reader(commands: Iterable[str]) -> Reader:
    """Return a reader with editing, history and completion of commands.

    Enter sends, unless the line ends with a backslash; Alt-Enter breaks the line.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    words = WordCompleter([f"/{name}" for name in commands], sentence=True)
    session: PromptSession[str] = PromptSession(
        history=_open_history(),
        key_bindings=keys,
        completer=words,
        complete_while_typing=False,
        multiline=True,
        prompt_continuation=CONTINUED,
    )
    return lambda default: session.prompt(PROMPT, default=default)


def _open_history() -> "History":
    """Return the history in its file, or in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Forgiving(FileHistory):
        """A history that loses entries on a full disk instead of ending the chat."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    try:
        return Forgiving(str(history_file()))
    except OSError as error:
        note(f"what you type is not remembered for the next time: {error}")
        return InMemoryHistory()


def history_file() -> Path:
    """Return the history's file, readable by its owner only."""
    path = data_folder() / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return path


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Keep the terminal from writing ^C, which would displace what is redrawn.

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
