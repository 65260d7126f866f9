"""Pictures of the command line: of --image and /image, dropped on a terminal; files of --video."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from ..errors import UnsupportedFieldError, shown

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif")
)
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\\.|[^\s\\'"])+""")


def picture_data(path: str) -> bytes:
    from ..images import load_image, picture_file  # imports numpy

    place = shown(path) if path.startswith("data:") else repr(path)  # all of a path: its end tells
    data = picture_file(path, place=place) or b""
    load_image(data, place=place)
    return data


def read_pictures(paths: tuple[str, ...], prompt: str | None) -> list[bytes]:
    """The pictures of --image, in their order."""
    if paths.count("-") > 1:
        raise click.UsageError("--image - reads the pipe, which holds one picture.")
    if "-" in paths and prompt in (None, "-"):
        raise click.UsageError('--image - reads the pipe; give the PROMPT: mlxinfer run "…".')
    return [piped_picture() if path == "-" else picture_data(path) for path in paths]


def stored_pictures(images: Sequence[str | bytes]) -> list[dict[str, str]]:
    from ..images import data_url

    return [
        {"name": f"picture {number}", "url": data_url(image)}
        for number, image in enumerate(images, start=1)
    ]


def with_its_images(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a conversation, its `images` and `videos` as parts of its content."""
    from ..session.arguments import with_images

    plain = {key: value for key, value in message.items() if key not in ("images", "videos")}
    return dict(with_images([plain], message.get("images", []), message.get("videos", []))[0])


def check_videos(paths: tuple[str, ...]) -> None:
    """Raise PictureError for a file of --video that is no video, before a model is loaded."""
    from ..images import load_video

    for path in paths:
        load_video(path, place=path)


def piped_picture() -> bytes:
    from ..images import load_image

    data = sys.stdin.buffer.read()
    load_image(data, place="--image -")
    return data


def check_sees(llm: Any) -> None:
    if not llm.model_info.sees:
        raise UnsupportedFieldError(
            f"{llm.model_info.name} reads text only and cannot see pictures; choose a model with "
            "vision, such as the bundled demo-vision.",
            param="images",
        )


def dropped(line: str) -> tuple[list[str], str]:
    """Paths of picture files in a line, and the line without them.

    A terminal writes the path of a file that is dropped on it: with backslashes, between quotes,
    or as a file: URL. Only whole paths that begin at the root or at the user's folder count, and
    only those of files that are there.
    """
    paths: list[str] = []

    def take(word: re.Match[str]) -> str:
        path = _path_of(word[0])
        if path is None:
            return word[0]
        paths.append(str(path))
        return ""

    rest = _WORD.sub(take, line)
    return paths, rest.strip()


def _path_of(word: str) -> Path | None:
    with suppress(ValueError, OSError):  # an open quote, a name that no file system has
        (text,) = shlex.split(word)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        path = Path(text).expanduser()
        if path.is_absolute() and path.suffix.lower() in SUFFIXES and path.is_file():
            return path
    return None
