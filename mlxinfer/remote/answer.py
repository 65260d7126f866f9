"""Events of a server's stream to deltas and a Result, and its errors to exceptions."""

import json
from collections.abc import Iterator
from typing import Any

from .. import errors
from ..core import FinishReason, TokenLogprobs
from ..errors import ServerError
from ..outputs import (
    CallStatus,
    Delta,
    Part,
    PromptProgress,
    ReasoningPart,
    Result,
    TextPart,
    Timing,
    ToolCallDelta,
    joined_calls,
)
from ..session.answers import AnswerStep

_CLASSES = {  # by code; of several with one code the first
    error.code: error
    for error in reversed(vars(errors).values())
    if isinstance(error, type) and issubclass(error, errors.MlxinferError)
}


class RemoteAnswer:
    """The answer to one request, event by event. The last step has the Result."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._rest = b""  # of a line whose end has not come
        self._parts: list[Part] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason: str | None = None
        self._timings: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}

    def push(self, data: bytes) -> Iterator[AnswerStep]:
        """Add bytes of the stream; yield the steps of the lines that end in them.

        Raises:
            MlxinferError: the server reports that the request failed.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")  # JSON has other ends as they are
        for line in lines:
            mark, _, said = line.partition(b"data: ")
            if not mark and said.startswith(b"{") and (step := self._read(said)) is not None:
                yield step

    def _read(self, said: bytes) -> AnswerStep | None:
        """Read an event; None: it adds nothing."""
        event = json.loads(said)
        if "error" in event:
            raise error_of(event["error"], None)
        if progress := event.get("prompt_progress"):
            return AnswerStep(self._index, Delta(), progress=_progress(progress))
        self._usage = event.get("usage") or self._usage
        parts: list[Part] = []
        ids: list[int] = []
        for choice in event.get("choices", ()):
            ids += choice.get("token_ids") or ()
            self._logprobs += [TokenLogprobs(logprob, ()) for logprob in _logprobs(choice)]
            parts += _parts(choice)
            self._reason = choice.get("finish_reason") or self._reason
            self._timings = choice.get("timings") or self._timings
        self._parts += parts
        self._ids += ids
        if not (parts or ids):
            return None
        return AnswerStep(self._index, Delta(parts=parts, token_ids=ids))

    def finish(self) -> AnswerStep:
        """The last step. Raises ServerError: the stream ended before the answer had."""
        if self._reason is None:
            raise ServerError("The server broke off within the answer.")
        ends = self._ends_of_calls()
        whole = Delta(parts=[*self._parts, *ends])
        details = self._usage.get("prompt_tokens_details") or {}
        length = self._reason == "length"
        result = Result(
            text=whole.text,
            reasoning=whole.reasoning or None,
            tool_calls=joined_calls(whole.tool_calls),
            token_ids=tuple(self._ids),
            logprobs=self._logprobs or None,
            finish_reason=FinishReason.LENGTH if length else FinishReason.STOP,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens", 0),
            timing=_timing(self._timings),
        )
        return AnswerStep(self._index, Delta(parts=ends, result=result))

    def _ends_of_calls(self) -> list[ToolCallDelta]:
        arguments: dict[int, str] = {}
        for part in self._parts:
            if isinstance(part, ToolCallDelta):
                arguments[part.index] = arguments.get(part.index, "") + part.arguments
        return [
            ToolCallDelta(index=index, status=CallStatus.DONE if _is_json(text) else CallStatus.CUT)
            for index, text in arguments.items()
        ]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def error_of(said: Any, status: int | None) -> errors.MlxinferError:
    fields = said if isinstance(said, dict) else {}
    message = str(fields.get("message") or said)
    if status == 401:
        message += " Set MLXINFER_API_KEY, or give api_key=."
    kind = _CLASSES.get(str(fields.get("code")), ServerError)
    error = kind(message)
    error.param = fields.get("param")
    if isinstance(error, ServerError):
        error.refused = status
    return error


def _parts(choice: dict[str, Any]) -> list[Part]:
    """The parts of one event; those of a plain completion are its text."""
    delta = choice.get("delta", choice)
    parts: list[Part] = []
    if reasoning := delta.get("reasoning_content"):
        parts.append(ReasoningPart(reasoning))
    if text := delta.get("content") or delta.get("text"):
        parts.append(TextPart(text))
    for piece in delta.get("tool_calls") or ():
        function = piece.get("function") or {}
        parts.append(
            ToolCallDelta(
                index=piece["index"],
                id=piece.get("id"),
                name=function.get("name"),
                arguments=function.get("arguments") or "",
            )
        )
    return parts


def _logprobs(choice: dict[str, Any]) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    of_chat = [entry["logprob"] for entry in logprobs.get("content") or ()]
    return of_chat + (logprobs.get("token_logprobs") or [])


def _progress(given: dict[str, Any]) -> PromptProgress:
    return PromptProgress(
        computed=given["processed"],
        cached=given["cache"],
        total=given["total"],
        seconds=given["time_ms"] / 1e3,
    )


def _timing(given: dict[str, Any]) -> Timing:
    queued_s, prefill_s, decode_s = (
        (given.get(name) or 0.0) / 1e3 for name in ("queued_ms", "prompt_ms", "predicted_ms")
    )
    return Timing(
        queued_s=queued_s,
        prefill_s=prefill_s,
        time_to_first_token_s=queued_s + prefill_s,
        decode_s=decode_s,
        total_s=queued_s + prefill_s + decode_s,
        prompt_tokens_per_s=given.get("prompt_per_second"),
        tokens_per_s=given.get("predicted_per_second"),
    )
