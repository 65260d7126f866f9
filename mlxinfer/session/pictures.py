"""Pictures and videos of a conversation: loaded, made ready for the model, put into its prompt.

A conversation brings its pictures in every turn, so those that were made ready last are kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import LOW_DETAIL_TOKENS, MAX_IMAGE_TOKENS
from ..errors import PictureError, PromptTooLongError, TemplateError, UnsupportedFieldError
from ..images import (
    ImageProcessor,
    PlacedPicture,
    Shown,
    VideoProcessor,
    image_processor,
    video_processor,
)
from ..images.process import PICTURE_CPU_S, VIDEO_CPU_S, Budget, Source, prepare
from ..text import ImagePart, Tokenizer

if TYPE_CHECKING:
    from .engine_factory import ModelInfo

Message = Mapping[str, Any]
KEPT_BYTES = 256 << 20  # of patches of pictures that were made ready


class PreparedKey(NamedTuple):
    """Key of a prepared picture."""

    # of the request. Otherwise the time that a picture takes would tell one client what others have
    # shown.
    cache_salt: str | None
    digest: bytes  # of the source
    max_tokens: int  # the limit of the processor


class PreparedPictures:
    """The pictures and videos that were made ready last, by their sources. For any thread.

    Args:
        max_bytes: of their patches.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[PreparedKey, Shown] = OrderedDict()  # last used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def prepare(self, key: PreparedKey, make: Callable[[], Shown]) -> Shown:
        """Return the kept result of `make`, or call it: that takes some tenths of a second."""
        with self._lock:
            prepared = self._kept.get(key)
            if prepared is not None:
                self._kept.move_to_end(key)
                return prepared
        made = make()
        with self._lock:
            if key not in self._kept and num_bytes(made) <= self._max_bytes:
                self._kept[key] = made
                self._num_bytes += num_bytes(made)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= num_bytes(oldest)
        return made


def num_bytes(shown: Shown) -> int:
    return sum([tile.patches.nbytes for picture in shown.pictures for tile in picture.tiles])


class Processors(NamedTuple):
    """The processors of a model: they make pictures and videos ready for it."""

    images: ImageProcessor | None = None  # of pictures; None: it does not see
    videos: VideoProcessor | None = None  # of videos; None: it has seen none


