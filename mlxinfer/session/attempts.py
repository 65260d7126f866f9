"""Attempts at an answer: one that breaks what masks cannot enforce is asked for again."""

from collections.abc import Sequence
from dataclasses import replace

from ..core import FinishReason, Request, later_seed
from ..errors import GrammarFailedError
from ..grammar.relaxed import Unenforced, problem_of
from ..outputs import Result

MAX_ATTEMPTS = 6
RETRY_TEMPERATURE = 0.5  # the least of another attempt, times the attempts before it
SEED_STEP = 1 << 32  # between two attempts


class Attempts:
    """The requests of an answer that is checked when it is complete.

    Attributes:
        ids: of all requests that may follow the first one.
    """

    def __init__(self, first: Request, unenforced: Sequence[Unenforced]) -> None:
        self._unenforced = unenforced
        self._grammar = None if first.grammar is None else first.grammar.fork()
        self.ids = [f"{first.id}+{number}" for number in range(1, MAX_ATTEMPTS)]
        self.num = 1

    def after(self, request: Request, result: Result) -> Request | None:
        """The next request, if the answer to this one breaks a schema; None: the answer is valid.

        An answer that was cut off is not checked. Each further attempt has a higher temperature:
        at 0 it would give the same answer.

        Raises:
            GrammarFailedError: MAX_ATTEMPTS answers broke the schema.
        """
        if result.finish_reason is not FinishReason.STOP:
            return None
        problem = problem_of(self._unenforced, result)
        if problem is None:
            return None
        if self.num == MAX_ATTEMPTS:
            place, what = problem
            raise GrammarFailedError(
                f"{place}: {MAX_ATTEMPTS} answers did not fit the schema; of the last one, {what}. "
                "Keywords that tokens cannot be held to are checked on the complete answer.",
                param=place,
            )
        params = request.params
        seed = None if params.seed is None else later_seed(params.seed, SEED_STEP)
        temperature = max(params.temperature, RETRY_TEMPERATURE * self.num)
        temperature = temperature if params.sampler is None else 0.0
        self.num += 1
        return replace(
            request,
            id=self.ids[self.num - 2],
            params=replace(params, temperature=temperature, seed=seed),
            grammar=None if self._grammar is None else self._grammar.fork(),
        )
