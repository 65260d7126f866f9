"""The answers of a call, counted in the queue and in the metrics: each is ended once."""

import logging
import time
from collections.abc import Callable

from ..core import Request, TokenEvent
from ..outputs import Result
from ..session.answers import Answer, Answers
from .metrics import KeyMetrics, RequestMetrics
from .reuse import Record, ReuseRecords

log = logging.getLogger("mlxinfer.server")


class AnswerMetrics:
    """Counts what becomes of answers; it watches them (`session.answers.AnswerWatcher`).

    Args:
        note_reuse: keeps a record of what the first prompt reused, if its engine says that.
        leave_queue: is called with the index of an answer that waits for no first token any more.

    Attributes:
        reuse: the record of the first prompt, once that is computed.
    """

    def __init__(
        self,
        answers: Answers,
        metrics: tuple[RequestMetrics, KeyMetrics],
        note_reuse: Callable[[Request], Record | None],
        records: ReuseRecords,
        leave_queue: Callable[[int], None],
    ) -> None:
        self.reuse: Record | None = None
        self._answers = answers
        self._metrics, self._of_key = metrics
        self._note, self._records, self._leave_queue = note_reuse, records, leave_queue
        self._open = set(range(len(answers.answers)))  # those that have not ended
        self._token_s: dict[int, float] = {}  # answers -> when the last token came
        self._counted: set[int] = set()  # identities of prompts: choices share their prompt's list
        self._metrics.num_waiting += len(self._open)
        self._of_key.num_waiting += len(self._open)

    def record(self, index: int, event: TokenEvent) -> None:
        if event.prompt_tokens:
            return
        if event.token_id is None:
            self._leave_queue(index)
            return
        metrics, now_s, before_s = self._metrics, time.monotonic(), self._token_s.get(index)
        self._token_s[index] = now_s
        metrics.generation_tokens += 1
        if before_s is not None:
            metrics.observe(inter_token_s=now_s - before_s)
            return
        self._leave_queue(index)
        request = self._answer(index).request
        metrics.num_waiting -= 1
        metrics.num_running += 1
        self._of_key.num_waiting -= 1
        self._of_key.num_running += 1
        self._of_key.num_first += 1
        self._of_key.waited_s += now_s - request.arrived_s
        if id(request.prompt_ids) not in self._counted:
            self._counted.add(id(request.prompt_ids))
            metrics.prompt_tokens += len(request.prompt_ids)
            metrics.cached_tokens += event.cached_tokens
        metrics.observe(first_token_s=now_s - request.arrived_s)
        if index == 0 and not request.from_peer:
            self._note_reuse(request)

    def _note_reuse(self, request: Request) -> None:
        """Remember where the reuse of a prompt ended; the log gets none of its text."""
        self.reuse = self._note(request)
        if self.reuse is not None:
            names = ("model", "prompt_tokens", "cached_tokens", "tiers", "cause", "position")
            fields = {name: self.reuse.shown[name] for name in names}
            log.debug("prompt reuse", extra={"request_id": self.reuse.request_id, **fields})

    def end(self, index: int, reason: str, result: Result | None) -> None:
        if index not in self._open:
            return
        self._open.discard(index)
        if index in self._token_s:
            self._metrics.num_running -= 1
            self._of_key.num_running -= 1
        else:
            self._metrics.num_waiting -= 1
            self._of_key.num_waiting -= 1
        self._metrics.finish(reason, result)
        if index == 0 and self.reuse is not None and result is not None:
            owner = self._answer(index).request.owner
            self._records.answered(owner, self.reuse, result.token_ids)
        max_tokens = self._answer(index).request.params.max_tokens
        if max_tokens is not None:
            self._metrics.observe(max_tokens=max_tokens)
        if not self._open:
            longest = max(len(answer.token_ids) for answer in self._answers.answers)
            self._metrics.observe(choices=len(self._answers.answers), longest_tokens=longest)

    def close(self) -> None:
        """Count the answers that have not ended as aborted, and leave the queue."""
        for index in range(len(self._answers.answers)):
            self.end(index, "abort", None)
            self._leave_queue(index)

    def _answer(self, index: int) -> Answer:
        return self._answers.answers[index]
