"""Follows the requests of one call for the metrics: waiting, running, ended. Knows no text."""

import time
from collections.abc import Sequence

from ...core import Request, TokenEvent
from ...results import Result
from .tally import Tally


class Meter:
    """Tells a tally what happens to some requests, each of which ends exactly once."""

    def __init__(self, tally: Tally, requests: Sequence[Request]) -> None:
        self._tally = tally
        self._requests = requests
        self._heard_s: list[float | None] = [None] * len(requests)  # of the last token
        self._num_tokens = [0] * len(requests)
        self._open: set[int] = set()

    def begin(self) -> None:
        """They are handed to the engine."""
        self._open.update(range(len(self._requests)))
        self._tally.num_waiting += len(self._requests)

    def refuse(self, *, full: bool = False) -> None:
        """They are not, or not all: nothing has happened. `full`: the queue was."""
        if full:
            self._tally.num_rejected += 1
        self._tally.num_waiting -= len(self._open)
        self._open.clear()

    def hear(self, index: int, event: TokenEvent) -> None:
        """A step has said something of a request."""
        if event.token_id is None:
            return
        tally, now_s, before_s = self._tally, time.monotonic(), self._heard_s[index]
        self._heard_s[index] = now_s
        self._num_tokens[index] += 1
        tally.generation_tokens += 1
        if before_s is not None:
            tally.inter_token_s.observe(now_s - before_s)
            return
        request = self._requests[index]
        tally.num_waiting -= 1
        tally.num_running += 1
        tally.prompt_tokens += len(request.prompt_ids)
        tally.cached_tokens += event.cached_tokens
        tally.first_token_s.observe(now_s - request.arrived_s)

    def end(self, index: int, reason: str, result: Result | None = None) -> None:
        """A request has ended; its result, where it was answered."""
        if index not in self._open:
            return
        self._open.discard(index)
        if self._heard_s[index] is None:
            self._tally.num_waiting -= 1
        else:
            self._tally.num_running -= 1
        self._tally.finish(reason, result)
        max_tokens = self._requests[index].params.max_tokens
        if max_tokens is not None:
            self._tally.max_tokens.observe(max_tokens)
        if not self._open:
            self._tally.choices.observe(len(self._requests))
            self._tally.longest_tokens.observe(max(self._num_tokens))

    def close(self) -> None:
        """Those that have not ended were given up."""
        for index in list(self._open):
            self.end(index, "abort")
