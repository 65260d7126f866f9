"""`mlxinfer chat`: a conversation in the terminal."""

import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..config.file import find_config_file, read_config_file
from ..errors import ContextLengthError
from ..files import data_folder
from ..outputs import Delta, ToolCall
from ._chat_session import COMMANDS, ChatSession, CommandReply, is_command, run_command
from ._commands import FAILED, report
from ._markdown import WaitingLine, until_first_word
from ._open import ADAPTER, default_model, open_llm
from ._options import (
    GroupedCommand,
    effort_option,
    llm_arguments,
    model_option,
    one_request_options,
    sampling_options,
    sampling_values,
    system_option,
    think_option,
)
from ._output import counted, note, printable, wrapped
from ._pictures import dropped
from ._tools import conversation_tools
from .history import open_log
from .run import wish_of

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from rich.console import Console

Reader = Callable[[str], str]  # default text -> what was typed; EOFError, KeyboardInterrupt
PROMPT, CONTINUED = "> ", ". "
MAX_ROUNDS = 20  # of calls and their results, for one question
CLIPBOARDS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"))
FOLDED = 5  # lines of a result that are shown
STOPPED = "Error: the user stopped this call."
LIMIT = f"Error: not called, since {MAX_ROUNDS} rounds of calls answer one question at most."


@click.command(cls=GroupedCommand)
@model_option
@sampling_options
@system_option
@think_option
@effort_option
@click.option(
    "--show-thinking/--hide-thinking", default=True, help="Show the model's thoughts, dim."
)
@click.option(
    "-c",
    "--continue",
    "continued",
    metavar="[ID]",
    is_flag=False,
    flag_value="last",
    help="Go on with the last conversation, or the one whose id begins with ID.",
)
@click.option(
    "--history/--no-history", default=True, help="Keep a conversation of a terminal on this disk."
)
@click.option(
    "--tools",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Let the model call the functions of a Python file; each call asks first.",
)
@one_request_options
@click.pass_context
def command(
    ctx: click.Context, /, model: str, continued: str | None, history: bool, **options: Any
) -> None:
    """Talk with a model. /help inside lists what can be done.

    Ctrl-C stops an answer; pressed twice at an empty prompt, or Ctrl-D, it leaves.
    """
    from rich.console import Console

    log = None
    if continued is not None or (history and sys.stdin.isatty()):
        log = open_log(continued=continued, keep=history)
    arguments, adapter, local = llm_arguments(options), options["adapter"], options["local"]
    if ctx.get_parameter_source("model") is ParameterSource.DEFAULT:
        model = (log.model if log is not None else None) or default_model(model, local=local)
    session = ChatSession(
        model,
        lambda name: open_llm(
            name, adapter=adapter if name == model else None, local=local, **arguments
        ),
        sampling_values(options),
        options["system"],
        think=wish_of(options),
        log=log,
        adapter=ADAPTER if adapter else None,
    )
    try:
        session.tools = conversation_tools(read_config_file(find_config_file()), options["tools"])
        summary = session.llm.model_info  # load now, so that a failure ends the command
        if log is not None and continued is not None:
            session.messages = log.messages(sees=summary.sees)
            session.system = options["system"] or log.system
        if sys.stdin.isatty():
            note(f"{summary.name} is ready ({session.params.words}); /help lists commands")
            if continued is not None and log is not None:
                note(f"{log.title}: {counted(len(session.messages), 'message')}")
        console, shown = Console(), options["show_thinking"]
        num_failed = converse(session, open_reader(COMMANDS), console, thoughts=shown)
    finally:
        session.close()
        if log is not None:
            log.close()
    if num_failed and not sys.stdin.isatty():  # a script has not seen what people have
        raise click.exceptions.Exit(FAILED)


def converse(
    session: ChatSession, read: Reader, console: "Console", *, thoughts: bool = True
) -> int:
    """Read, run and show turns until the user leaves. An error ends only its turn."""
    default, interrupts, num_failed = "", 0, 0
    while True:
        try:
            line = read(default).strip()
        except EOFError:
            return num_failed
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 2:
                return num_failed
            note("Ctrl-C again leaves")
            continue
        default, interrupts = "", 0
        try:
            reply = take_turn(session, line, console, thoughts=thoughts)
        except BrokenPipeError:  # stdout is closed
            raise
        except Exception as error:  # of ours too: the conversation is not to be lost by it
            num_failed += 1
            report(error)
            if isinstance(error, ContextLengthError):
                note("/clear forgets the conversation, and makes room")
        except KeyboardInterrupt:
            note("stopped")
        else:
            if reply.quit:
                return num_failed
            default = reply.edit or ""


