"""The last events of requests: an answer's end, and what to say where one failed."""

from ..core import FinishReason, TokenEvent
from ..errors import GrammarFailedError, RanksFailedError, RequestFailedError
from .batch import Sequence


def last_events(
    sequence: Sequence, token: TokenEvent, end: FinishReason | BaseException
) -> list[TokenEvent]:
    """The events of a sequence that ends with this token."""
    if isinstance(end, BaseException):
        return [token, failed_event(sequence, end)]
    if end is FinishReason.STOP and token.token_id not in sequence.request.stop_ids:
        # The grammar is finished: this token is text, and an event of its own ends it.
        return [token, TokenEvent.without_token(token.request_id, end)]
    return [token._replace(finish_reason=end)]


def failed_event(sequence: Sequence, error: BaseException) -> TokenEvent:
    """The last event of a request of which a step, or the planning of one, raised an error."""
    if isinstance(error, RanksFailedError):
        return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=error)
    failure = RequestFailedError(
        f"A step of this request failed after {sequence.num_answered} tokens: "
        f"{type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)


def not_finite_event(sequence: Sequence) -> TokenEvent:
    """The last event of a request whose logits are NaN or infinite."""
    failure = RequestFailedError(
        f"The model's logits are NaN or infinite after {sequence.num_known} tokens. Its weights "
        "may be damaged: download it again; or numbers outgrew float16: try dtype='float32'."
    )
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)


def stuck_in_grammar(sequence: Sequence, problem: str) -> TokenEvent:
    """The last event of a request whose grammar allows no token."""
    grammar = sequence.request.grammar
    failure = GrammarFailedError(
        f"The grammar of this request cannot go on after {sequence.num_answered} tokens: {problem}",
        param=grammar.place if grammar is not None else None,
    )
    return TokenEvent.without_token(sequence.request.id, FinishReason.ERROR, error=failure)
