"""The group that this process belongs to. MLX forms one in the life of a process: it is kept."""

import atexit
import secrets
import threading
from collections.abc import Callable

from ..errors import InvalidRequestError, RanksFailedError
from .group import RankGroup
from .hosts import Place, local_place, shared_secret
from .local import LocalRanks
from .options import RankOptions

_lock = threading.Lock()
_open: list[RankGroup] = []
_ends: list[Callable[[], None]] = []


def when_failed(call: Callable[[], None]) -> None:
    """Call this, on a thread of the group, once the group of this process has failed."""
    _ends.append(call)


def _call_ends() -> None:
    for call in _ends:
        call()


def open_group(
    options: RankOptions, model: str | None = None, check: Callable[[], None] = lambda: None
) -> RankGroup | None:
    """The group of these options, formed if this process has none; None: one rank is asked for.

    This process must be rank 0 of it. A `model` that is named claims it, see `RankGroup.claim`.
    `check` is called several times a second while others are awaited, and may raise.

    Raises:
        InvalidRequestError: the options, or another group was formed before, or has a model.
        RanksFailedError: the group has failed before, or others did not come.
    """
    place = options.elsewhere
    if place is None and options.ranks == 1:
        return None
    group = _group_of(options, place, check)
    if model is not None:
        group.claim(model)
    return group


def _group_of(options: RankOptions, place: Place | None, check: Callable[[], None]) -> RankGroup:
    """The group of this process, formed if it has none. Raises as of `open_group`."""
    size = options.ranks if place is None else place.size
    with _lock:
        if _open:
            (group,) = _open
            if group.failure is not None:
                raise RanksFailedError(
                    f"{group.failure} MLX forms one group in the life of a process: start a new "
                    "one."
                )
            if group.place.size != size:
                raise InvalidRequestError(
                    f"This process has formed a group of {group.place.size} ranks, and MLX forms "
                    "one in the life of a process; start another for a group of "
                    f"{size}.",
                    param="ranks",
                )
            return group
        if place is None:
            group = RankGroup(
                local_place(size),
                secrets.token_bytes(32),
                local=LocalRanks(),
                step_s=options.rank_deadline,
                check=check,
            )
        else:
            group = RankGroup(place, shared_secret(), step_s=options.rank_deadline, check=check)
        group.on_end = _call_ends
        _open.append(group)
        atexit.register(group.close)
        return group