def take_turn(
    session: ChatSession, line: str, console: "Console", *, thoughts: bool = True
) -> CommandReply:
    """Run a command, or ask the model and show the answer. Returns the remaining action."""
    if not line:
        return CommandReply()
    reply = reply_to(session, line)
    if reply.text:
        text = wrapped(reply.text, console.width) if console.is_terminal else reply.text
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if reply.copy is not None:
        note("copied" if copy_text(reply.copy, console) else "there is no clipboard here")
    if reply.ask is not None:
        with silent_interrupts():
            answer(session.ask(reply.ask), session, console, thoughts=thoughts)
        for _ in range(MAX_ROUNDS):
            if not session.calls:
                return reply
            results = results_of(session, console)
            with silent_interrupts():
                answer(session.tell(results), session, console, thoughts=thoughts)
        if session.calls:
            session.stop([(call, LIMIT) for call in session.calls])
            note(f"stopped after {MAX_ROUNDS} rounds of calls")
    return reply


def copy_text(text: str, console: "Console") -> bool:
    """Bring a text to the clipboard by the system's program, or by the terminal (OSC 52)."""
    for command in CLIPBOARDS:
        if which(command[0]) is not None:
            given = text.encode()
            return subprocess.run(command, input=given, timeout=10, check=False).returncode == 0
    if console.is_terminal:
        console.file.write(f"\033]52;c;{b64encode(text.encode()).decode()}\a")
        console.file.flush()
    return console.is_terminal


def results_of(session: ChatSession, console: "Console") -> list[tuple[ToolCall, str]]:
    """Run the calls of the last answer. Ctrl-C ends them; templates refuse calls without results.

    Raises:
        KeyboardInterrupt: the user stopped a call, or left the question whether it may run.
    """
    calls, results = session.calls, list[tuple[ToolCall, str]]()
    try:
        for call in calls:
            results.append((call, result_of(session, call, console)))
    except (KeyboardInterrupt, click.Abort):
        session.stop([*results, *((call, STOPPED) for call in calls[len(results) :])])
        raise KeyboardInterrupt from None
    return results


def result_of(session: ChatSession, call: ToolCall, console: "Console") -> str:
    """Run a call if the config file or the user allows it, and show it folded."""
    from rich.text import Text

    tools = session.tools
    assert tools is not None, "a call without tools"
    asks = not tools.allows(call.name) and call.name not in session.allowed
    told = Text(printable(f"{call.name}({call.arguments})"), style="bold", overflow="ellipsis")
    console.print(told, no_wrap=not asks)  # a user who is asked sees all of it
    if asks:
        said = allowed(call.name)
        if said == "always":
            session.allowed.add(call.name)
        elif said != "yes":
            return "Error: the user did not allow this call."
    result = tools.call(call.name, call.arguments)
    lines = printable(result).splitlines()
    more = [f"… {len(lines) - FOLDED} more lines"] if len(lines) > FOLDED else []
    console.print(Text("\n".join([*lines[:FOLDED], *more]), style="dim"))
    return result


def allowed(name: str) -> str:
    """Ask whether a tool may be called: yes, no, or always. Without a terminal: no."""
    if not sys.stdin.isatty():
        return "no"
    choice = click.Choice(["yes", "no", "always"])
    answered: str = click.prompt(f"Call {printable(name)}?", type=choice, default="no", err=True)
    return answered


def reply_to(session: ChatSession, line: str) -> CommandReply:
    """Read a line: a command, a message, or paths of dropped pictures with a message."""
    if is_command(line) and line[1:].partition(" ")[0] in COMMANDS:
        return run_command(session, line)
    paths, rest = dropped(line)
    if rest and paths and not session.llm.model_info.sees:
        paths, rest = [], line  # the message speaks of a file
    for path in paths:
        session.attach_picture(path)
    if paths and not rest:
        return CommandReply(f"{counted(len(session.images), 'picture')} with the next message")
    if is_command(rest):
        return run_command(session, rest)
    return CommandReply(ask=rest[1:] if rest.startswith("//") else rest)


def answer(
    deltas: Generator[Delta, None, None],
    session: ChatSession,
    console: "Console",
    *,
    thoughts: bool = True,
) -> None:
    """Show an answer as it arrives; Ctrl-C ends it and keeps the text so far."""
    from rich.console import Console

    from ._markdown import AnswerStream, PlainStream

    shown: AnswerStream | PlainStream = PlainStream(console.file, None)
    if console.is_terminal:
        shown = AnswerStream(console, thoughts=thoughts)
    line = WaitingLine(Console(stderr=True))
    session.watch = line.read
    try:
        with until_first_word(line, deltas) as watched:
            for delta in watched:
                shown.feed(delta)
    except KeyboardInterrupt:
        deltas.close()
        shown.finish()
        note("stopped")
        return
    shown.finish()
    if session.last is not None and console.is_terminal:
        note(session.last.summary)


# -- the terminal ---------------------------------------------------------------------------------


def open_reader(commands: Iterable[str]) -> Reader:
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
    path = data_folder() / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return path


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Keep the terminal from writing ^C, which would shift the lines that are redrawn.

    Does nothing if stdin is no terminal.
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
