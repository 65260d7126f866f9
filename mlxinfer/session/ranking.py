"""The server's names of pairs and ranks, until it has moved."""

from collections.abc import Sequence

from ..outputs import ranked as ranked
from .inputs import ScoreInput


def paired(
    first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str] = ("a", "b")
) -> tuple[list[str], list[str]]:
    """As many texts of both: one text goes with each of the other's."""
    return ScoreInput(first=first, second=second, names=names).pairs
