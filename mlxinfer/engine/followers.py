"""The other ranks of a model, as its engine sees them: these are the ways to none. No MLX.

`ranks` has the ways to others. So an engine runs the same code whether a model is spread or not.
"""

from collections.abc import Collection, Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cache.inputs import CacheWork, Ints, PageTransfer, StepMetadata

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from ..config import EngineConfig
    from ..layers.ranks import Link
    from ..models.adapters.folder import AdapterFolder


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step: its tokens, where they belong, and the work on the cache before it."""

    metadata: StepMetadata
    follows: bool  # its ids are the tokens of the step before, in order: the next two are None
    known_ids: Ints | None  # (T,) ids that the host knows
    pending: Ints | None  # (T,) place among the tokens of the step before, -1: known; None: all are
    work: CacheWork
    num_slots: int  # tails that must be there
    new_slots: list[int]  # that have a new owner
    is_barrier: bool  # the step before must have ended
    rows: Ints | None  # (R,) flat rows that need logits; None: of all, in order
    num_rows: int  # R; 0: the step samples nothing
    prompt_rows: list[tuple[int, int]]  # [from, to) of other rows that need logits
    rope_variants: Ints | None = None  # (T,) see `Model`; None: 0 for all
    adapters: Ints | None = None  # (T,) the same
    feature_rows: Ints | None = None  # (N,) rows with features of pictures; None: there are none
    num_deep: int = 0  # the first layers: after each, more of the features is added


class FollowerDisks:
    """The disks of the other ranks of a model, each with its part of every page. Here: no others.

    Attributes:
        form: how the model is divided among them, as text: pages of another division are of no use.
    """

    form = ""

    def open(self, folder: str, namespace: bytes, max_bytes: int) -> None:
        """Let the other ranks open a folder of this path."""

    def begin_fetch(self, places: Seq[tuple[int, bytes]]) -> None:
        """Let the other ranks read (group, key), for the step that comes next."""

    def end_fetch(self) -> list[int]:
        """Places whose entry a rank lacks or found broken, in order."""
        return []

    def begin_save(self, spills: Seq[PageTransfer], timeout_s: float) -> None:
        """Let the other ranks store pages, and wait for the writes."""

    def end_save(self, timeout_s: float) -> bool:
        """Wait for `begin_save`; whether every rank has written its part."""
        return True


class FollowerAdapters:
    """The adapters on the other ranks, which load their parts. This base has no other ranks."""

    def check(self, number: int, adapter: "AdapterFolder") -> Generator[float, None, int]:
        """Let the other ranks read an adapter; the most bytes on one rank. Raises CheckpointError.

        Yields seconds until the next look for their answers.
        """
        yield from ()
        return 0

    def begin_piece(self, number: int) -> None:
        """Let the other ranks load the next piece of the adapter."""

    def end_piece(self, number: int, adapter: "AdapterFolder") -> bool:
        """Wait until they have; whether that was all. Raises CheckpointError."""
        return True

    def remove(self, number: int) -> None:
        """Let them take an adapter off."""


class Followers:
    """The other ranks, which run every step that is sent to them. This base has none."""

    disks = FollowerDisks()
    adapters = FollowerAdapters()

    @property
    def link(self) -> "Link | None":
        """The link by which every rank gets the tokens of a step; None: only this one does."""
        return None

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks are pipeline stages: then a step without samples returns nothing."""
        return False

    @property
    def num_stages(self) -> int:
        """Ranks, this one included, that can work on different steps at the same time.

        1: all of them work on each step together.
        """
        return 1

    def assembled(self, cache: "KVCache", config: "EngineConfig", taps: Seq[int]) -> None:
        """Let the other ranks make a cache like this; steps give the outputs of layers `taps`.

        Raises:
            RanksFailedError: one of them cannot.
        """

    def send(self, step: StepInputs) -> None:
        """Let the other ranks run a step too; raises RanksFailedError if one of them cannot."""

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """End the oldest step that was sent and not read; `num_kept`: see `Forward.take_back`."""

    def carry_out(self, work: CacheWork) -> None:
        """Let the other ranks do work on their caches that belongs to no step."""

    def resize(self, num_pages: Seq[int]) -> None:
        """Limit the pages of each layer group that may be in use."""

    def leave_out(self, kinds: Collection[str], faulty: str) -> None:
        """Let no rank use these kinds of kernels; `faulty`: the one found at fault, or empty."""

    def reset(self, error: BaseException) -> None:
        """Clear all caches after a step that failed with this error.

        Raises:
            RanksFailedError: the step failed on other ranks too, and nothing there can be trusted.
        """

    def fail(self, error: BaseException) -> BaseException:
        """End the other ranks after a fault, and return the error to raise for it."""
        return error

    def release(self) -> None:
        """End the other ranks: the model is not used any more."""

    def stats(self) -> dict[str, Any]:
        return {}


NO_FOLLOWERS = Followers()
