"""%%llm: a cell that is a message. `%load_ext mlxinfer` defines it."""

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequestError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .llm import LLM

VARIABLE = "llm"  # of the notebook: the model that answers


def new_parser() -> argparse.ArgumentParser:
    """The options of a cell; wrong ones raise IPython's UsageError, which is shown in one line."""
    from IPython.core.magic_arguments import MagicArgumentParser

    parser: argparse.ArgumentParser = MagicArgumentParser(
        prog="%llm", description="Send the cell to a model and show its answer."
    )
    parser.add_argument("-h", "--help", action="store_true", help="list what the cell takes")
    parser.add_argument("-m", "--model", help="load this model into the variable, if it has none")
    parser.add_argument("-w", "--with", dest="variable", default=VARIABLE, help="the variable")
    parser.add_argument("-c", "--continue", dest="continued", action="store_true", help="go on")
    parser.add_argument("-s", "--system", help="system message")
    parser.add_argument("-t", "--temperature", type=float)
    parser.add_argument("-n", "--max-tokens", type=int)
    parser.add_argument("--seed", type=int)
    return parser


class ChatMagic:
    """The conversation of the cells of one notebook.

    Args:
        shell: of the notebook; its variables are read.
    """

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._messages: list[dict[str, str]] = []

    def __call__(self, line: str, cell: str | None = None) -> None:
        """Answer a cell with options in its first line; all of a `%llm` line is the message."""
        if cell is None and line.strip() not in ("-h", "--help"):
            line, cell = "", line
        parser = new_parser()
        given = parser.parse_args(shlex.split(line))
        if given.help:
            print(parser.format_help().removeprefix("::\n\n"))
            return
        llm = self._model(given)
        if not given.continued:
            self._messages = []
        if given.system is not None:
            self._messages = [m for m in self._messages if m["role"] != "system"]
            self._messages.insert(0, {"role": "system", "content": given.system})
        self._messages.append({"role": "user", "content": (cell or "").strip()})
        names = ("temperature", "max_tokens", "seed")
        values: Any = {n: getattr(given, n) for n in names if getattr(given, n) is not None}
        llm.show(self._messages, **values)
        if llm.last is not None:
            self._messages.append({"role": "assistant", "content": llm.last.text})

    def _model(self, given: argparse.Namespace) -> "LLM":
        """The model in the notebook's variable, loaded if it holds none."""
        from .llm import LLM

        held = self._shell.user_ns.get(given.variable)
        if (
            isinstance(held, LLM)
            and not held.closed
            and given.model in (None, held.model_info.name)
        ):
            return held
        if isinstance(held, LLM):
            held.close()  # before the next is loaded: two may not fit in memory
        if given.model is None and not isinstance(held, LLM):
            raise InvalidRequestError(
                f"The variable {given.variable!r} holds no LLM: "
                f"{given.variable} = LLM('org/name'), or %%llm -m org/name."
            )
        llm = LLM(given.model or held.model_info.name)
        self._shell.user_ns[given.variable] = llm
        return llm


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Define %llm and %%llm."""
    shell.register_magic_function(ChatMagic(shell), "line_cell", "llm")
