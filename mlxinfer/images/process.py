"""Pictures and videos are decoded and made ready in processes that may be killed (`killable`).

A small file may take a decoder hours or gigabytes. So the processes have a budget, and end with the
caller that waits for them; what they took goes back to the system with them. A job is a pickled
`_Job`, and {"is_alone": no other large picture is decoded meanwhile}. The reply describes a `Shown`
and has its patches behind, or it is {"error": what is wrong, "param": field}, or {"is_large": true}
where a large picture has to wait for its turn.
"""

import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import MlxinferError, PictureError
from ..killable import POLL_S, EndedError, KillablePool, KillableProcess, Packet, limit_cpu, serve
from .load import load_image, open_image, picture_file
from .picture import Picture, Shown, Tile
from .processor import ImageProcessor, VideoProcessor
from .video import load_video

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSES = 3  # the last one for a tenant of a server that would wait for others
PICTURE_CPU_S = 30.0  # of all pictures of a request
VIDEO_CPU_S = 300.0  # of a request that has videos
MAX_SECONDS = 600.0  # of one picture or video, on a machine that does other work as well
MAX_MEMORY = 3 << 30  # bytes of addresses; a picture of 89 million pixels takes up to 20 for each
IDLE_S = 30.0  # after which a process ends
LARGE_PIXELS = 16_000_000
_one_large = threading.Lock()
_pool = KillablePool(
    *[
        KillableProcess(
            "mlxinfer.images.process", None, max_seconds=MAX_SECONDS, max_bytes=MAX_MEMORY
        )
        for _ in range(PROCESSES)
    ]
)


class Source(NamedTuple):
    """A picture or a video before it is decoded."""

    # bytes of a file; an array of (H, W, 3) levels; the path of a video; or a list of these, which
    # are the frames of a video
    content: Any
    place: str  # the field that errors name
    is_video: bool = False  # this is a video
    fps: float | None = None  # frames a second of a list of frames, if it is stated

    @classmethod
    def of(
        cls, given: Any, place: str, *, is_video: bool = False, fps: float | None = None
    ) -> "Source":
        """Read a picture (`load_image`) or a video (`load_video`) without decoding it.

        Raises:
            PictureError: there is no such file, or this is neither picture nor video.
        """
        if is_video and isinstance(given, list | tuple):
            frames = [_content(frame, f"{place}[{i}]") for i, frame in enumerate(given)]
            return cls(frames, place, is_video=True, fps=fps)
        if is_video and isinstance(given, str | os.PathLike):  # perhaps gigabytes
            return cls(str(Path(given).expanduser().absolute()), place, is_video=True, fps=fps)
        content = given if is_video else _content(given, place)
        if isinstance(content, bytearray | memoryview):
            content = bytes(content)
        return cls(content, place, is_video=is_video, fps=fps)

    def digest(self) -> bytes:
        """16 bytes that follow from the content: of another one, others."""
        digest = hashlib.blake2b(repr((self.is_video, self.fps)).encode(), digest_size=16)
        contents = self.content if isinstance(self.content, list) else [self.content]
        for content in contents:
            digest.update(_digest(content))
        return digest.digest()


def _content(given: Any, place: str) -> Any:
    """The bytes of a picture's file; of a picture that is decoded already, its levels."""
    data = picture_file(given, place)
    return np.asarray(load_image(given, place=place)) if data is None else data


def _digest(content: Any) -> bytes:
    if isinstance(content, str):
        try:
            with Path(content).open("rb") as file:
                return hashlib.file_digest(file, "blake2b").digest()
        except OSError:  # says the process that opens it
            return b""
    if isinstance(content, np.ndarray):
        return hashlib.blake2b(repr(content.shape).encode() + content.tobytes()).digest()
    return hashlib.blake2b(content if isinstance(content, bytes) else b"").digest()


@dataclass
class Budget:
    """CPU time that the pictures and videos of one request have left."""

    seconds: float = PICTURE_CPU_S  # that are left
    abandoned: Callable[[], bool] = field(default=lambda: False)  # says whether the caller has left


class _Job(NamedTuple):
    source: Source
    processor: ImageProcessor | VideoProcessor
    max_tokens: int
    seconds: float


