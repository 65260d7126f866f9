"""The queue of a server: how much may wait, and counts of requests on their way through it."""

import time
from collections.abc import Sequence

from ..core import TokenEvent
from ..errors import OverloadedError
from ..outputs import Result
from ..session.answers import Answer
from .metrics import RequestMetrics

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
SMOOTHING = 0.2  # weight of the newest interval between two first tokens


class Admission:
    """A bound on waiting requests and on the tokens of their prompts.

    A request waits from the time it is handed to the engine until its first token. The engine
    itself would queue without end.

    Args:
        max_waiting: requests without a token.
        max_waiting_tokens: of their prompts together; a single longer one is let in when nothing
            else waits.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._interval_s = 1.0  # between two requests that leave the queue, smoothed
        self._left_s = 0.0  # when the last one left

    def enter(self, num_requests: int, num_tokens: int) -> None:
        """Count requests in.

        Raises:
            OverloadedError: the queue is full; the error says when to try again.
        """
        tokens = self.num_waiting_tokens + num_tokens
        full = self.num_waiting + num_requests > self._max_waiting or tokens > self._max_tokens
        if full and self.num_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests with {self.num_waiting_tokens} prompt tokens wait "
                "already; try again later.",
                retry_after_s=self.retry_after_s,
            )
        if not self.num_waiting:
            self._left_s = time.monotonic()
        self.num_waiting += num_requests
        self.num_waiting_tokens = tokens

    def leave(self, num_tokens: int) -> None:
        """Count one request out: it has a token, or it ended."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= num_tokens
        assert self.num_waiting >= 0
        assert self.num_waiting_tokens >= 0
        now = time.monotonic()
        self._interval_s += SMOOTHING * (now - self._left_s - self._interval_s)
        self._left_s = now

    @property
    def retry_after_s(self) -> float:
        """Seconds after which about a quarter of the queue should have gone."""
        return min(max(self._interval_s * self.num_waiting / 4, MIN_RETRY_S), MAX_RETRY_S)


class Meter:
    """Counts the answers of one call: in the queue, and in their model's metrics.

    It watches the answers (`session.answers.AnswerWatcher`). Every answer is ended exactly once, by
    `end` or by `close`.

    Args:
        metrics: of the model.
        admission: where the answers queue.
        answers: not begun yet.

    Raises:
        OverloadedError: the queue is full.
    """

    def __init__(
        self, metrics: RequestMetrics, admission: Admission, answers: Sequence[Answer]
    ) -> None:
        self._metrics, self._admission, self._answers = metrics, admission, answers
        self._num_prompt = [len(answer.request.prompt_ids) for answer in answers]
        self._last_token_s: list[float | None] = [None] * len(answers)
        self._counted_prompts: set[int] = set()  # identities: choices share their prompt's list
        try:
            admission.enter(len(answers), sum(self._num_prompt))
        except OverloadedError:
            metrics.num_rejected += 1
            raise
        self._open = set(range(len(answers)))
        self._queued = set(self._open)  # answers without a token
        self._accepted = False
        metrics.num_waiting += len(answers)

    @property
    def num_queued(self) -> int:
        """Answers without a token: queued, or with a prompt that is still read."""
        return len(self._queued)

    def accept(self) -> None:
        """The engine has taken the requests; before that, `close` takes the count back."""
        self._accepted = True

    def record(self, index: int, event: TokenEvent) -> None:
        """Count the token of an event, if it has one."""
        if event.prompt_tokens:
            return
        self._leave_queue(index)
        if event.token_id is None:
            return
        metrics, now_s, before_s = self._metrics, time.monotonic(), self._last_token_s[index]
        self._last_token_s[index] = now_s
        metrics.generation_tokens += 1
        if before_s is not None:
            metrics.seen["inter_token_s"].observe(now_s - before_s)
            return
        request = self._answers[index].request
        metrics.num_waiting -= 1
        metrics.num_running += 1
        if id(request.prompt_ids) not in self._counted_prompts:
            self._counted_prompts.add(id(request.prompt_ids))
            metrics.prompt_tokens += len(request.prompt_ids)
            metrics.cached_tokens += event.cached_tokens
        metrics.observe(first_token_s=now_s - request.arrived_s)

    def end(self, index: int, reason: str, result: Result | None) -> None:
        """Count the end of an answer, with its result where it is complete."""
        if index not in self._open:
            return
        self._open.discard(index)
        if self._last_token_s[index] is None:
            self._metrics.num_waiting -= 1
        else:
            self._metrics.num_running -= 1
        self._metrics.finish(reason, result)
        max_tokens = self._answers[index].request.params.max_tokens
        if max_tokens is not None:
            self._metrics.observe(max_tokens=max_tokens)
        if not self._open:
            longest = max(answer.num_tokens for answer in self._answers)
            self._metrics.observe(choices=len(self._answers), longest_tokens=longest)

    def close(self) -> None:
        """Count the answers that have not ended as aborted, and leave the queue."""
        if not self._accepted:
            self._metrics.num_waiting -= len(self._open)
            self._open.clear()
        for index in list(self._open):
            self.end(index, "abort", None)
        for index in list(self._queued):
            self._leave_queue(index)

    def _leave_queue(self, index: int) -> None:
        if index in self._queued:
            self._queued.discard(index)
            self._admission.leave(self._num_prompt[index])
