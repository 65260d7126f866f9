"""`%llm` and `%%llm` of notebooks, after `%load_ext mlxinfer`: a question is a line or a cell."""

import ast
import shlex
from dataclasses import dataclass, field
from typing import Any

from .cli._open import default_model, open_llm
from .errors import InvalidRequestError
from .llm import LLM

VARIABLE = "llm"  # of the notebook: the model that answers
CONTINUE, MODEL, LOCAL = ("-c", "--continue"), ("-m", "--model"), "--local"
USAGE = (
    "expected `%%llm`, then any of -m MODEL, --local, -c, and arguments of chat such as "
    "temperature=0."
)


class Magics:
    """The magics of one notebook, and its conversation."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._messages: list[dict[str, Any]] = []

    def ask(self, line: str, cell: str | None = None) -> None:
        """Ask the text of the cell, or without one that of the line.

        The variable `llm` of the notebook answers. `-m MODEL` puts another one into it; where
        there is none, it is the demo. A running server that has the model answers, unless there is
        `--local`. `-c` goes on with the last conversation. The answer is shown as by `llm.show`,
        and its Result is in `llm.last`.

        Raises:
            InvalidRequestError: an argument of the line is none of these.
        """
        given = Arguments() if cell is None else _arguments_of(line)
        if given.model is not None or self._variables.get(VARIABLE) is None:
            self._open(given.model or default_model("demo", local=given.local), local=given.local)
        if not given.goes_on:
            self._messages = []
        self._show((line if cell is None else cell).strip(), given.options)

    def _open(self, model: str, *, local: bool) -> None:
        self._variables[VARIABLE] = open_llm(model, local=local)

    def _show(self, text: str, options: dict[str, Any]) -> None:
        llm = self._variables[VARIABLE]
        if not isinstance(llm, LLM):
            raise InvalidRequestError(f"The variable {VARIABLE} is no LLM; give -m MODEL.")
        messages = [*self._messages, {"role": "user", "content": text}]
        llm.show(messages, **options)
        answer = "" if llm.last is None else llm.last.text
        self._messages = [*messages, {"role": "assistant", "content": answer}]


@dataclass(slots=True)
class Arguments:
    """The line of a `%%llm`."""

    model: str | None = None  # that is opened
    local: bool = False  # it is loaded in this process
    goes_on: bool = False  # with the last conversation
    options: dict[str, Any] = field(default_factory=dict)  # of `chat`


def _arguments_of(line: str) -> Arguments:
    given = Arguments()
    words = iter(shlex.split(line))
    for word in words:
        name, is_given, value = word.partition("=")
        if word in MODEL:
            given.model = next(words, None)
            if given.model is None:
                raise InvalidRequestError(f"{word} has no model; {USAGE}")
        elif word in CONTINUE:
            given.goes_on = True
        elif word == LOCAL:
            given.local = True
        elif is_given and name.isidentifier():
            try:
                given.options[name] = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                given.options[name] = value
        else:
            raise InvalidRequestError(f"{word} is no argument of %%llm; {USAGE}")
    return given
