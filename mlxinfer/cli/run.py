"""`mlxinfer run`: one prompt, one answer."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..core import EFFORTS, FinishReason, SamplingParams
from ..errors import InvalidRequestError
from ..outputs import Delta, Result
from ..progress import Watch
from ._markdown import WaitingLine, until_first_word
from ._model import fetch
from ._open import ADAPTER, default_model, open_llm
from ._options import (
    GroupedCommand,
    effort_option,
    json_option,
    llm_arguments,
    model_option,
    one_request_options,
    sampling_options,
    sampling_values,
    system_option,
    think_option,
)
from ._output import counted, emit_json, note
from ._pictures import check_sees, check_videos, read_pictures, with_its_images
from ._process import INTERRUPTED, end_at_next_interrupt
from ._ranks import follow_if_asked
from .history import ChatLog, open_run_log

if TYPE_CHECKING:
    from ._markdown import AnswerStream, PlainStream

SEEING_DEMO = "demo-vision"  # answers where a picture is given and no model
MAX_FILE_BYTES = 16 << 20  # of an attached file: more than any context holds


@click.command(cls=GroupedCommand)
@click.argument("prompt", required=False)
@model_option
@sampling_options
@system_option
@click.option(
    "-f",
    "--file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Text file to send along; repeatable.",
)
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    help='Picture to send along, "-" from a pipe; repeatable.',
)
@click.option(
    "--video", "videos", metavar="FILE", multiple=True, help="Video to send along; repeatable."
)
@click.option("--schema", metavar="FILE|JSON", help="JSON schema of the answer.")
@think_option
@effort_option
@click.option(
    "--show-thinking/--hide-thinking",
    default=None,
    help="Write the model's thoughts; in a pipe they go to stderr.  [default: on a terminal]",
)
@click.option(
    "-c", "--continue", "continued", flag_value="last", help="Go on with the last conversation."
)
@click.option("--history/--no-history", default=True, help="Keep the last answer, for --continue.")
@click.option(
    "--raw",
    is_flag=True,
    help="Continue the text of PROMPT, without a chat template and the model's own sampling: by "
    "the most probable tokens, 512 at most.",
)
@one_request_options
@click.option("--stats", is_flag=True, help="Write counts and rates to stderr.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, prompt: str | None, model: str, **options: Any) -> None:
    """Answer PROMPT and exit.

    If PROMPT is missing or "-", it is read from stdin. Otherwise text that is piped in is sent
    along, and so is each --file. With --image and without --model, demo-vision answers.
    """
    values, arguments = sampling_values(options), llm_arguments(options)
    check_usage(options)
    opening = {name: arguments[name] for name in ("mmproj", "dtype") if name in arguments}
    follow_if_asked(options, [model], lambda: fetch(model, **opening))
    images = read_pictures(options["images"], prompt)
    check_videos(options["videos"])
    text = read_prompt(prompt, options["files"], pipes="-" not in options["images"])
    form = None if options["schema"] is None else read_schema(options["schema"])
    log = None
    if options["continued"] is not None or (options["history"] and not options["raw"]):
        log = open_run_log(options["continued"], keep=options["history"])
    if ctx.get_parameter_source("model") is ParameterSource.DEFAULT:
        default = default_model(SEEING_DEMO if images else model, local=options["local"])
        model = log.model if log is not None and log.model else default
    opened = open_llm(model, adapter=options["adapter"], local=options["local"], **arguments)
    from rich.console import Console

    with opened as llm:
        try:
            line = WaitingLine(Console(stderr=True))
            deltas = start(llm, text, images, values, form, log, model, options, line.read)
            with until_first_word(line, deltas) as watched:
                result, interrupted = show(watched, options)
        except InvalidRequestError as error:
            raise about_schema(error, options["schema"]) from error
    if log is not None:
        log.add("user", text, model=model, system=options["system"], images=images)
        log.add("assistant", result.text, result.reasoning or "", model=model, system=None)
        log.close()
    if options["as_json"]:
        emit_json({"model": model, **result.to_dict()})
    elif options["stats"] or (sys.stderr.isatty() and sys.stdout.isatty()):
        note(f"{result.summary} · {params_of(llm, values, options).words}")
    if not options["as_json"]:
        limit = params_of(llm, values, options).max_tokens
        explain_end(result, limit, limited="max_tokens" in values)
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


def check_usage(options: dict[str, Any]) -> None:
    if not options["raw"]:
        return
    flags = {"system": "--system", "think": "--think", "continued": "--continue"}
    flags |= {"reasoning_effort": "--reasoning-effort"}
    flags |= {"images": "--image", "videos": "--video"}
    for name, flag in flags.items():
        if options[name] not in (None, False, ()):
            raise click.UsageError(f"{flag} needs a chat template; it does not go with --raw.")


def read_prompt(prompt: str | None, files: tuple[Path, ...], *, pipes: bool = True) -> str:
    """The prompt of the argument, of stdin (where it `pipes`), and of files, in this order."""
    if prompt is not None and prompt != "-" and not prompt.strip():
        raise click.UsageError("PROMPT is empty.")
    if prompt is None and not files and sys.stdin.isatty():
        raise click.UsageError('Missing PROMPT: mlxinfer run "…", or pipe one in.')
    if prompt == "-" or (prompt is None and not files):
        prompt, piped = None, read_stdin()
        if not piped.strip():
            raise click.UsageError("The prompt on stdin is empty.")
    else:
        piped = (piped_text() or "") if pipes else ""
    parts = [prompt or "", piped if piped.strip() else "", *map(attached, files)]
    return "\n\n".join([part for part in parts if part])


def start(
    llm: Any,
    text: str,
    images: list[bytes],
    values: dict[str, Any],
    form: dict[str, Any] | None,
    log: ChatLog | None,
    model: str,
    options: dict[str, Any],
    watch: Watch,
) -> Iterator[Delta]:
    """Return the stream of the answer to the plain text, or to a conversation."""
    raw, params = is_raw(llm, options), params_of(llm, values, options)
    if raw and not options["raw"]:
        if options["system"] is not None:
            raise click.UsageError(f"--system needs a chat template, and {model} has none.")
        for flag, given in (("--image", images), ("--video", options["videos"])):
            if given:
                raise click.UsageError(f"{flag} needs a chat template, and {model} has none.")
        note(f"{model} has no chat template: it continues the prompt as plain text (--raw)")
    extra: dict[str, Any] = {"prompt_progress_callback": watch}
    if form is not None:
        extra["response_format"] = form
    if options["adapter"] is not None:
        extra["adapter"] = ADAPTER
    if raw:
        return iter(llm.stream(text, params, **extra))
    system = options["system"] or (log.system if log is not None else None)
    messages = [{"role": "system", "content": system}] if system is not None else []
    if log is not None:
        messages += map(with_its_images, log.messages(sees=llm.model_info.sees))
    messages.append({"role": "user", "content": text})
    extra |= thinking(llm, wish_of(options))
    if images or options["videos"]:
        check_sees(llm)
        extra |= {"images": images, "videos": options["videos"]}
    return iter(llm.stream_chat(messages, params, **extra))


def is_raw(llm: Any, options: dict[str, Any]) -> bool:
    """Whether the answer continues the prompt as plain text."""
    return options["raw"] or not llm.model_info.chats


def params_of(llm: Any, values: dict[str, Any], options: dict[str, Any]) -> SamplingParams:
    """How tokens are chosen; a plain text has no values of the model."""
    default = SamplingParams() if is_raw(llm, options) else llm.chat_params
    params: SamplingParams = default.changed(values)
    return params


def show(deltas: Iterator[Delta], options: dict[str, Any]) -> tuple[Result, bool]:
    """Write the answer as it arrives. Returns its Result, and whether Ctrl-C ended it."""
    shown = stream_for(options)
    text, reasoning = "", ""
    ids: list[int] = []
    try:
        for delta in deltas:
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            ids += delta.token_ids
            if shown is not None:
                shown.feed(delta)
            if delta.result is not None:
                return delta.result, False
    except KeyboardInterrupt:
        pass
    finally:
        if shown is not None:
            shown.finish()  # what is said of an error begins a line
    end_at_next_interrupt()  # within the end of a model it would be a traceback
    stopped = Result(
        text=text,
        reasoning=reasoning or None,
        token_ids=tuple(ids),
        finish_reason=FinishReason.ABORT,
    )
    return stopped, True


def explain_end(result: Result, most: int | None, *, limited: bool) -> None:
    """Say on stderr that an answer is not whole: in a pipe nothing else shows it.

    Args:
        most: tokens that it was to have; None: as many as the context holds.
        limited: --max-tokens says so; then only an empty one is explained.
    """
    empty = not result.text.strip()
    if empty and result.reasoning and result.finish_reason is FinishReason.STOP:
        note("the answer ended inside of a thought; --show-thinking shows it")
    if result.finish_reason is not FinishReason.LENGTH or (limited and not empty):
        return
    what = "cut off while it was thinking" if empty and result.reasoning else "cut off"
    limit = "--max-tokens allows" if limited else "the context holds"
    if not limited and most == len(result.token_ids):
        limit = "without --max-tokens a plain text gets"
    note(f"{what} after {counted(len(result.token_ids), 'token')} (length): {limit} no more")


def stream_for(options: dict[str, Any]) -> "AnswerStream | PlainStream | None":
    """Markdown on a terminal, plain text elsewhere and with --raw, nothing with --json."""
    from ._markdown import AnswerStream, PlainStream

    if options["as_json"]:
        return None
    if not sys.stdout.isatty():
        return PlainStream(sys.stdout, sys.stderr if options["show_thinking"] else None)
    thoughts = options["show_thinking"] is not False
    if options["raw"]:
        return PlainStream(sys.stdout, sys.stdout if thoughts else None)
    from rich.console import Console

    return AnswerStream(Console(), thoughts=thoughts)


# -- parts of a request, also of `chat` -----------------------------------------------------------


def piped_text() -> str | None:
    """Return the text of a pipe or file on stdin, None if stdin is something else."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return None
    return read_stdin() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The text on stdin is not UTF-8 ({error.reason}).") from error


