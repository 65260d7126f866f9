"""Why prompts were computed again: the last requests of each owner, and where their reuse ended.

A request is compared with earlier ones of the same owner alone. So nothing of another owner's
prompts can be seen here, not even that there are any.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import Request, Reuse, ReuseEnd
from .http import Plain
from .slots import ServedModel

MAX_RECORDS = 200  # of an owner
MAX_IDS = 1 << 20  # token ids, 8 bytes each, that are kept of an owner's requests: the last ones
SHOWN_TOKENS, SHOWN_CHARS = 24, 80  # of text that differs
PICTURE = "[picture]"
MESSAGES: dict[str, str] = {
    ReuseEnd.COMPLETE: "All that can be reused was: the last token is always computed, and some "
    "models go on at whole pages only.",
    ReuseEnd.EVICTED: "The next page was there and was evicted: other prompts needed its memory.",
    ReuseEnd.WINDOW: "Layers with a sliding window have no page here any more, so that the model "
    "cannot go on from this position.",
    ReuseEnd.NO_SNAPSHOT: "The text goes on as in an earlier request, but no snapshot of the "
    "model's recurrent state was kept there.",
    ReuseEnd.DISABLED: "Prompts are not reused: the prefix cache is off, or the request asks for "
    "scores of its whole prompt.",
    ReuseEnd.LIMITED: "More was there, but there was no room to go on from it, or it ends inside "
    "of a picture.",
    "never_seen": "No request that is remembered of this key began like this.",
    "text_differs": "The text differs from the nearest earlier request.",
    "goes_on": "The prompt goes on where the nearest earlier request ended.",
    "another_picture": "A picture differs from the nearest earlier request.",
    "another_adapter": "The nearest earlier request used another adapter.",
    "another_salt": "The nearest earlier request had another cache_salt.",
    "model_reloaded": "The model was loaded again after the nearest earlier request.",
    "not_kept": "An earlier request had this text, but its pages are not there: it ended before "
    "they were computed, or they were evicted long ago. These cannot be told apart.",
}
Ids = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class ReuseRecord:
    """One request."""

    id: str  # of its answer
    request_id: str  # of the log
    model: str
    session: "weakref.ref[Any]"  # of the loaded model
    namespace: tuple[str | None, str | None]  # adapter and salt
    # (T,) of prompt and answer, a picture's own number in its places; None: dropped
    ids: Ids | None
    shown: Plain  # what its owner is shown

    def without_text(self) -> Plain:
        names = ("cached_tokens", "cause", "message", "position")
        return {name: self.shown[name] for name in names}


class ReuseRecords:
    """The last requests of each owner."""

    def __init__(self) -> None:
        self._of: dict[str | None, deque[ReuseRecord]] = {}

    def add(
        self, id: str, request_id: str, created_s: int, model: ServedModel, request: Request
    ) -> ReuseRecord | None:
        """Note a request whose prompt was computed; None: its engine does not say what it reused.

        Args:
            id: of its answer.
            created_s: seconds since 1970.
        """
        reuse = request.reuse
        if reuse is None:
            return None
        record = ReuseRecord(
            id,
            request_id,
            model.session.info.name,
            weakref.ref(model.session),
            (request.adapter, request.cache_salt),
            ids_of(request),
            {},
        )
        records = self._of.setdefault(request.owner, deque(maxlen=MAX_RECORDS))
        record.shown = {
            "id": id,
            "request_id": request_id,
            "created_s": created_s,
            "model": model.name,
            "prompt_tokens": len(request.prompt_ids),
            "cached_tokens": reuse.num_tokens,
            "tiers": _tokens_by_tier(reuse),
            **explain(record, reuse, records, model.tokenizer.decode),
        }
        records.append(record)
        self._drop_ids(records)
        return record

    def answered(self, owner: str | None, record: ReuseRecord, token_ids: Sequence[int]) -> None:
        if record.ids is not None:
            record.ids = np.concatenate([record.ids, np.asarray(token_ids, np.int64)])
            self._drop_ids(self._of[owner])

    def of(self, owner: str | None) -> list[Plain]:
        return [record.shown for record in reversed(self._of.get(owner, ()))]

    def find(self, owner: str | None, id: str) -> Plain | None:
        for record in reversed(self._of.get(owner, ())):
            if id == record.request_id or id.rpartition("-")[2] == record.id:
                return record.shown
        return None

    def _drop_ids(self, records: deque[ReuseRecord]) -> None:
        left = MAX_IDS
        for record in reversed(records):
            left -= 0 if record.ids is None else len(record.ids)
            if left < 0:
                record.ids = None


def ids_of(request: Request) -> Ids:
    """(T,) the ids of a prompt, with a negative number of its content in a picture's places."""
    ids = np.array(request.prompt_ids, np.int64)
    for placed in request.pictures:
        number = int.from_bytes(placed.picture.digest[:7], "big")
        ids[placed.start : placed.stop] = -1 - number
    return ids


