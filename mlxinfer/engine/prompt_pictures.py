"""The pictures of a prompt, as the scheduler and the KV cache see them. No MLX.

A picture stands in a prompt as token ids, one for each of its features. Where tokens are compared
(prefix cache, disk, n-grams), ids made of the picture stand in these places. So prompts share the
pages of one picture, and never those of two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cache.inputs import Ints
from ..errors import InsufficientMemoryError, InvalidRequestError
from ..images import Picture, PlacedPicture
from ..images.picture import rope_delta, rope_positions
from ..memory import human_bytes

if TYPE_CHECKING:
    from ..core import Request

LEAST_KEY = 1 << 61  # key ids of features are at least this, and below 2**62; token ids are not


class FeatureRows(NamedTuple):
    """Features of a picture that stand in a part of a prompt: those from `first` up to `stop`."""

    picture: Picture
    first: int
    stop: int
    places: Ints  # (stop - first,) positions in the prompt


@dataclass(frozen=True, slots=True, eq=False)
class PromptPictures:
    """The pictures of one prompt."""

    placed: tuple[PlacedPicture, ...]  # in the prompt's order
    places: list[Ints]  # of each picture, the positions (N,) of its features
    key_ids: list[int]  # of the prompt: its token ids, with key ids in the places of features
    # [from, to) positions of features that see each other; none where no layer lets them
    spans: list[tuple[int, int]]
    rope_delta: int  # what a token behind the prompt adds to its place to get its rope position
    has_axes: bool  # rope positions of the prompt are three-dimensional

    @staticmethod
    def of(request: "Request", *, sees_spans: bool) -> "PromptPictures":
        """The pictures of a request that has any.

        Args:
            request: `PictureLimits` found nothing wrong with it.
            sees_spans: some layer lets features of a picture see each other.
        """
        placed, key_ids = request.pictures, list(request.prompt_ids)
        places = [feature_places(*one) for one in placed]
        spans: list[tuple[int, int]] = []
        for (picture, _), picture_places in zip(placed, places, strict=True):
            for place, key in zip(picture_places.tolist(), feature_keys(picture), strict=True):
                key_ids[place] = key
            if sees_spans and picture.sees_itself:
                spans += _runs(picture_places)
        has_axes = any(picture.mrope_grid is not None for picture, _ in placed)
        return PromptPictures(placed, places, key_ids, spans, rope_delta(placed), has_axes)

    def features(self, start: int, stop: int) -> Iterator[FeatureRows]:
        for (picture, _), places in zip(self.placed, self.places, strict=True):
            first, last = np.searchsorted(places, (start, stop)).tolist()
            if first < last:
                yield FeatureRows(picture, first, last, places[first:last])

    def uncut(self, start: int, stop: int) -> int:
        """Where a chunk from `start` ends that was to end at `stop`, so that it cuts no span."""
        for low, high in self.spans:
            if low < stop < high:
                return low if low > start else high
        return stop

    def rope_positions(self, start: int, stop: int) -> Ints:
        """(3, stop - start) rope positions of the tokens at places [start, stop)."""
        if start >= self.placed[-1].stop:  # most calls: text behind all pictures
            return np.tile(
                np.arange(start, stop, dtype=np.int32) + np.int32(self.rope_delta), (3, 1)
            )
        return rope_positions(self.placed, start, stop)

    def seen_spans(self, start: int, stop: int) -> Ints:
        """(2, stop - start) positions from, and up to, of the span of each token."""
        positions = np.arange(start, stop, dtype=np.int32)
        spans = np.stack([positions, positions + 1])
        for low, high in self.spans:
            rows = slice(max(low - start, 0), max(high - start, 0))
            spans[:, rows] = [[low], [high]]
        return spans


def feature_places(picture: Picture, start: int) -> Ints:
    """(N,) positions of a picture's features, where its tokens begin at `start`."""
    positions = np.flatnonzero(np.asarray(picture.token_ids) == picture.feature_id) + start
    return positions.astype(np.int32)


def feature_keys(picture: Picture) -> list[int]:
    """The key ids (N,) of a picture's features: 61 bits each.

    An id is a hash of all that a feature's keys and values depend on: the picture's digest, the
    place in it, and how features have positions and see each other.
    """
    seen = picture.mrope_grid, picture.times, picture.sees_itself
    drawn = shake_128(picture.digest + repr(seen).encode()).digest(8 * picture.num_features)
    keys: list[int] = (LEAST_KEY | np.frombuffer(drawn, "<u8") >> 3).tolist()
    return keys


