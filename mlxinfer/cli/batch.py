"""`mlxinfer batch`: the requests of a file, answered into another."""

import asyncio
import codecs
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import msgspec

from ..config.file import ConfigFile
from ..errors import InvalidRequestError, MlxinferError
from ..files import open_lines
from ..memory import MODELS_SHARE
from ..progress import progress_bar
from ._configuration import requested_models
from ._options import Size, adapters_option, engine_options, models_option
from ._output import counted, note
from .serve import registry

if TYPE_CHECKING:
    from ..server.app import App
    from ..server.http import Message
    from ..server.service import ServerState

AT_ONCE = 128  # twice the sequences of a step: the next ones are ready when some end
RETRY_S = 1.0  # between two tries of a request whose model finds no room beside the others
NO_ROOM = b'"code":"overloaded"'  # in a 503 that another try may change
SHOWN_PROBLEMS = 5
START = b'{"id":"'  # of every line of answers
URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses",
    "/v1/embeddings", "/v1/rerank", "/v1/score",
)  # fmt: skip
_FILE = click.Path(dir_okay=False, path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("input_path", metavar="IN.jsonl", type=_INPUT)
@click.argument("output_path", metavar="OUT.jsonl", type=_FILE)
@click.option(
    "--errors",
    "errors_path",
    type=_FILE,
    help="File for requests that failed.  [default: OUT.errors.jsonl]",
)
@models_option
@adapters_option
@click.option(
    "--max-memory",
    type=Size(),
    help=f"Weights and KV caches of all loaded models.  [default: {MODELS_SHARE} of the machine's]",
)
@click.option(
    "--tool-format",
    default="auto",
    metavar="NAME",
    help="How the models write tool calls, where their chat templates do not show it.",
)
@engine_options(without=["max_memory"])
def command(
    input_path: Path,
    output_path: Path,
    errors_path: Path | None,
    models: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer the requests of a file in bulk.

    Each line is a request in the format of OpenAI's batches: {"custom_id": ..., "method": "POST",
    "url": "/v1/chat/completions", "body": ...}. The url may also be /v1/completions,
    /v1/responses, /v1/embeddings, /v1/rerank or /v1/score. If there is one model, it answers
    requests for any name. After an interruption, run the same command again: it skips requests that
    have an answer, and tries those again that failed.
    """
    from ..server.config import ServerConfig
    from ..server.service import ServerState

    if not input_path.is_file():
        raise click.UsageError(f"{input_path} is no file; it is read twice, so write it to one.")
    total = check_lines(input_path)
    requested = requested_models(models, ConfigFile(), by_default=False)
    default = requested[0].name if len(requested) == 1 else None
    given = {**options, "ttl": None, "default_model": default, "aliases": ()}
    errors_path = errors_path or output_path.with_suffix(".errors.jsonl")
    answers = AnswerFiles(output_path, errors_path)
    service = ServerState(registry(requested, given), ServerConfig(max_waiting_tokens=1 << 40))
    try:
        with progress_bar("batch", unit="answers") as show:
            left = (line for line in lines_of(input_path) if line.custom_id not in answers.done)
            asyncio.run(
                _answer_all(service, default, left, answers, lambda: show(len(answers.done), total))
            )
    except (KeyboardInterrupt, OSError):  # Ctrl-C, or a full disk
        note(f"interrupted; {len(answers.done)} of {total} are done, the same command goes on")
        raise
    finally:
        answers.close()
        service.close()
    answered = len(answers.done) - answers.num_failed
    note(f"{counted(answered, 'answer')} in {output_path}")
    if answers.num_failed:
        raise MlxinferError(
            f"{counted(answers.num_failed, 'request')} failed; {errors_path} says why, by line."
        )


# -- the requests -------------------------------------------------------------------------------


class Line(msgspec.Struct, kw_only=True):
    """A line of the input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


def lines_of(path: Path) -> Iterator[Line]:
    for _, line in _numbered(path):
        yield msgspec.json.decode(line, type=Line)


def check_lines(path: Path) -> int:
    """How many requests a file holds; raises InvalidRequestError that names its wrong lines."""
    known: set[str] = set()
    problems: list[str] = []
    for number, raw in _numbered(path):
        problem = _problem(raw, known)
        if problem is not None:
            problems.append(f"line {number}: {problem}")
        if len(problems) == SHOWN_PROBLEMS:
            break
    if not known and not problems:
        problems.append("The file has no requests.")
    if problems:
        raise InvalidRequestError(f"{path}: " + "\n".join(problems))
    return len(known)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold text, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, text


def _problem(raw: bytes, known: set[str]) -> str | None:
    """The reason why a line is no request; `known` gets its id."""
    try:
        raw.decode()
        line = msgspec.json.decode(raw, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"The line is no request of a batch: {error}."
    if not line.custom_id or line.custom_id in known:
        return f"The custom_id is {line.custom_id!r}; give each line its own."
    known.add(line.custom_id)
    if line.method != "POST":
        return f"method is {line.method!r}; expected 'POST'."
    if line.url not in URLS:
        return f"url is {line.url[:100]!r}; expected {' or '.join(URLS)}."
    with suppress(msgspec.ValidationError):  # the answer says what is wrong with such a body
        if msgspec.json.decode(line.body, type=_Streamed).stream:
            return "stream: an answer is one line, so it cannot be streamed; leave it out."
    return None


# -- the answers --------------------------------------------------------------------------------


class BatchReply(msgspec.Struct, kw_only=True):
    """The HTTP answer to a request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, kw_only=True):
    """A line of the output or of the errors."""

    id: str
    custom_id: str
    response: BatchReply
    error: None = None


class AnswerFiles:
    """A file of the answers, and one of the requests that failed in this run.

    The first is the record of all runs. Each line is flushed when it is complete.

    Args:
        output: where answers are added; those that are there stay.
        errors: the same for failed requests. Those of the last run go, since they are tried again.

    Attributes:
        done: the ids of the requests that have an answer, or failed in this run.

    Raises:
        InvalidRequestError: both are one file, or `open_lines` refuses one.
        OSError: one cannot be written.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        if output.resolve() == errors.resolve():
            raise InvalidRequestError(
                f"Answers and errors would both go to {output}; name two files.", param="errors"
            )
        self.done: set[str] = set()
        self.num_failed = 0
        self._errors_path = errors
        self._errors: BinaryIO | None = None
        self._output = open_lines(output, START, lambda line: self.done.add(_id_of(line)))
        try:
            if errors.exists():
                self._open_errors()
        except BaseException:  # such as Ctrl-C: no file stays locked
            self._output.close()
            raise

    def _open_errors(self) -> BinaryIO:
        self._errors = open_lines(self._errors_path, START, _id_of)
        self._errors.truncate(0)
        return self._errors

    def write(self, answer: BatchAnswer) -> None:
        file = self._output
        if answer.response.status_code != 200:
            self.num_failed += 1
            file = self._errors or self._open_errors()
        file.write(msgspec.json.encode(answer) + b"\n")
        file.flush()
        self.done.add(answer.custom_id)

    def close(self) -> None:
        for file in (self._output, self._errors):
            if file is not None:
                with file:
                    file.flush()
                    os.fsync(file.fileno())


def _id_of(line: bytes) -> str:
    return str(json.loads(line)["custom_id"])


# -- the run ------------------------------------------------------------------------------------


async def _answer_all(
    service: "ServerState",
    model: str | None,
    lines: Iterable[Line],
    answers: AnswerFiles,
    on_done: Callable[[], None],
) -> None:
    """Answer all requests, AT_ONCE of them at a time, through the routes of a server.

    Args:
        model: loaded first, so that a fault of it is raised at once; None: there are several.
    """
    from ..server.app import App

    if model is not None:
        await service.models.load(model)
    app, left = App(service), iter(lines)

    async def answer_each() -> None:
        for line in left:
            answers.write(await _answered(app, line))
            on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(answer_each())
    except ExceptionGroup as errors:  # such as a full disk: all have one cause
        raise errors.exceptions[0] from None


async def _answered(app: "App", line: Line) -> BatchAnswer:
    """The answer to a request; tried again while its model finds no room beside the others."""
    while True:
        reply = await _post(app, line)
        if reply.status_code != 503 or NO_ROOM not in bytes(reply.body):
            return BatchAnswer(
                id=f"batch_req_{secrets.token_hex(12)}", custom_id=line.custom_id, response=reply
            )
        await asyncio.sleep(RETRY_S)


async def _post(app: "App", line: Line) -> BatchReply:
    from ..server.protocol import ABORT, CONNECTIONS

    body = iter([{"type": "http.request", "body": bytes(line.body), "more_body": False}])
    replies: list[Message] = []

    async def receive() -> "Message":
        for message in body:
            return message
        return await asyncio.get_running_loop().create_future()  # this client does not hang up

    async def send(message: "Message") -> None:
        replies.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "state": {ABORT: lambda: None, CONNECTIONS: ()},
    }
    await app(scope, receive, send)
    start, *parts = replies
    return BatchReply(
        status_code=start["status"],
        request_id=dict(start["headers"])[b"x-request-id"].decode(),
        body=msgspec.Raw(b"".join(part.get("body", b"") for part in parts)),
    )
