"""Pairs of texts, the similarity of vectors, and documents in the order of their scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError, shown
from ..outputs import Ranked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]


def paired(
    first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str] = ("a", "b")
) -> tuple[list[str], list[str]]:
    """As many texts of both: one text goes with each of the other's.

    Raises:
        InvalidRequestError: different numbers of them, or none.
    """
    for name, given in zip(names, (first, second), strict=True):
        check_list(name, given)
    one, two = ([each] if isinstance(each, str) else list(each) for each in (first, second))
    if len(one) != len(two) and 1 not in (len(one), len(two)):
        raise InvalidRequestError(
            f"{names[0]} has {len(one)} texts and {names[1]} {len(two)}; expected one, or as many.",
            param=names[0],
        )
    count = max(len(one), len(two))
    return (one * count if len(one) == 1 else one), (two * count if len(two) == 1 else two)


def check_list(name: str, given: object) -> None:
    """Raise InvalidRequestError unless this is a text, or a list that holds something."""
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidRequestError(
            f"{name} is {shown(given)}; expected a text, or a list with at least one.", param=name
        )


def ranked(documents: Sequence[str], scores: "Vectors", top_n: int | None = None) -> list[Ranked]:
    """Documents with the highest scores first; equal ones as they were given."""
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError(
            f"top_n is {shown(top_n)}; expected a number of documents.", param="top_n"
        )
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    return [Ranked(i, float(scores[i]), documents[i]) for i in order[:top_n]]


def similarity(name: str, one: "Vectors", other: "Vectors") -> "Vectors":
    """(N,) of vectors (N, d): the larger, the closer; as sentence-transformers has it."""
    import numpy as np

    if name == "cosine":
        one, other = unit(one), unit(other)
    if name in ("cosine", "dot"):
        return (one * other).sum(axis=1)
    apart = one - other
    if name == "euclidean":
        return -np.sqrt(np.square(apart).sum(axis=1))
    return -np.abs(apart).sum(axis=1)


def places(texts: Sequence[str]) -> dict[str, int]:
    """Each text, and its place among those that differ."""
    return {text: i for i, text in enumerate(dict.fromkeys(texts))}


def unit(vectors: "Vectors") -> "Vectors":
    """Vectors (N, d) brought to length 1."""
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = vectors / np.maximum(lengths, 1e-12)
    return unit
