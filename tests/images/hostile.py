"""Files that are small and take a decoder long, or much memory."""

import base64
import io
import struct
import zlib

from PIL import Image

# what pillow_heif makes of 4001 x 4001 black pixels, packed by zlib
_HEIC = (
    "eNrtkL1OAkEQx2duA6FA8DvYiTZUJiQ2dkSpbW09lyOsuYO942LACiIPYOAFwNqSyopOfQq1sbKwMsRoztlbaCi1"
    "Mzv3252Z3f/cZgYActWwLWuO4EDmiWpRx9j1nNAGbflaxQ1mMUjBQ1iwHeE24h+US4D0keFIe4CMT9uuEPVqnKrT"
    "DUoca5bVLngx1kkRenMJopCBpPhFSN4gf0myI2Tq6DoWjd/h63s6BciyU6rIlTCNUaQETCmYYnxnlWy63DtEXLgZ"
    "4sc2e/NXtuqDfv/1OT+cdADSHXXXO6OSZBknfneVHlrjDTeoc7dFp0uQJAmsi6Z0dHfZG72gwF2bnsiOdAPaR2Tk"
    "rbmntSxFS6hKlkqlyOWE9OaDptkluhZL9Ggaba9i06AzXgFvj4P96NNPn9yfPyY3nx5mPfyOg+afyg0Gg8FgMBgM"
    "BoPB8A+46vwAhdZqEg=="
)


def jpeg_of_many_scans(side: int, scans: int) -> bytes:
    """A grey progressive JPEG whose refining scans are runs of empty blocks."""
    blocks = ((side + 7) // 8) ** 2
    pieces = [
        b"\xff\xd8",
        _segment(0xDB, b"\0" + bytes([1] * 64)),
        _segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])),
        _segment(0xC4, bytes([0x00, 1] + [0] * 15 + [0])),
        _segment(0xC4, bytes([0x10, 1] + [0] * 15 + [0xE0])),
    ]
    runs, left = "", blocks
    while left > 0:
        run = max(min(left, (1 << 15) - 1), 1 << 14)
        runs += "0" + format(run - (1 << 14), "014b")
        left -= run
    pieces += [_scan(0, 0, 0, "0" * blocks), _scan(1, 63, 0x01, runs)]
    return b"".join([*pieces, _scan(1, 63, 0x10, runs) * scans, b"\xff\xd9"])


def _segment(kind: int, data: bytes) -> bytes:
    return bytes([255, kind]) + struct.pack(">H", len(data) + 2) + data


def _scan(first: int, last: int, approximation: int, bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return _segment(0xDA, bytes([1, 1, 0, first, last, approximation])) + data


def png_of_one_bit(width: int, height: int) -> bytes:
    """A white PNG of one bit a pixel: a hundred thousandth of its pixels' size."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff" * ((width + 7) // 8)) * height, 9)
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def heic() -> bytes:
    """A black HEIC of 16 million pixels."""
    return zlib.decompress(base64.b64decode(_HEIC))


def gif_of_large_frames(side: int, frames: int) -> bytes:
    """A video that shows one black frame for a long time."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "GIF")
    data = file.getvalue()
    head = 13 + 3 * (2 << (data[10] & 7))  # with the table of colours
    return data[:head] + data[head:-1] * frames + b";"


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
