"""One answer as it grows: token events in, deltas of text and a Result out. Knows no engine."""

import time
from collections.abc import Sequence

from ..core import FinishReason, Request, TokenEvent, TokenLogprobs
from ..output_parts import CallCollector, merged
from ..text import TextDelta, TextStream
from .results import Delta, Result, Timing


class OutputProcessor:
    """Turns the events of one request into deltas, and keeps what the Result needs.

    `stopped` tells that a stop string or a tool call ended the answer: the request is to be
    aborted, and later events are ignored.
    """

    def __init__(self, request: Request, stream: TextStream) -> None:
        self.request = request
        self.stopped = False
        self.result: Result | None = None
        self._stream = stream
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = CallCollector()
        self._cached_tokens = 0
        self._submitted_s = time.monotonic()
        self._first_token_s = 0.0

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stream.stop_match

    def push(self, event: TokenEvent) -> Delta:
        """Take in one event; the last one's delta carries the Result.

        Raises:
            RequestFailedError: the request failed.
        """
        if event.error is not None:
            raise event.error
        new_ids: Sequence[int] = ()
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        if event.token_id is not None:
            new_ids = (event.token_id,)
            self._take(event, event.token_id)
        delta = self._push_text(event)
        reason = FinishReason.STOP if self._stream.stopped else event.finish_reason
        if reason is not None:
            self.stopped = self._stream.stopped and event.finish_reason is None
            delta = TextDelta(merged((*delta.parts, *self._stream.finish().parts)))
            if self._stream.stopped and reason is FinishReason.LENGTH:  # in what was held back
                reason = FinishReason.STOP
        self._keep(delta)
        if reason is not None:
            self.result = self._finish(reason, event.made_s)
        return Delta(
            text=delta.text,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            parts=delta.parts,
            token_ids=new_ids,
            result=self.result,
        )

    def _keep(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._calls.push(piece)

    def _take(self, event: TokenEvent, token_id: int) -> None:
        if not self._token_ids:
            self._first_token_s = event.made_s
        self._token_ids.append(token_id)
        if self._logprobs is not None and event.logprobs is not None:
            self._logprobs.append(event.logprobs)

    def _push_text(self, event: TokenEvent) -> TextDelta:
        """The new text; the token that ended the answer is not part of it."""
        ended = event.finish_reason is FinishReason.STOP
        if event.token_id is None or ended:
            return TextDelta()
        return self._stream.push([event.token_id])

    def _finish(self, reason: FinishReason, finished_s: float) -> Result:
        """Times are the engine's: a caller who reads slowly, or late, changes none."""
        first = self._first_token_s or finished_s
        return Result(
            text="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls.calls),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self._cached_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            timing=Timing.measure(
                submitted_s=self.request.arrived_s or self._submitted_s,
                started_s=self.request.started_s or first,
                first_token_s=first,
                finished_s=finished_s,
                computed_tokens=len(self.request.prompt_ids) - self._cached_tokens,
                answer_tokens=len(self._token_ids),
            ),
        )
