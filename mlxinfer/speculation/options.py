"""The options of speculation, checked when built."""

from dataclasses import dataclass
from pathlib import Path

from ..core import check_count
from ..errors import InvalidRequestError, shown

METHODS = ("auto", "off", "ngram", "draft")
LATER = ("mtp", "eagle", "dflash")  # methods that other engines have
ACCEPTANCES = ("exact", "rejection")
MAX_PROPOSALS = 7  # of a sequence in one step, beside its newest token


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """What proposes tokens, how many, and which proposals are accepted.

    Args:
        method: "auto" (a draft model where one is given, and n-grams), "off", "ngram" or "draft".
        draft: folder of the draft model; None: there is none.
        max_draft: tokens proposed for a request in one step, at most; 0: none. A step verifies 8
            tokens of a request, the newest one included, so 8 means 7.
        acceptance: "exact": the tokens of the plain run; "rejection": tokens of its distribution,
            with more proposals accepted where tokens are drawn.
        fixed: propose as many as there are, worth it or not: for measurements.

    Raises:
        InvalidRequestError: a value out of range, or values that do not go together.
    """

    method: str = "auto"
    draft: Path | None = None
    max_draft: int = 8
    acceptance: str = "exact"
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.method in LATER:
            raise InvalidRequestError(
                f"speculate is {self.method!r}, which is not supported yet; use 'auto', 'ngram', "
                "or 'draft' with a draft model.",
                param="speculate",
            )
        _check_choice("speculate", self.method, METHODS)
        _check_choice("acceptance", self.acceptance, ACCEPTANCES)
        check_count("max_draft", self.max_draft, 0)
        if self.max_draft > MAX_PROPOSALS + 1:
            raise InvalidRequestError(
                f"max_draft is {self.max_draft}; a step verifies {MAX_PROPOSALS + 1} tokens of a "
                "request at most.",
                param="max_draft",
            )
        if self.method == "draft" and self.draft is None:
            raise InvalidRequestError(
                "speculate='draft' needs a draft model: give draft='folder or org/name'.",
                param="draft",
            )
        if self.draft is not None and self.method in ("off", "ngram"):
            raise InvalidRequestError(
                f"draft names a model, and speculate is {self.method!r}, which uses none; leave "
                "one of them out.",
                param="draft",
            )

    @property
    def depth(self) -> int:
        """Proposals of a request in one step, at most."""
        return min(self.max_draft, MAX_PROPOSALS)

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever proposed."""
        return self.method == "off" or not self.max_draft


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InvalidRequestError(f"{name} is {shown(value)}; expected {listed}.", param=name)
