"""The options of speculation, checked when built."""

from dataclasses import dataclass
from pathlib import Path

from ..core import MAX_COUNT
from ..errors import InvalidRequestError, check_int, wrong_value
from ..models.jsonfields import read_json

METHODS = ("auto", "off", "ngram", "draft", "mtp", "eagle", "dflash")
WITH_DRAFT = ("draft", "eagle", "dflash")  # methods that need a checkpoint beside the model's
ACCEPTANCES = ("exact", "rejection")
MAX_PROPOSALS = 7  # of a sequence in one step, beside its newest token


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Which sources propose tokens, how many, and which proposals are accepted.

    Args:
        method: "auto" (a draft where one is given, and n-grams), "off", "ngram", "draft" (a small
            model), "mtp" (the head that the checkpoint brings), "eagle" (an EAGLE-3 head) or
            "dflash" (a block draft).
        draft: folder of the draft; None: there is none.
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
        _check_choice("speculate", self.method, METHODS)
        _check_choice("acceptance", self.acceptance, ACCEPTANCES)
        check_int("max_draft", self.max_draft, low=0, high=MAX_COUNT)
        if self.max_draft > MAX_PROPOSALS + 1:
            raise InvalidRequestError(
                f"max_draft is {self.max_draft}; a step verifies {MAX_PROPOSALS + 1} tokens of a "
                "request at most.",
                param="max_draft",
            )
        if self.method in WITH_DRAFT and self.draft is None:
            raise InvalidRequestError(
                f"speculate={self.method!r} needs a draft: give draft='folder or org/name'.",
                param="draft",
            )
        if self.draft is not None and self.method not in ("auto", *WITH_DRAFT):
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
        return self.method == "off" or not self.max_draft


def kind_of(folder: Path) -> str:
    """The kind of a draft's checkpoint: "draft" (a model), "eagle" or "dflash"."""
    config = read_json(folder / "config.json")
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    block = "dflash_config" in config or config.get("model_type") == "muse_glimmer_assistant"
    if block or "dflash" in architecture.lower():
        return "dflash"
    if "eagle3" in architecture.lower() or config.get("speculators_model_type") == "eagle3":
        return "eagle"
    return "draft"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise wrong_value(name, value, listed)