def attached(path: Path) -> str:
    """The text of a file under its name, as part of a message."""
    text = file_text(path)
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def file_text(path: Path) -> str:
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
    """The response_format of --schema: a file with a JSON schema, or the schema itself."""
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = file_text(Path(given).expanduser())
        except InvalidRequestError as error:
            raise click.BadParameter(str(error), param_hint="--schema") from error
    try:
        schema = json.loads(text)
    except ValueError as error:
        where = "It" if text is given else given
        raise click.BadParameter(f"{where} is no JSON: {error}.", param_hint="--schema") from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def about_schema(error: InvalidRequestError, given: str | None) -> Exception:
    """The error itself, or one that names --schema and its file in place of a request's field."""
    param = error.param or ""
    if given is None or not param.startswith("response_format"):
        return error
    where = "The schema" if given.lstrip().startswith("{") else given
    said = str(error).replace(f"{param}:", f"{where}:").replace(param, where)
    return click.BadParameter(said, param_hint="--schema")


def wish_of(options: dict[str, Any]) -> str | None:
    """How much a model shall think: "on", "off" or a level; None: as it does by itself."""
    wish: str | None = options["reasoning_effort"]
    return wish or {None: None, True: "on", False: "off"}[options["think"]]


def thinking(llm: Any, wish: str | None) -> dict[str, Any]:
    """Options of a chat for a wish of `wish_of`."""
    if wish is None:
        return {}
    levels: tuple[str, ...] = llm.model_info.thinking
    if wish in ("on", "off") and "off" in levels:
        return {"chat_template_kwargs": {"enable_thinking": wish == "on"}}
    if wish in EFFORTS and not {*EFFORTS}.isdisjoint(levels):
        return {"reasoning_effort": wish}
    raise InvalidRequestError(
        f"{llm.model_info.name} has no {'switch' if wish in ('on', 'off') else 'levels'} for "
        f"thinking: its chat template takes {', '.join(levels) or 'none'}."
    )
