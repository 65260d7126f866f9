"""An answer in a notebook or terminal as it comes, and the probabilities of its tokens."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from ..progress import in_notebook

if TYPE_CHECKING:
    from ..outputs import Delta, Result

FRAME_S = 0.1  # between two drawings of a card


def show(deltas: "Iterator[Delta]", thumbnails: Sequence[str] = ()) -> "Result | None":
    """Show an answer as it comes and return its Result; None: the stream ended without one.

    Args:
        thumbnails: of the question's pictures; a notebook shows them above the answer.
    """
    return _show_card(deltas, thumbnails) if in_notebook() else _write(deltas)


def thumbnails_of(sources: Sequence[Any]) -> tuple[str, ...]:
    """Pictures as small data: URLs. Raises PictureError: a picture cannot be read."""
    from ..images import thumbnail_url
    from .cards import PICTURE_SIDE

    return tuple([thumbnail_url(source, PICTURE_SIDE) for source in sources])


def _write(deltas: "Iterator[Delta]") -> "Result | None":
    """Text on stdout; reasoning too, dim, where that is a terminal."""
    result, tty = None, sys.stdout.isatty()
    for delta in deltas:
        result = delta.result or result
        if delta.reasoning and tty:
            sys.stdout.write(f"\x1b[2m{delta.reasoning}\x1b[0m")
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    print(flush=True)
    return result


def _show_card(deltas: "Iterator[Delta]", thumbnails: Sequence[str]) -> "Result | None":
    from IPython.core.display_functions import display

    from ..core import FinishReason
    from ..outputs import Result

    ids: list[int] = []
    text, reasoning, result, drawn_s = "", "", None, 0.0
    if thumbnails:  # once: the card is drawn ten times a second
        display(Pictures(thumbnails))
    handle: Any = display(_Card(), display_id=True)
    try:
        for delta in deltas:
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            ids += delta.token_ids
            result = delta.result or result
            if time.monotonic() - drawn_s > FRAME_S and result is None:
                handle.update(_Card(text, reasoning))
                drawn_s = time.monotonic()
    finally:  # Ctrl-C too: what came is what is shown
        stopped = Result(
            text=text, reasoning=reasoning, token_ids=ids, finish_reason=FinishReason.ABORT
        )
        handle.update(result or stopped)
    return result and replace(result, thumbnails=thumbnails)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures, small and beside each other in a notebook."""

    urls: Sequence[str]

    def __repr__(self) -> str:
        return f"{len(self.urls)} picture{'s' * (len(self.urls) != 1)}"

    def _repr_html_(self) -> str:
        from .cards import pictures_row

        return pictures_row(self.urls)


@dataclass(frozen=True, slots=True)
class _Card:
    text: str = ""
    reasoning: str = ""

    def _repr_html_(self) -> str:
        from .cards import answer_card

        return answer_card(self.text, reasoning=self.reasoning, running=True)


@dataclass(frozen=True, slots=True)
class Heat:
    """Tokens with their log-probability and the most probable ones in their place."""

    tokens: Sequence[tuple[str, float, Sequence[tuple[str, float]]]]

    @classmethod
    def of(
        cls, result: "Result", token_bytes: Callable[[int], bytes], ends: Collection[int] = ()
    ) -> "Heat":
        """The heat of an answer; tokens of `ends` are left out.

        Raises:
            InvalidRequestError: it has no log-probabilities.
        """
        if result.logprobs is None:
            raise InvalidRequestError(
                "This answer has no log-probabilities: ask for them, with logprobs=3."
            )

        def text(token_id: int) -> str:
            return token_bytes(token_id).decode(errors="replace")

        return cls(
            [
                (text(token), scores.logprob, [(text(i), logprob) for i, logprob in scores.top])
                for token, scores in zip(result.token_ids, result.logprobs, strict=False)
                if token not in ends
            ]
        )

    def __repr__(self) -> str:
        return "\n".join(f"{exp(logprob):8.2%}  {text!r}" for text, logprob, _ in self.tokens)

    def _repr_html_(self) -> str:
        from .cards import heat_card

        return heat_card(self.tokens)
