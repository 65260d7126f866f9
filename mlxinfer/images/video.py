"""Videos: frames that were given as pictures, or that are read from a file.

Which frames a model sees is said by its processor, so frames are read when it has chosen. PyAV is
imported when the first file comes.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PictureError, shown
from .load import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

FPS = 2.0  # of frames that come without a rate
MAX_FRAME_PIXELS = 36_000_000  # 8K; each thread that decodes holds a frame of up to 54 MB
MAX_FRAMES = 1 << 20  # of a file: ten hours
# other formats, such as playlists, name files and addresses that would be opened
CONTAINERS = {"format_whitelist": "mov,mp4,matroska,webm,gif,avi"}
_FILES = "the path or the bytes of a video such as an MP4, MOV, WebM or GIF, or a list of frames"


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video whose frames are not yet read."""

    num_frames: int  # that it has
    fps: float  # frames in a second
    # gives the frames of these numbers, which only grow, in RGB. Raises PictureError.
    read: "Callable[[Sequence[int]], Iterator[Image]]" = field(repr=False)


def load_video(source: Any, *, fps: float | None = None, place: str = "video") -> Video:
    """Open a video.

    Args:
        source: a path, the bytes of a file, or a list of frames; a frame: see `load_image`.
        fps: frames in a second of a list; None: 2. A file says its own.

    Raises:
        PictureError: there is no such file, it is no video, PyAV is missing, or a frame is broken
            or of another size than the first.
    """
    if isinstance(source, list | tuple):
        return _of_frames(source, FPS if fps is None else fps, place)
    if fps is not None:
        raise PictureError(f"{place} is a file, which says its own fps; leave it out.", param=place)
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if not path.is_file():
            raise PictureError(f"There is no file {shown(str(source))}.", param=place)
        return _of_file(lambda: str(path), place)
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        return _of_file(lambda: io.BytesIO(data), place)
    raise PictureError(f"{place} is {shown(source)}; expected {_FILES}.", param=place)


def _of_frames(sources: Sequence[Any], fps: float, place: str) -> Video:
    if type(fps) not in (int, float) or not 0 < fps <= 1000:
        raise PictureError(f"fps is {shown(fps)}; expected a number up to 1000.", param=place)
    if not sources:
        raise PictureError(f"{place} has no frames; give it at least one.", param=place)
    frames = [load_image(one, place=f"{place}[{i}]") for i, one in enumerate(sources)]
    for number, frame in enumerate(frames):
        if frame.size != frames[0].size:
            raise PictureError(
                f"{place}[{number}] has {frame.width} x {frame.height} pixels and the first frame "
                f"{frames[0].width} x {frames[0].height}; frames of a video have one size.",
                param=place,
            )
    return Video(len(frames), float(fps), lambda numbers: (frames[i] for i in numbers))


def _of_file(opened: Callable[[], Any], place: str) -> Video:
    """The video of a file; `opened` gives what PyAV opens."""
    av = _av(place)
    try:
        with av.open(opened(), options=CONTAINERS) as container:
            if not container.streams.video:
                raise PictureError("The file has no moving pictures in it.", param=place)
            stream = container.streams.video[0]
            if stream.codec_context.width * stream.codec_context.height > MAX_FRAME_PIXELS:
                raise PictureError(
                    f"A frame has more than {MAX_FRAME_PIXELS:,} pixels.", param=place
                )
            rate = stream.average_rate or stream.guessed_rate
            count, seconds = stream.frames, stream.duration and stream.duration * stream.time_base
            if not count or (seconds and rate and count > round(seconds * rate)):
                # it says no number, or was trimmed, and still holds the frames that nobody sees
                seen = (one for one in container.demux(stream) if one.size and not one.is_discard)
                count = sum(1 for _ in islice(seen, MAX_FRAMES + 1))
    except (av.error.FFmpegError, ValueError) as error:
        raise _broken(error, place) from None
    if not count or not rate:
        raise PictureError("The video has no frames, or says no number a second.", param=place)
    if count > MAX_FRAMES:
        raise PictureError(f"The video has more than {MAX_FRAMES:,} frames.", param=place)

    def read(numbers: Sequence[int]) -> "Iterator[Image]":
        return _decoded(opened, numbers, place)

    return Video(count, float(rate), read)


def _decoded(opened: Callable[[], Any], numbers: Sequence[int], place: str) -> "Iterator[Image]":
    av, wanted, last = _av(place), list(numbers), None
    try:
        with av.open(opened(), options=CONTAINERS) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            # a frame may be larger than its file says
            stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
            for number, frame in enumerate(container.decode(stream)):
                while wanted and wanted[0] == number:
                    image = frame.to_image().convert("RGB")
                    last = image.rotate(frame.rotation, expand=True) if frame.rotation else image
                    yield last
                    wanted.pop(0)
                if not wanted:
                    return
    except (av.error.FFmpegError, ValueError) as error:
        raise _broken(error, place) from None
    raise PictureError(f"The video is cut off: its frame {wanted[0]:,} is not there.", param=place)


def _av(place: str) -> Any:
    try:
        import av
    except ImportError:
        raise PictureError(
            'A video file needs another package: pip install -e ".[video]" in a '
            "checkout of mlxinfer. Or give its frames as pictures.",
            param=place,
        ) from None
    return av


def _broken(error: Exception, place: str) -> PictureError:
    return PictureError(f"The video is broken or of no known format: {error}.", param=place)


# -- which frames a model sees ----------------------------------------------------------------


def every(video: Video, *, fps: float, least: int, most: int, step: int) -> list[int]:
    """The frames that Qwen2-VL and Qwen2.5-VL see: all, or `fps` in a second if there are more.

    Args:
        fps: frames in a second.
        least, most: frames, if the video has as many.
        step: frames that are seen as one; fewer frames than all are a multiple of it.
    """
    count = video.num_frames
    wanted = min(max(count / video.fps * fps, least), most)
    if count <= wanted:
        return list(range(count))
    number = max(1, int(min(wanted, most // step * step) // step)) * step
    frames: NDArray[np.int64] = np.arange(0, count, count / number).astype(np.int64)
    return [int(one) for one in frames[:number]]


def evenly(video: Video, *, fps: float, least: int, most: int) -> list[int]:
    """The frames that Qwen3-VL sees, from the first to the last; same arguments as `every`."""
    count = video.num_frames
    number = min(max(int(count / video.fps * fps), least), most, count)
    return [int(one) for one in np.linspace(0, count - 1, number).round()]


def at_most(video: Video, number: int) -> list[int]:
    """The frames that Gemma 4 sees: `number`, or all if there are fewer."""
    number = min(number, video.num_frames)
    return [one * video.num_frames // number for one in range(number)]