def explain(
    record: ReuseRecord,
    reuse: Reuse,
    earlier: Sequence[ReuseRecord] | deque[ReuseRecord],
    decode: Callable[..., str],
) -> Plain:
    """Why no more of a prompt was reused: cause, message, position, and words that differ.

    Args:
        earlier: requests of the same owner, oldest first.
        decode: token ids -> text.
    """
    nearest, common = _nearest(record, reuse, earlier)
    cause = _cause(record, reuse, nearest, common)
    shown: Plain = {"cause": cause, "message": MESSAGES[cause], "position": reuse.num_tokens}
    if nearest is None or common < reuse.num_tokens:
        return shown
    shown["earlier_id"] = nearest.id
    assert record.ids is not None
    assert nearest.ids is not None
    if common < min(len(record.ids), len(nearest.ids)):
        shown["text"] = words(record.ids[common:], decode)
        shown["earlier_text"] = words(nearest.ids[common:], decode)
        shown["differs_at"] = common
    if cause in ("text_differs", "goes_on", "another_picture"):
        shown["position"] = common
    return shown


def _nearest(
    record: ReuseRecord, reuse: Reuse, earlier: Sequence[ReuseRecord] | deque[ReuseRecord]
) -> tuple[ReuseRecord | None, int]:
    """The earlier request that begins most like this one, and how many ids they share.

    One that could share no pages counts only where it would have given a page more.
    """
    assert record.ids is not None
    best: tuple[ReuseRecord | None, int] = (None, 0)
    score = -1
    for other in reversed(earlier):
        if other.ids is None or other.model != record.model:
            continue
        common = _common(record.ids, other.ids)
        shares = record.namespace == other.namespace and record.session() is other.session()
        weighed = common if shares else common - reuse.page_size
        if common and weighed > score:
            best, score = (other, common), weighed
    return best


def _cause(record: ReuseRecord, reuse: Reuse, nearest: ReuseRecord | None, common: int) -> str:
    """The key of MESSAGES; the engine's own cause, where it has seen one."""
    assert record.ids is not None
    if reuse.end not in (ReuseEnd.NEW, ReuseEnd.COMPLETE):
        return reuse.end
    if reuse.num_tokens >= len(record.ids) - 1:
        return ReuseEnd.COMPLETE
    if nearest is None or nearest.ids is None or common < reuse.num_tokens:
        return "never_seen"
    if nearest.session() is not record.session():
        return "model_reloaded"
    for one, other, cause in zip(
        record.namespace, nearest.namespace, ("another_adapter", "another_salt"), strict=True
    ):
        if one != other:
            return cause
    if reuse.missing is not None and common >= (reuse.missing + 1) * reuse.page_size:
        return "not_kept"
    if common >= len(record.ids) - 1:
        return ReuseEnd.COMPLETE if reuse.missing is None else "not_kept"
    if common == len(nearest.ids):
        return "goes_on"
    is_picture = min(record.ids[common], nearest.ids[common]) < 0
    return "another_picture" if is_picture else "text_differs"


def _common(a: Ids, b: Ids) -> int:
    stop = min(len(a), len(b))
    differ = a[:stop] != b[:stop]
    first = int(differ.argmax()) if stop else 0
    return first if stop and differ[first] else stop


def words(ids: Ids, decode: Callable[..., str]) -> str:
    """The first words of a text, or a mark where a picture stands."""
    picture = np.flatnonzero(ids[:SHOWN_TOKENS] < 0)
    stop = int(picture[0]) if len(picture) else SHOWN_TOKENS
    text: str = decode(ids[:stop].tolist(), skip_special_tokens=False)
    return (text[:SHOWN_CHARS] if stop else "") or (PICTURE if len(picture) else "")


def _tokens_by_tier(reuse: Reuse) -> dict[str, int]:
    """How many of the tokens lay in each tier; a part of a page is always in memory."""
    counts = Counter(dict.fromkeys(("memory", "disk", "peer"), 0))
    for tier in reuse.tiers:
        counts[tier] += reuse.page_size
    counts["memory"] += reuse.num_tokens - counts.total()
    return dict(counts)
