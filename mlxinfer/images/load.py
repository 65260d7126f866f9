"""Pictures from files, bytes, objects and arrays: upright, opaque and in RGB.

Pillow is imported when the first picture comes.
"""

import base64
import binascii
import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PictureError, shown

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112  # the tag of EXIF
MAX_FILE_BYTES = 64 << 20
MAX_PIXELS = 89_000_000  # 356 MB as RGB; Pillow warns of bombs from 89.5 million on
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_KNOWN = "JPEG, PNG, WebP, GIF, BMP, TIFF and HEIC"
# what Pillow's decoders raise on foreign data
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)
_SOURCES = "a path, the bytes of a file, a data: URL, a PIL image or an array"


def load_image(source: Any, *, place: str = "image") -> "Image":
    """Load a picture as it is meant to be seen.

    A picture is turned as its EXIF data say, a PIL object too. Transparency is composited on white.
    Of a picture that moves, the first frame is taken.

    Args:
        source: a path, the bytes of a file, a `data:` URL, a PIL image, or an array of (H, W),
            (H, W, 1), (H, W, 3) or (H, W, 4): whole numbers up to 255, or floats from 0 to 1.

    Returns:
        The picture in RGB.

    Raises:
        PictureError: there is no such file, it is no picture of a known format, it is broken, or
            it has more than 89 million pixels.
    """
    image = open_image(source, place=place)
    with _errors_naming(place):
        image.load()
        return _opaque(_upright(image))


def open_image(source: Any, *, place: str = "image") -> "Image":
    """Open a picture without decoding it, so that its size is known.

    Args and errors: those of `load_image`, which also takes what this returns.
    """
    with _errors_naming(place):
        image = _opened(source, place)
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(image.width, image.height, place)
    return image


@contextmanager
def _errors_naming(place: str) -> Iterator[None]:
    """Raise PictureError for what Pillow raises; it names the field `place`."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"{place} is too large: {error}", param=place) from None
    except UnidentifiedImageError:
        raise PictureError(
            f"{place} is no picture of a known format; expected {_KNOWN}.", param=place
        ) from None
    except PictureError:
        raise
    except BROKEN as error:
        raise PictureError(f"{place} is broken or cut off: {error}.", param=place) from None


def data_url(source: Any, *, place: str = "image") -> str:
    """The picture as a `data:` URL, to be sent: files as they are, all others as PNG.

    A file is not decoded: whoever gets it will. Args and errors: those of `open_image`.
    """
    data = picture_file(source, place)
    kind = "png"
    if data is None:
        file = io.BytesIO()
        load_image(source, place=place).save(file, "PNG")
        data = file.getvalue()
    elif _is_heif(data):
        kind = "heif"
    else:
        kind = str(open_image(data, place=place).format).lower()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def thumbnail_url(source: Any, side: int) -> str:
    """The picture as a small `data:` URL; same arguments and errors as `load_image`.

    Args:
        side: pixels of the longer side, at most.
    """
    image = load_image(source)
    image.thumbnail((side, side))
    return data_url(image)


def from_data_url(url: str, *, place: str = "image") -> bytes:
    """The bytes of a `data:` URL in base64; raises PictureError."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise PictureError(
            f"The URL is {shown(url)}; expected data:image/png;base64, and the data.", param=place
        )
    return from_base64(data, place=place)


def from_base64(data: str, *, place: str = "image") -> bytes:
    """The bytes of a picture in base64; raises PictureError."""
    if len(data) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise _too_heavy(len(data) * 3 // 4, place)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise PictureError(f"{place} is no base64.", param=place) from None


def _opened(source: Any, place: str) -> "Image":
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    data = picture_file(source, place)
    if data is not None:
        return _decoder(data, place)
    array = np.asarray(source)
    if array.dtype == object or not array.ndim:
        raise PictureError(f"{place} is {shown(source)}; expected {_SOURCES}.", param=place)
    return _from_array(array, place)


def picture_file(source: Any, place: str) -> bytes | None:
    """The bytes of a file that a source names or is; None: it is an object or an array.

    Raises:
        PictureError: there is no such file, it cannot be read, or it is too large.
    """
    if isinstance(source, str) and source.startswith("data:"):
        return from_data_url(source, place=place)
    if isinstance(source, str | os.PathLike):
        return _bytes_of(source, place)
    return bytes(source) if isinstance(source, bytes | bytearray | memoryview) else None


def _bytes_of(path: str | os.PathLike[str], place: str) -> bytes:
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        raise PictureError(
            f"{shown(path)} is not fetched; download the picture and give its path or its bytes.",
            param=place,
        )
    name = shown(str(path))
    try:
        file = Path(path).expanduser()
        is_file = file.exists() and not file.is_dir()
        data = _start_of(file) if is_file else b""
    except (OSError, ValueError, RuntimeError) as error:
        raise PictureError(f"{name} cannot be read: {error}.", param=place) from None
    if not is_file:
        raise PictureError(f"There is no file {name}.", param=place)
    if len(data) > MAX_FILE_BYTES:
        raise _too_heavy(max(len(data), file.stat().st_size), place)
    return data


def _start_of(file: Path) -> bytes:
    """The bytes of a file or a pipe, up to one more than the limit."""
    with file.open("rb") as opened:
        return opened.read(MAX_FILE_BYTES + 1)


def _decoder(data: bytes, place: str) -> "Image":
    from PIL import Image

    if len(data) > MAX_FILE_BYTES:
        raise _too_heavy(len(data), place)
    if _is_heif(data):
        return _open_heif(data, place)
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _is_heif(data: bytes) -> bool:
    return data[4:8] == b"ftyp" and data[8:12] in HEIF_BRANDS


def _open_heif(data: bytes, place: str) -> "Image":
    try:
        import pillow_heif
    except ImportError:
        raise PictureError(
            'A HEIC picture needs another package: pip install -e ".[heif]" in a '
            "checkout of mlxinfer. Or export it as JPEG.",
            param=place,
        ) from None
    opened: Image = pillow_heif.HeifImageFile(io.BytesIO(data))  # turned already, as it says then
    return opened


def _from_array(array: "np.ndarray[Any, Any]", place: str) -> "Image":
    from PIL import Image

    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if 0 in array.shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise PictureError.of(
            place, f"is an array of {array.shape}; expected (H, W), (H, W, 3) or (H, W, 4)."
        )
    if np.issubdtype(array.dtype, np.floating):
        array = array * 255
    if array.dtype == bool or not np.issubdtype(array.dtype, np.number):
        raise PictureError(f"{place} is an array of {array.dtype}; expected numbers.", param=place)
    if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 255):
        raise PictureError(
            f"{place} is an array with values outside of its range; expected whole numbers from 0 "
            "to 255, or floats from 0 to 1.",
            param=place,
        )
    return Image.fromarray(np.ascontiguousarray(np.round(array).astype(np.uint8)))


def _upright(image: "Image") -> "Image":
    """The picture turned as its EXIF data say, which may hold what Pillow could not write again."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _opaque(image: "Image") -> "Image":
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow's own conversion would cut levels off at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _too_large(width: int, height: int, place: str) -> PictureError:
    return PictureError(
        f"{place} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read. Scale it "
        "down first.",
        param=place,
    )


def _too_heavy(size: int, place: str) -> PictureError:
    return PictureError.of(place, f"has {size:,} bytes; at most {MAX_FILE_BYTES:,} are read.")
