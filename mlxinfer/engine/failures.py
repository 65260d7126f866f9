"""How a request is told that it failed: the last event, and an error that says what to do."""

import traceback

from ..core import FinishReason, TokenEvent
from ..errors import GrammarFailedError, RequestFailedError
from .sequence import Sequence


def failed(sequence: Sequence, error: BaseException) -> TokenEvent:
    """A step of it, or what it took to plan one, ended with an error."""
    failure = RequestFailedError(
        f"A step of this request failed after {sequence.num_answered} tokens: "
        f"{type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return _last_event(sequence, failure)


def without_numbers(sequence: Sequence) -> TokenEvent:
    """What was sampled from its logits would mean nothing."""
    failure = RequestFailedError(
        f"The model's logits are NaN or infinite after {sequence.num_known} tokens. Its weights "
        "may be damaged: download it again; or numbers outgrew float16: try dtype='float32'."
    )
    return _last_event(sequence, failure)


def stuck_in_grammar(sequence: Sequence, problem: str) -> TokenEvent:
    """Its grammar allows no token."""
    grammar = sequence.request.grammar
    failure = GrammarFailedError(
        f"The grammar of this request cannot go on after {sequence.num_answered} tokens: {problem}",
        param=grammar.place if grammar is not None else None,
    )
    return _last_event(sequence, failure)


def let_go(error: BaseException) -> None:
    """Whoever keeps the error of a step, as a log may, keeps its lines and not its arrays."""
    traceback.clear_frames(error.__traceback__)


def _last_event(sequence: Sequence, failure: RequestFailedError) -> TokenEvent:
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)
