"""Pictures of a conversation: loaded, made ready for the model, and placed in its prompt.

A conversation brings its pictures in every turn, so those that were made ready last are kept.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..config import LOW_DETAIL_TOKENS, MAX_IMAGE_TOKENS
from ..errors import PromptTooLongError, TemplateError, UnsupportedFieldError
from ..images import (
    ImageProcessor,
    Picture,
    PlacedPicture,
    image_processor,
    load_image,
    open_image,
)
from ..text import ImagePart, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from .engine_factory import ModelInfo

KEPT_BYTES = 256 << 20  # of patches of pictures that were made ready
LARGE_PIXELS = 16_000_000
_one_large = threading.Lock()  # decoding takes up to 20 bytes per pixel, from files of any size


class PreparedPictures:
    """The pictures that were made ready last, by their pixels. For any thread.

    Args:
        max_bytes: of their patches.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, int], Picture] = OrderedDict()  # last used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def prepare(self, processor: ImageProcessor, image: "Image", max_tokens: int) -> Picture:
        """As of the processor, which makes a picture ready in some tenths of a second."""
        pixels = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
        pixels.update(image.tobytes())
        key = pixels.digest(), max_tokens
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = processor.prepare(image, max_tokens=max_tokens)
        with self._lock:
            if key not in self._kept and num_bytes(made) <= self._max_bytes:
                self._kept[key] = made
                self._num_bytes += num_bytes(made)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= num_bytes(oldest)
        return made


def num_bytes(picture: Picture) -> int:
    """Memory that the patches of a picture take."""
    return sum([tile.patches.nbytes for tile in picture.tiles])


class PictureReader:
    """Reads the pictures of conversations for one model.

    Args:
        name: of the model.
        processor: makes pictures ready for it; None: it does not see.
        max_tokens: of a picture; larger ones are scaled down.
    """

    def __init__(
        self,
        name: str,
        processor: ImageProcessor | None = None,
        max_tokens: int = MAX_IMAGE_TOKENS,
    ) -> None:
        self._name = name
        self._processor = processor
        self._max_tokens = max_tokens
        self._pictures = PreparedPictures()

    @classmethod
    def of(cls, info: "ModelInfo", tokenizer: Tokenizer, max_tokens: int) -> "PictureReader":
        """The reader of a loaded model; raises CheckpointError for broken files."""
        processor = image_processor(info.path, tokenizer.piece_to_id) if info.sees else None
        return cls(info.name, processor, max_tokens)

    @property
    def spelling(self) -> tuple[str, str]:
        """Text that the template writes for a picture, and what is encoded in its place."""
        return ("", "") if self._processor is None else self._processor.spelling

    def read(
        self, images: Sequence[ImagePart], max_context: int | None, place: str
    ) -> list[Picture]:
        """Load pictures and make them ready, one after another. Takes a while.

        Args:
            images: of the messages, in their order; one at least.
            max_context: tokens of prompt and answer: where pictures alone exceed it, the rest is
                not loaded.
            place: the field that an error about this names.

        Raises:
            UnsupportedFieldError: the model does not see.
            PictureError: a picture cannot be read.
            PromptTooLongError: they cannot fit.
        """
        if self._processor is None:
            raise UnsupportedFieldError(
                f"The model {self._name!r} reads text only and cannot see pictures; use a model "
                "with vision.",
                param=images[0].place,
            )
        found: list[Picture] = []
        num_tokens = 0
        for image in images:
            found.append(self._prepared(self._processor, image))
            num_tokens += len(found[-1].token_ids)
            if max_context is not None and num_tokens >= max_context:
                raise PromptTooLongError(num_tokens, max_context, param=place, exact=False)
        return found

    def _prepared(self, processor: ImageProcessor, image: ImagePart) -> Picture:
        limit = min(LOW_DETAIL_TOKENS, self._max_tokens) if image.low_detail else self._max_tokens
        opened = open_image(image.source, place=image.place)
        is_large = opened.width * opened.height > LARGE_PIXELS
        with _one_large if is_large else nullcontext():
            loaded = load_image(opened, place=image.place)
            return self._pictures.prepare(processor, loaded, limit)

    def place(
        self, ids: list[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Put the tokens of pictures where the template has written one token for each.

        Returns:
            The ids of the prompt, and where its pictures begin.

        Raises:
            TemplateError: the template has not written one token for each picture.
        """
        assert self._processor is not None  # it has prepared them
        placeholder, waiting = self._processor.placeholder_id, iter(pictures)
        if (count := ids.count(placeholder)) != len(pictures):
            raise TemplateError(
                f"The chat template of {self._name} writes {count} places for {len(pictures)} "
                "pictures; it may not be made for pictures, or not in a message of this role."
            )
        found: list[int] = []
        placed: list[PlacedPicture] = []
        for token in ids:
            if token == placeholder:
                placed.append(PlacedPicture(next(waiting), len(found)))
                found += placed[-1].picture.token_ids
            else:
                found.append(token)
        return found, tuple(placed)