class SeenParts(NamedTuple):
    """The pictures and videos of one conversation, ready."""

    name: str  # of the model
    images: ImageProcessor  # of pictures
    videos: VideoProcessor | None  # of videos; None: there are none
    shown: Sequence[Shown]  # of each, in order
    spoken: Sequence[str]  # what is encoded in place of each video's placeholder, in order
    unread: frozenset[str] = frozenset()  # places of earlier ones that cannot be read

    def respell(self, text: str) -> str:
        """The text to encode where the template has written this one."""
        placeholder, spelled = self.images.spelling
        text = text.replace(placeholder, spelled) if placeholder else text
        if self.videos is None:
            return text
        before, *parts = text.split(mark := self.videos.placeholder)
        if self.spoken and not parts:
            raise _sees_no_videos(self.name, "messages")
        spoken = [*self.spoken, *[mark] * len(parts)]
        return before + "".join(chain.from_iterable(zip(spoken, parts, strict=False)))

    def place(self, ids: list[int]) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Put the tokens of pictures where the template has written one token for each.

        Returns:
            The ids of the prompt, and where its pictures begin.
        """
        placeholders = {self.images.placeholder_id}
        placeholders |= set() if self.videos is None else {self.videos.placeholder_id}
        pictures = [picture for one in self.shown for picture in one.pictures]
        if (count := sum([ids.count(one) for one in placeholders])) != len(pictures):
            raise TemplateError(
                f"The chat template of {self.name} writes {count} places for {len(pictures)} "
                "pictures; it may not be made for pictures, or not in a message of this role."
            )
        waiting = iter(pictures)
        token_ids: list[int] = []
        placed: list[PlacedPicture] = []
        for token in ids:
            if token in placeholders:
                placed.append(PlacedPicture(next(waiting), len(token_ids)))
                token_ids += placed[-1].picture.token_ids
            else:
                token_ids.append(token)
        return token_ids, tuple(placed)


class PictureReader:
    """Reads the pictures and videos of conversations for one model.

    Args:
        max_tokens: of a picture; larger ones are scaled down.
        max_context: tokens that the model can read; 0: it sees no pictures.
    """

    def __init__(
        self,
        name: str,
        processors: Processors = Processors(),  # noqa: B008
        max_tokens: int = MAX_IMAGE_TOKENS,
        max_context: int = 0,
    ) -> None:
        self._name = name
        self._max_context = max_context
        self._processors = processors
        self._max_tokens = max_tokens
        self._prepared = PreparedPictures()

    @classmethod
    def of(cls, info: "ModelInfo", tokenizer: Tokenizer, max_tokens: int) -> "PictureReader":
        """The reader of a loaded model; raises CheckpointError for broken files."""
        processors = Processors()
        if info.sees:
            token_id = tokenizer.piece_to_id
            processors = Processors(
                image_processor(info.path, token_id), video_processor(info.path, token_id)
            )
        return cls(info.name, processors, max_tokens, info.max_context)

    def read(
        self,
        images: Sequence[ImagePart],
        max_context: int | None,
        place: str,
        abandoned: Callable[[], bool],
        cache_salt: str | None = None,
    ) -> SeenParts:
        """Load pictures and make them ready, one after another. Takes a while.

        Args:
            images: of the messages, in their order; one at least.
            max_context: tokens of prompt and answer; None: all that the model can read. If the
                pictures so far exceed it, the rest is not loaded: each holds its patches.
            place: the field that an error about this names.
            abandoned: says whether the caller has left; then it raises CancelledError.
        """
        processor = self._processor_of(images)
        moving = any(image.is_video for image in images)
        budget = Budget(VIDEO_CPU_S if moving else PICTURE_CPU_S, abandoned)
        pictures: list[Shown] = []
        spoken: list[str] = []
        unread: set[str] = set()
        num_tokens, most = 0, self._max_context if max_context is None else max_context
        for image in images:
            if abandoned():
                raise CancelledError
            try:
                pictures.append(self._shown(image, budget, cache_salt))
            except (PictureError, UnsupportedFieldError):
                if not image.is_earlier:
                    raise
                unread.add(image.place)
                continue
            if image.is_video:
                spoken.append(pictures[-1].text)
            num_tokens += sum([len(picture.token_ids) for picture in pictures[-1].pictures])
            if num_tokens >= most:
                raise PromptTooLongError(num_tokens, most, param=place, exact=False)
        videos = self._processors.videos if moving else None
        return SeenParts(self._name, processor, videos, pictures, spoken, frozenset(unread))

    def _processor_of(self, images: Sequence[ImagePart]) -> ImageProcessor:
        processor, videos = self._processors
        if processor is None:
            raise UnsupportedFieldError(
                f"The model {self._name!r} reads text only and cannot see pictures; use a model "
                "with vision.",
                param=images[0].place,
            )
        moving = [image for image in images if image.is_video and not image.is_earlier]
        if moving and videos is None:
            raise _sees_no_videos(self._name, moving[0].place)
        return processor

    def _shown(self, part: ImagePart, budget: Budget, cache_salt: str | None) -> Shown:
        limit = min(LOW_DETAIL_TOKENS, self._max_tokens) if part.low_detail else self._max_tokens
        processor = self._processors.videos if part.is_video else self._processors.images
        if processor is None:
            raise _sees_no_videos(self._name, part.place)
        source = Source.of(part.source, part.place, is_video=part.is_video, fps=part.fps)
        make = partial(prepare, source, processor, max_tokens=limit, budget=budget)
        return self._prepared.prepare(PreparedKey(cache_salt, source.digest(), limit), make)


def _sees_no_videos(model: str, place: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"The model {model!r} sees pictures and no videos; send some frames as pictures.",
        param=place,
    )


# -- in messages ----------------------------------------------------------------------------------


def _parts_of(message: Message) -> list[Message]:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if part.get("type") in ("image", "video")]


def earlier_places(messages: Sequence[Message]) -> set[str]:
    return {
        part["place"]
        for message in messages
        for part in _parts_of(message)
        if part.get("earlier") or message["role"] == "tool"
    }


def with_notes(
    messages: Sequence[Message], places: Container[str], why: str
) -> tuple[list[Message], list[str]]:
    """The messages with notes, which end with `why`, for the pictures at `places`; and these."""
    changed, left_out = list(messages), []
    for number, message in enumerate(messages):
        if not any(part.get("place") in places for part in _parts_of(message)):
            continue
        parts = []
        for part in message["content"]:
            if part.get("place") in places:
                kind = "video" if part["type"] == "video" else "picture"
                left_out.append(f"{part['place']} {kind}")
                part = {"type": "text", "text": f"[A {kind} was here. {why}]"}
            parts.append(part)
        changed[number] = {**message, "content": parts}
    return changed, left_out


def fetched(
    messages: Sequence[Message], fetch: Callable[[str, str], bytes]
) -> tuple[list[Message], set[str]]:
    """The messages with the data of pictures in place of URLs, and places that `fetch` refuses."""
    changed, refused = list(messages), set()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        parts = []
        for part in content:
            if isinstance(part.get("image"), str):
                try:
                    part = {**part, "image": fetch(part["image"], part["place"])}
                except PictureError:
                    if not part.get("earlier"):
                        raise
                    refused.add(part["place"])
            parts.append(part)
        changed[number] = {**message, "content": parts}
    return changed, refused
