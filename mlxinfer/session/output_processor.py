"""The output of one request: token events in, deltas and a Result out. Knows no engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import FinishReason, Grammar, Request, TokenEvent, TokenLogprobs
from ..errors import GrammarFailedError
from ..grammar.relaxed import Unenforced, problem_of
from ..outputs import Delta, Part, Result, Timing, joined_calls, merged
from ..text import TextStream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ATTEMPTS = 6  # at an answer that is checked when it is complete
RETRY_TEMPERATURE = 0.5  # the least of another attempt, times the attempts before it
SEED_STEP = 1 << 32  # between two attempts


class OutputProcessor:
    """Turns the token events of one request into deltas, and keeps what the Result needs.

    The text decides here whether the answer has ended: a stop string, or the only tool call that is
    allowed, makes the finish reason STOP. All other reasons are the engine's. A reason that was set
    stays.

    Args:
        request: its events are pushed.
        new_stream: makes what decodes its tokens, from the first one on.
        unenforced: schemas that the complete answer is checked against; where it breaks one, the
            request is tried again.
        prompt_scores: takes the logits of the prompt; None: they are kept in `prompt_logits`.

    Attributes:
        result: of the whole answer, once it has ended.
        num_attempts: requests so far, the running one included.
        ended_early: the text ended the answer before the engine did: the request is to be aborted.
        prompt_logits: (n, vocab) float32 each, of the prompt's next n positions, where the request
            asks for them.
    """

    def __init__(
        self,
        request: Request,
        new_stream: Callable[[], TextStream],
        *,
        unenforced: Sequence[Unenforced] = (),
        prompt_scores: "PromptScores | None" = None,
    ) -> None:
        self.request = request
        self.prompt_scores = prompt_scores
        self.num_attempts = 1
        self._new_stream = new_stream
        self._first_id = request.id
        self._fresh_grammar: Grammar | None = None
        self._submitted_s = time.monotonic()
        self.constrain(request.grammar, unenforced)
        self._begin()

    def constrain(self, grammar: Grammar | None, unenforced: Sequence[Unenforced]) -> None:
        """Set the form of the answer, before the request is submitted."""
        self.request.grammar, self.unenforced = grammar, unenforced
        if grammar is not None and unenforced:
            self._fresh_grammar = grammar.fork()

    def _begin(self) -> None:
        """Reset to the beginning of an attempt: nothing of the answer has come."""
        self.prompt_logits: list[NDArray[np.float32]] = []
        self.ended_early = False
        self.result: Result | None = None
        self._stream = self._new_stream()
        self._token_ids: list[int] = []
        scored = self.request.params.logprobs is not None
        self._logprobs: list[TokenLogprobs] | None = [] if scored else None
        self._parts: list[Part] = []
        self._cached_tokens = 0
        self._first_token_s = 0.0

    def try_again(self) -> bool:
        """Make another request where the answer breaks a schema; False: the answer is valid.

        An answer that was cut off is not checked. Each further attempt is drawn at a
        higher temperature: at 0 it would be the same.

        Raises:
            GrammarFailedError: MAX_ATTEMPTS answers were none.
        """
        result = self.result
        if not self.unenforced or result is None or result.finish_reason is not FinishReason.STOP:
            return False
        problem = problem_of(self.unenforced, result)
        if problem is None:
            return False
        if self.num_attempts == MAX_ATTEMPTS:
            place, what = problem
            raise GrammarFailedError(
                f"{place}: {MAX_ATTEMPTS} answers did not fit the schema; of the last one, {what}. "
                "Keywords that tokens cannot be held to are checked on the complete answer.",
                param=place,
            )
        self.request = self._next_request()
        self.num_attempts += 1
        self._begin()
        return True

    def _next_request(self) -> Request:
        request, grammar = self.request, self._fresh_grammar
        params = request.params
        seed = None if params.seed is None else (params.seed + SEED_STEP + 2**63) % 2**64 - 2**63
        temperature = max(params.temperature, RETRY_TEMPERATURE * self.num_attempts)
        return replace(
            request,
            id=self.attempt_ids[self.num_attempts],
            params=replace(params, temperature=temperature, seed=seed),
            grammar=None if grammar is None else grammar.fork(),
        )

    @property
    def attempt_ids(self) -> tuple[str, ...]:
        """The ids of the request and of all attempts that may follow it."""
        first = self._first_id
        if not self.unenforced:
            return (first,)
        return (first, *(f"{first}+{number}" for number in range(1, MAX_ATTEMPTS)))

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stream.stop_match

    def push(self, event: TokenEvent) -> Delta:
        """Add one event; the delta of the last one carries the Result.

        Raises:
            RequestFailedError: the request failed.
        """
        if event.error is not None:
            raise event.error
        if event.prompt_logits is not None:
            self.prompt_logits.append(event.prompt_logits)
        new_ids: Sequence[int] = ()
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        if event.token_id is not None:
            new_ids = (event.token_id,)
            self._add_token(event, event.token_id)
        parts, reason = self._push_text(event)
        self._parts += parts
        if reason is not None:
            self.result = self._finish(reason, event.made_s)
        return Delta(parts=parts, token_ids=new_ids, result=self.result)

    def _push_text(self, event: TokenEvent) -> tuple[tuple[Part, ...], FinishReason | None]:
        """The new text, and why the answer has ended; None: it goes on."""
        parts: tuple[Part, ...] = ()
        reason = event.finish_reason
        if event.token_id is not None and reason is not FinishReason.STOP:  # an end token has none
            parts = self._stream.push([event.token_id])
        if reason is not None:
            parts = merged([*parts, *self._stream.finish()])
        if self._stream.stopped and reason is not FinishReason.ABORT:
            self.ended_early = reason is None
            reason = FinishReason.STOP
        return parts, reason

    def _add_token(self, event: TokenEvent, token_id: int) -> None:
        if not self._token_ids:
            self._first_token_s = event.made_s
        self._token_ids.append(token_id)
        if self._logprobs is not None and event.logprobs is not None:
            self._logprobs.append(event.logprobs)

    def _finish(self, reason: FinishReason, finished_s: float) -> Result:
        """The Result. Times are when the engine made the tokens, not when they were read."""
        first = self._first_token_s or finished_s
        whole = Delta(parts=self._parts)
        return Result(
            text=whole.text,
            reasoning=whole.reasoning or None,
            tool_calls=joined_calls(whole.tool_calls),
            num_attempts=self.num_attempts,
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
                drafted=self.request.num_drafted,
                accepted=self.request.num_accepted,
            ),
        )


class PromptScores:
    """Log-probabilities of a prompt's own tokens, from the logits of its positions in order.

    The first token has no score.

    Args:
        prompt_ids: the whole prompt.
        num_top: how many of the most probable tokens to name at each position.
    """

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        self._ids = prompt_ids
        self._num_top = num_top
        self._num_rows = 0
        self.scores: list[TokenLogprobs | None] = [None]

    def push(self, logits: "NDArray[np.float32]") -> None:
        """Score the tokens that follow the next n positions.

        Args:
            logits: (n, vocab).
        """
        import numpy as np

        targets = self._ids[self._num_rows + 1 : self._num_rows + 1 + len(logits)]
        self._num_rows += len(logits)
        for row, target in zip(logits, targets, strict=False):
            scores = row - row.max()  # (vocab,)
            scores -= np.log(np.exp(scores).sum())
            top = tuple((int(i), float(scores[i])) for i in _largest(scores, self._num_top))
            self.scores.append(TokenLogprobs(float(scores[target]), top))


def _largest(scores: "NDArray[np.float32]", count: int) -> "list[int]":
    """Indices of the largest, most probable first; of equal ones the lower index."""
    import numpy as np

    if count < 2:
        return [int(scores.argmax())] * count
    near = np.argpartition(-scores, min(count, len(scores) - 1))[:count]
    order: list[int] = near[np.lexsort((near, -scores[near]))].tolist()
    return order
