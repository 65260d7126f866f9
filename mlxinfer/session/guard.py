"""A guard of functions that a caller hands to steps: one that fails ends its own answer only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..core import FinishReason, LogitsProcessor, SamplingParams, TokenEvent, TokenSampler
from ..errors import RequestFailedError, shown


class Guard:
    """The functions of one answer, `logits_processors` and `sampler`.

    After the first failure none of them is called again.

    Attributes:
        error: why the answer fails; None: no function has failed.
    """

    def __init__(self) -> None:
        self.error: RequestFailedError | None = None

    def guarded(self, params: SamplingParams) -> SamplingParams:
        """The same parameters with functions that never raise an error."""
        processors = [
            self._processor(f"logits_processors[{number}]", function)
            for number, function in enumerate(params.logits_processors)
        ]
        sampler = None if params.sampler is None else self._sampler(params.sampler)
        return replace(params, logits_processors=tuple(processors), sampler=sampler)

    def watched(self, listener: Callable[[TokenEvent], None]) -> Callable[[TokenEvent], None]:
        def watch(event: TokenEvent) -> None:
            error = self.error
            if error is not None:
                event = TokenEvent.without_token(event.request_id, FinishReason.ERROR, error=error)
            listener(event)

        return watch

    def _processor(self, name: str, function: LogitsProcessor) -> LogitsProcessor:
        def process(tokens: Any, logits: Any) -> Any:
            return self._call(name, lambda: _like(logits, function(tokens, logits)), logits)

        return process

    def _sampler(self, function: TokenSampler) -> TokenSampler:
        def choose(logprobs: Any) -> Any:
            size = logprobs.shape[-1]
            return self._call("sampler", lambda: _token(function(logprobs), size), 0)

        return choose

    def _call(self, name: str, function: Callable[[], Any], otherwise: Any) -> Any:
        if self.error is not None:
            return otherwise
        try:
            return function()
        except Exception as error:  # the fault boundary of a caller's function: others go on
            self.error = RequestFailedError(f"{name} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
            return otherwise


def _like(logits: Any, changed: Any) -> Any:
    """The changed logits (1, vocab); raises TypeError for anything else."""
    if getattr(changed, "size", None) != logits.size or not isinstance(changed, type(logits)):
        expected = f"an array of MLX of the shape {logits.shape}"
        raise TypeError(f"it returned {shown(changed)}; expected {expected}")
    return changed


def _token(token: Any, size: int) -> int:
    """The token's id; raises ValueError unless it is one of the vocabulary."""
    number = np.array(token).item()
    if type(number) is not int or not 0 <= number < size:
        raise ValueError(f"it returned {shown(number)}; expected a token from 0 to {size - 1}")
    return number
