"""Parts of a request of `run` and `chat`: files, piped text, schemas, the switch of thinking."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import InvalidRequestError

MAX_FILE_BYTES = 16 << 20  # of an attached file: more than any context holds


def piped_text() -> str | None:
    """Return the text of a pipe or file on stdin, None if stdin is something else.

    Raises:
        click.UsageError: it is not UTF-8.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return None
    return read_stdin() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


def read_stdin() -> str:
    """All of stdin; raises click.UsageError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"What stdin holds is not UTF-8 ({error.reason}).") from error


def attached(path: Path) -> str:
    """The text of a file under its name, as part of a message.

    Raises:
        InvalidRequestError: it cannot be read, is not text, or is too large.
    """
    text = file_text(path)
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def file_text(path: Path) -> str:
    """The text of a file; raises InvalidRequestError where there is none."""
    if not path.is_file():
        what = "is no file" if path.exists() else "is not there"
        what = "is a folder" if path.is_dir() else what
        raise InvalidRequestError(f"{path} {what}; expected a file with text.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB.")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not text in UTF-8 ({error.reason}).") from error
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from error


def read_schema(given: str) -> dict[str, Any]:
    """The response_format of --schema: a file with a JSON schema, or the schema itself.

    Raises:
        click.UsageError: it is neither.
    """
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = file_text(Path(given).expanduser())
        except InvalidRequestError as error:
            raise click.BadParameter(str(error), param_hint="--schema") from error
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"It is no JSON: {error}.", param_hint="--schema") from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def thinking(llm: Any, wanted: bool | None) -> dict[str, Any]:
    """Options of a chat that switch the model's thinking on or off; None: as it is by itself.

    Raises:
        InvalidRequestError: the model's chat template has no such switch.
    """
    if wanted is None:
        return {}
    template = llm.tokenizer.template
    for name in ("enable_thinking", "thinking"):
        if template is not None and template.reads(name):
            return {"chat_template_kwargs": {name: wanted}}
    raise InvalidRequestError(
        f"{llm.model_info.name} has no switch for thinking: its chat template reads neither "
        "enable_thinking nor thinking."
    )