def tokens_before_keys(ids: list[int]) -> list[int]:
    for count, token_id in enumerate(ids):
        if token_id >= LEAST_KEY:
            return ids[:count]
    return ids


def _runs(places: Ints) -> list[tuple[int, int]]:
    """Consecutive positions as [from, to)."""
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLimits:
    """The limits that the pictures of a request must fit into."""

    # why the model takes no pictures, and what to do; None: it takes them
    refusal: str | None = "This model reads text alone; send no pictures, or use one that sees."
    feature_bytes: int = 0  # of one feature
    max_bytes: int = 0  # of all features that are kept
    # features that see each other, at most; None: none do, or there is no limit
    max_span: int | None = None

    def check(self, request: "Request") -> None:
        """Raise InvalidRequestError or InsufficientMemoryError for pictures that cannot run."""
        stop = 0
        for placed in request.pictures:
            if self.refusal is not None:
                raise InvalidRequestError(self.refusal, param="messages")
            picture, start = placed
            stands = tuple(request.prompt_ids[start : placed.stop])
            if start < stop or stands != picture.token_ids:
                raise InvalidRequestError(
                    f"A picture of {len(picture.token_ids)} tokens is said to begin at position "
                    f"{start} of the prompt, and others stand there; place its token_ids there.",
                    param="pictures",
                )
            stop = placed.stop
            self._check_features(picture, feature_places(picture, start))

    def _check_features(self, picture: Picture, places: Ints) -> None:
        count = picture.num_features
        if len(places) != count or not count:
            raise InvalidRequestError(
                f"A picture has {count} features, and {len(places)} tokens that stand for one; "
                "expected as many of both, and one at least.",
                param="pictures",
            )
        if count * self.feature_bytes > self.max_bytes:
            raise InsufficientMemoryError(
                f"A picture of {count} tokens takes {human_bytes(count * self.feature_bytes)}, and "
                f"{human_bytes(self.max_bytes)} are kept for pictures; use fewer tokens "
                "for it, or raise max_memory.",
                param="messages",
            )
        longest = max([high - low for low, high in _runs(places)])
        if picture.sees_itself and self.max_span is not None and longest > self.max_span:
            raise InvalidRequestError(
                f"This model computes the {longest} tokens of a picture in one step, and steps "
                f"have {self.max_span} at most; use fewer tokens for it, or raise prefill_chunk.",
                param="messages",
            )


# -- of a step -------------------------------------------------------------------------------------


class PictureRows(NamedTuple):
    """Rows of a step that belong to a prompt with pictures, or to its answer.

    Attributes:
        start, stop: positions of the first token, and behind the last one.
    """

    pictures: PromptPictures
    rows: slice
    start: int
    stop: int
    in_prompt: bool


def moved_rope_positions(
    parts: list[PictureRows], positions: Ints, decode_deltas: Ints | None
) -> Ints | None:
    """(3, T) rope positions of a step, or (T,) where those of each token are equal.

    Args:
        positions: (T,) places of all tokens.
        decode_deltas: (B,) of the rope positions of single tokens, the first rows; None: all are 0.

    Returns:
        None: they are the places.
    """
    on_axes = [part for part in parts if part.pictures.has_axes]
    if not on_axes and decode_deltas is None:
        return None
    moved = np.tile(positions, (3, 1))
    if decode_deltas is not None:
        moved[:, : len(decode_deltas)] += decode_deltas
    for part in on_axes:
        moved[:, part.rows] = part.pictures.rope_positions(part.start, part.stop)
    return moved[0] if (moved == moved[0]).all() else moved


def step_spans(parts: list[PictureRows], positions: Ints) -> Ints | None:
    """(2, T) positions from, and up to, of the span of each token of a step; None: all are alone.

    For the arguments see `moved_rope_positions`.
    """
    spans = None
    for part in parts:
        if part.in_prompt and part.pictures.spans:
            spans = np.stack([positions, positions + 1]) if spans is None else spans
            spans[:, part.rows] = part.pictures.seen_spans(part.start, part.stop)
    return spans
