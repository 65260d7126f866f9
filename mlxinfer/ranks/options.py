"""How many ranks, and where. Pure Python."""

from dataclasses import dataclass
from pathlib import Path

from ..core import check_count, check_switch
from ..errors import InvalidRequestError
from .hosts import Place, launched, read_hosts

MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options of a model that is spread over ranks. Checked when built.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    ranks: int = 1
    hostfile: Path | None = None  # where they are; None: on this machine, or as a launcher says
    rank: int | None = None  # in the host file; None: the one with this machine's address
    rank_deadline: float = 60.0  # seconds that a step may take
    pipeline: bool = False  # ranks have some of the layers each, not a part of every layer

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks, 1)
        if self.ranks > MAX_RANKS:
            raise InvalidRequestError(
                f"ranks is {self.ranks}; expected {MAX_RANKS} at most.", param="ranks"
            )
        if self.rank is not None and self.hostfile is None:
            raise InvalidRequestError("rank goes with hostfile.", param="rank")
        check_switch("pipeline", self.pipeline)
        if self.pipeline and self.is_alone:
            raise InvalidRequestError(
                "pipeline divides the layers among ranks, and there is one; say how many with "
                "ranks, or hostfile.",
                param="pipeline",
            )
        if not self.rank_deadline > 0:
            raise InvalidRequestError(
                f"rank_deadline is {self.rank_deadline}; expected seconds above 0.",
                param="rank_deadline",
            )

    @property
    def is_alone(self) -> bool:
        """There are no other ranks."""
        return self.ranks == 1 and self.hostfile is None and launched() is None

    @property
    def elsewhere(self) -> Place | None:
        """This process among ranks that others start too; None: it is alone, or starts them.

        Raises:
            InvalidRequestError: as of `read_hosts`, or there are not as many as were asked for.
        """
        if self.hostfile is not None:
            place = read_hosts(self.hostfile, self.rank)
        elif (found := launched()) is not None:
            place = found
        else:
            return None
        if self.ranks not in (1, place.size):
            raise InvalidRequestError(
                f"ranks is {self.ranks}, and there are {place.size} hosts or processes; leave "
                "ranks out.",
                param="ranks",
            )
        return place
