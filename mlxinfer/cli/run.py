"""`mlxinfer run`: one prompt, one answer."""

import sys
from collections.abc import Iterator
from typing import Any

import click

from ..core import FinishReason, SamplingParams
from ..outputs import Delta, Result
from ._model import has_chat_template, open_llm
from ._options import (
    engine_options,
    json_option,
    llm_arguments,
    model_option,
    sampling_options,
    sampling_params,
)
from ._output import emit_json, note, printable, styled
from ._process import INTERRUPTED


@click.command()
@click.argument("prompt", required=False)
@model_option
@sampling_options
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without a chat template.")
@engine_options
@click.option("--stats", is_flag=True, help="Write counts and rates to stderr.")
@json_option
def command(prompt: str | None, model: str, **options: Any) -> None:
    """Answer PROMPT and exit.

    PROMPT is read from stdin where it is "-", or where it is left out and something is piped in.
    """
    params, arguments = sampling_params(options), llm_arguments(options)
    if options["raw"] and options["system"] is not None:
        raise click.UsageError("--system needs a chat template; it does not go with --raw.")
    text = read_prompt(prompt)
    with open_llm(model, **arguments) as llm:
        raw = options["raw"] or not has_chat_template(llm.model_info.path)
        if raw and options["system"] is not None:
            raise click.UsageError(f"--system needs a chat template, and {model} has none.")
        if raw and not options["raw"]:
            note(f"{model} has no chat template: it continues the prompt as plain text (--raw)")
        deltas = start(llm, text, options["system"], params, raw=raw)
        result, interrupted = show(deltas, quiet=options["as_json"])
    if options["as_json"]:
        emit_json({"model": model, **result.to_dict()})
    elif options["stats"] or (sys.stderr.isatty() and sys.stdout.isatty()):
        note(result.summary)
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    """The prompt, from the argument or from stdin.

    Raises:
        click.UsageError: there is none, or it is not text.
    """
    if prompt is not None and prompt != "-":
        if not prompt.strip():
            raise click.UsageError("PROMPT is empty.")
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('Missing PROMPT: mlxinfer run "…", or pipe one in.')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The prompt on stdin is not UTF-8 ({error.reason}).") from error
    if not text.strip():
        raise click.UsageError("The prompt on stdin is empty.")
    return text


def start(
    llm: Any, text: str, system: str | None, params: SamplingParams, *, raw: bool
) -> Iterator[Delta]:
    """Return the stream of the answer to the plain text, or to a conversation."""
    if raw:
        return iter(llm.stream(text, params))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return iter(llm.stream_chat(messages, params))


def show(deltas: Iterator[Delta], *, quiet: bool) -> tuple[Result, bool]:
    """Write the answer as it arrives. Returns its Result, and whether Ctrl-C ended it."""
    text, reasoning = "", ""
    ids: list[int] = []
    try:
        for delta in deltas:
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            ids += delta.token_ids
            if not quiet:
                _write(delta)
            if delta.result is not None:
                _end_line(text, quiet=quiet)
                return delta.result, False
    except KeyboardInterrupt:
        pass
    except Exception:
        if text:
            _end_line(text, quiet=quiet)  # what is said of the error begins a line
        raise
    _end_line(text, quiet=quiet)
    stopped = Result(
        text=text,
        reasoning=reasoning or None,
        token_ids=tuple(ids),
        finish_reason=FinishReason.ABORT,
    )
    return stopped, True


def _write(delta: Delta) -> None:
    """Write the answer to stdout; reasoning only to a terminal."""
    if not sys.stdout.isatty():
        sys.stdout.write(delta.text)
    else:
        sys.stdout.write(styled(printable(delta.reasoning), "2", sys.stdout))
        sys.stdout.write(printable(delta.text))
    sys.stdout.flush()


def _end_line(text: str, *, quiet: bool) -> None:
    if not quiet and not text.endswith("\n"):
        print(flush=True)
