"""`%llm` and `%%llm` of notebooks, after `%load_ext mlxinfer`: a question is a line or a cell."""

import ast
import shlex
from typing import Any

from .errors import InvalidRequestError
from .llm import LLM

VARIABLE = "llm"  # of the notebook: the model that answers
CONTINUE, MODEL = ("-c", "--continue"), ("-m", "--model")
USAGE = "expected `%%llm`, then any of -m MODEL, -c, and arguments of chat such as temperature=0."


class Magics:
    """The magics of one notebook, and its conversation.

    Args:
        variables: of the notebook.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._messages: list[dict[str, Any]] = []

    def ask(self, line: str, cell: str | None = None) -> None:
        """Ask the text of the cell, or without one that of the line.

        The variable `llm` of the notebook answers. `-m MODEL` loads another one into it; where
        there is none, the demo is loaded. `-c` goes on with the last conversation. The answer is
        shown as by `llm.show`, and its Result is in `llm.last`.

        Raises:
            InvalidRequestError: an argument of the line is none of these.
        """
        model, goes_on, options = (None, False, {}) if cell is None else _arguments_of(line)
        if model is not None:
            self._load(model)
        if not goes_on:
            self._messages = []
        self._show((line if cell is None else cell).strip(), options)

    def _load(self, model: str) -> LLM:
        llm = self._variables[VARIABLE] = LLM(model)
        return llm

    def _show(self, text: str, options: dict[str, Any]) -> None:
        given = self._variables.get(VARIABLE)
        llm = given if given is not None else self._load("demo")
        if not isinstance(llm, LLM):
            raise InvalidRequestError(f"The variable {VARIABLE} is no LLM; give -m MODEL.")
        messages = [*self._messages, {"role": "user", "content": text}]
        llm.show(messages, **options)
        answer = "" if llm.last is None else llm.last.text
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _arguments_of(line: str) -> tuple[str | None, bool, dict[str, Any]]:
    """The model, whether the conversation goes on, and arguments of `chat`, of a magic's line."""
    model, goes_on, options = None, False, dict[str, Any]()
    words = iter(shlex.split(line))
    for word in words:
        name, is_given, value = word.partition("=")
        if word in MODEL:
            model = next(words, None)
            if model is None:
                raise InvalidRequestError(f"{word} has no model; {USAGE}")
        elif word in CONTINUE:
            goes_on = True
        elif is_given and name.isidentifier():
            try:
                options[name] = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                options[name] = value
        else:
            raise InvalidRequestError(f"{word} is no argument of %%llm; {USAGE}")
    return model, goes_on, options
