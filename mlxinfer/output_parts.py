"""The parts of an answer, in the order in which they come: text, reasoning, tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class CallStatus(StrEnum):
    """How far a tool call has come."""

    OPEN = "open"  # more of its arguments follow
    DONE = "done"  # its arguments are one JSON object
    CUT = "cut"  # the answer ended within its arguments, which are the beginning of an object
    BROKEN = "broken"  # it is no JSON: all of it follows as text, as it was written


@dataclass(frozen=True, slots=True)
class TextPart:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning of the model, before or between its visible text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call.

    The first piece brings `id` and `name`, the last one a `status` other than OPEN. The `arguments`
    of all pieces joined are the JSON text of one object, or its beginning if the call is CUT; they
    are void if it is BROKEN.
    """

    index: int  # of the call within the answer, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    status: CallStatus = CallStatus.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: str  # a JSON object, as text
    complete: bool = True  # False: the answer ended within `arguments`


Part = TextPart | ReasoningPart | ToolCallDelta


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the same parts with neighbours of one kind, or of one call, joined."""
    runs: list[list[Part]] = []
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart) and not part.text:
            continue
        if runs and _together(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple(_joined(run) for run in runs)


def _together(one: Part, two: Part) -> bool:
    if isinstance(one, ToolCallDelta) and isinstance(two, ToolCallDelta):
        return one.index == two.index
    return type(one) is type(two)


def _joined(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, ToolCallDelta):
        pieces = [part for part in run if isinstance(part, ToolCallDelta)]
        return ToolCallDelta(
            index=first.index,
            id=first.id,
            name=first.name,
            arguments="".join(piece.arguments for piece in pieces),
            status=pieces[-1].status,
        )
    texts = (part.text for part in run if isinstance(part, TextPart | ReasoningPart))
    return type(first)("".join(texts))