def prepare(
    source: Source, processor: ImageProcessor | VideoProcessor, *, max_tokens: int, budget: Budget
) -> Shown:
    """Decode a picture or a video and make it ready for a model.

    Args:
        processor: of the model, for what `source` is.
        budget: of the request; what this takes is taken off.

    Raises:
        PictureError: it cannot be read, or takes too much time or memory.
        OverloadedError: too many wait.
        CancelledError: the caller has left.
    """
    job = pickle.dumps(_Job(source, processor, max_tokens, budget.seconds))
    try:
        reply = _pool.ask(Packet({"is_alone": False}, job), budget.abandoned)
        if "is_large" in reply.value:
            reply = _ask_alone(job, budget.abandoned)
    except EndedError:
        raise PictureError.of(
            source.place,
            f"takes more than {budget.seconds:.0f} s of CPU time or {MAX_MEMORY / 1e6:.0f} MB to "
            "decode, alone or with the other pictures of the request.",
        ) from None
    if "error" in reply.value:
        raise PictureError(reply.value["error"], param=reply.value["param"])
    budget.seconds = max(1.0, budget.seconds - reply.value["cpu_s"])
    return _shown(reply)


def _ask_alone(job: bytes, abandoned: Callable[[], bool]) -> Packet:
    while not _one_large.acquire(timeout=POLL_S):
        if abandoned():
            raise CancelledError
    try:
        return _pool.ask(Packet({"is_alone": True}, job), abandoned)
    finally:
        _one_large.release()


def _message(shown: Shown, cpu_s: float) -> Packet:
    pictures: list[dict[str, Any]] = []
    for picture in shown.pictures:
        tiles = [
            {"grid": tile.grid, "num_features": tile.num_features, "shape": tile.patches.shape}
            for tile in picture.tiles
        ]
        values = {name: getattr(picture, name) for name in Picture.__slots__}
        pictures.append({**values, "digest": picture.digest.hex(), "tiles": tiles})
    patches = [tile.patches.tobytes() for picture in shown.pictures for tile in picture.tiles]
    value = {"pictures": pictures, "text": shown.text, "cpu_s": cpu_s}
    return Packet(value, b"".join(patches))


def _shown(reply: Packet) -> Shown:
    numbers, start = np.frombuffer(reply.data, np.float32), 0
    pictures: list[Picture] = []
    for picture in reply.value["pictures"]:
        tiles: list[Tile] = []
        for tile in picture["tiles"]:
            stop = start + prod(tile["shape"])
            patches = numbers[start:stop].reshape(tile["shape"])
            tiles.append(Tile(patches, tuple(tile["grid"]), tile["num_features"]))
            start = stop
        grid = picture["mrope_grid"]
        values = {
            **picture,
            "tiles": tuple(tiles),
            "token_ids": tuple(picture["token_ids"]),
            "digest": bytes.fromhex(picture["digest"]),
            "mrope_grid": None if grid is None else tuple(grid),
            "times": tuple(picture["times"]),
        }
        pictures.append(Picture(**values))
    return Shown(tuple(pictures), reply.value["text"])


# -- in the process -------------------------------------------------------------------------------


def answer(message: Packet) -> Packet:
    """Return the reply to a job; of None, None."""
    if message.value is None:
        return Packet(None)
    job: _Job = pickle.loads(message.data)  # of the parent process
    before, place = process_time(), job.source.place
    limit_cpu(job.seconds)
    try:
        shown = _made_ready(job, is_alone=message.value["is_alone"])
    except MlxinferError as error:
        return Packet({"error": str(error), "param": error.param or place})
    except MemoryError:
        raise
    except Exception as error:  # decoders of foreign data may raise anything
        text = f"{place} cannot be read ({type(error).__name__})."
        return Packet({"error": text, "param": place})
    if shown is None:
        return Packet({"is_large": True})
    return _message(shown, process_time() - before)


def _made_ready(job: _Job, *, is_alone: bool) -> Shown | None:
    """A picture or a video, ready; None: it is large, and others may be decoded."""
    content, place, is_video, fps = job.source
    if is_video:
        assert isinstance(job.processor, VideoProcessor)
        video = load_video(content, fps=fps, place=place)
        return job.processor.prepare(video, max_tokens=job.max_tokens)
    assert isinstance(job.processor, ImageProcessor)
    opened: Image = open_image(content, place=place)
    if opened.width * opened.height > LARGE_PIXELS and not is_alone:
        return None
    image = load_image(opened, place=place)
    return Shown((job.processor.prepare(image, max_tokens=job.max_tokens),))


if __name__ == "__main__":
    serve(answer, idle_s=IDLE_S)
