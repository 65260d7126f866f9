"""Inputs of models that pool: texts that become vectors, and pairs of texts that get scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..errors import InvalidRequestError, check_switch, shown

if TYPE_CHECKING:
    pass
from .inputs import PromptLike

Text = PromptLike  # of a model that pools


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """Texts that become vectors; the fields are the arguments of LLM.embed."""

    texts: Text | Sequence[Text]
    prompt_name: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: int | bool = False
    place: str = "input"  # the field that errors name

    def __post_init__(self) -> None:
        check_list("texts", self.texts)
        if self.normalize is not None:
            check_switch("normalize", self.normalize)

    @property
    def each(self) -> Sequence[Text]:
        texts: Any = self.texts
        is_ids = bool(texts) and all(type(item) is int for item in texts)
        return [texts] if isinstance(texts, str) or is_ids else texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """Pairs of texts to be scored; the fields are the arguments of LLM.score.

    Attributes:
        first, second: a text or several; one text goes with each of the other's.
        names: the fields of both, for errors about the number of texts.
    """

    first: str | Sequence[str]
    second: str | Sequence[str]
    instruction: str | None = None
    truncate: int | bool = False
    names: tuple[str, str] = ("a", "b")
    place: str = "documents"

    def __post_init__(self) -> None:
        check_list(self.names[0], self.first)
        check_list(self.names[1], self.second)
        one, two = _as_list(self.first), _as_list(self.second)
        if len(one) != len(two) and 1 not in (len(one), len(two)):
            raise InvalidRequestError(
                f"{self.names[0]} has {len(one)} texts and {self.names[1]} {len(two)}; expected "
                "one, or as many.",
                param=self.names[0],
            )

    @classmethod
    def of_query(
        cls, query: str, documents: Sequence[str], instruction: str | None, truncate: int | bool
    ) -> Self:
        if not isinstance(query, str):
            raise InvalidRequestError(f"query is {shown(query)}; expected a text.", param="query")
        if isinstance(documents, str):
            raise InvalidRequestError(
                "documents is a text; expected a list of them.", param="documents"
            )
        return cls(
            first=[query],
            second=documents,
            instruction=instruction,
            truncate=truncate,
            names=("query", "documents"),
        )

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        one, two = _as_list(self.first), _as_list(self.second)
        count = max(len(one), len(two))
        return (one * count if len(one) == 1 else one), (two * count if len(two) == 1 else two)


def check_list(name: str, given: object) -> None:
    """Raise InvalidRequestError unless this is a text, or a list that holds something."""
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidRequestError(
            f"{name} is {shown(given)}; expected a text, or a list with at least one.", param=name
        )


def _as_list(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
