"""The rows of a batch that one part of sampling changes, with their settings.

A part is a function from logits to logits, for all of its rows at once. `sampler.PARTS` lists them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .draw import stream_of

T = TypeVar("T")


class Memory(Protocol):
    """The tokens of one request as far as a part needs them."""

    def append(self, token_id: int) -> None:
        """Add the request's next token."""
        ...


class Slot:
    """One running request, as the sampler knows it.

    Args:
        params: its settings.
        prompt_ids: its prompt.
        output_ids: its answer so far.
        stop_ids: the tokens that end the answer.
        breakers: tokens over which no repetition reaches, for DRY.
    """

    __slots__ = ("breakers", "memories", "output_ids", "params", "prompt_ids", "stop_ids", "stream")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        self.params, self.stream = params, stream_of(params.seed)
        self.prompt_ids, self.output_ids = prompt_ids, output_ids
        self.stop_ids, self.breakers = stop_ids, breakers
        self.memories: dict[Part, Any] = {}  # of the parts that keep one

    def remember(self, parts: Sequence["Part"]) -> None:
        """Begin the memories of the parts that this request needs."""
        for part in parts:
            if part.memory is not None and part.concerns(self.params):
                self.memories[part] = part.memory(self)
        self.prompt_ids = self.output_ids = ()  # the memories have what is needed of them


class Turn(NamedTuple):
    """Which token each of R rows is to get."""

    counts: NDArray[np.int64]  # (R,) its index: how many tokens the answer has before it
    recent: mx.array | None  # (R, n) int32 newest tokens that no memory has yet, then -1

    def of(self, places: NDArray[np.int64], device_places: mx.array | None) -> "Turn":
        """The turn of the rows at these places; `device_places` None: of all rows, in order."""
        if device_places is None:
            return self
        recent = None if self.recent is None else self.recent[device_places]
        return Turn(self.counts[places], recent)


class Part(NamedTuple):
    """A part of sampling: one row in the table of parts.

    The newest tokens of a row may be known to the device alone, or be proposals: then `Turn.recent`
    has them. The logits must come out the same, bit for bit, whether a token is in the memory or
    among the recent ones, and whatever other rows are there.
    """

    change: Callable[[mx.array, "PartRows", Turn], mx.array]  # logits (P, width) -> (P, width)
    concerns: Callable[[SamplingParams], bool]  # whether a request needs it
    memory: Callable[[Slot], Memory] | None = None  # of a request's tokens
    fused: bool = False  # the sampling kernel does the same


@dataclass(slots=True)
class PartRows:
    """The P rows of a batch that one part changes; kept as long as the batch stays the same."""

    part: Part
    places: NDArray[np.int64]  # (P,) in the batch
    device_places: mx.array | None  # (P,) int32 the same; None: all rows, in order
    slots: list[Slot]  # (P,) one for each row
    spare: int  # a column that stands for no token; its logit is -inf
    _made: dict[object, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        part: Part, places: Sequence[int], slots: Sequence[Slot], spare: int
    ) -> "PartRows | None":
        """The rows at these places of a batch of `slots`; None: there are none."""
        if not places:
            return None
        array = np.array(places)
        device_places = None if len(places) == len(slots) else mx.array(array.astype(np.int32))
        return PartRows(part, array, device_places, [slots[place] for place in places], spare)

    def apply(self, logits: mx.array, turn: Turn) -> mx.array:
        """Logits (R, width) of the whole batch with these rows changed."""
        own = turn.of(self.places, self.device_places)
        if self.device_places is None:
            return self.part.change(logits, self, own)
        logits[self.device_places] = self.part.change(logits[self.device_places], self, own)
        return logits

    @property
    def memories(self) -> list[Any]:
        """(P,) what the part keeps of each request."""
        return [slot.memories[self.part] for slot in self.slots]

    def settings(self, name: str) -> list[Any]:
        """(P,) the setting of this name of each row."""
        return [getattr(slot.params, name) for slot in self.slots]

    def column(self, name: str) -> mx.array:
        """(P, 1) float32 the setting of this name of each row."""
        if name not in self._made:
            self._made[name] = mx.array(self.settings(name), mx.float32)[:, None]
        column: mx.array = self._made[name]
        return column

    def once(self, make: Callable[["PartRows"], T]) -> T:
        """The result of a function of these rows, which is called once for each plan."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made
