"""Limits of a process (memory, the KV cache's share of it, open files), and sizes.

Knows sizes, not models.
"""

import contextlib
import ctypes
import os
import re
import resource
import sys
from pathlib import Path

from ..errors import InvalidRequestError, shown, wrong_value

_NAMES = ("B", "kB", "MB", "GB", "TB")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)

MIN_KV_BYTES = 64 * 10**6
KV_SHARE = 0.4  # of what the weights leave, by default
SPARE_FILES = 2048  # beside those that are counted: shards of other models, logs, the disk tier
MODELS_SHARE = 0.7  # of the machine's memory, what a server gives to models by default


def parse_bytes(size: str | int, *, param: str = "max_memory") -> int:
    """Bytes of "8GB", "512 MiB", "1.5g" or a plain number.

    Raises:
        InvalidRequestError: anything else.
    """
    if type(size) is int and 0 < size < 2**63:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    number = 0.0
    if match:
        unit, binary = match[2].lower(), match[3]
        scale = 1024 ** " kmgt".index(unit or " ") if binary else _UNITS[unit]
        number = float(match[1]) * scale
    if not 1 <= number < 2**63:
        raise wrong_value(param, size, "a number of bytes above 0, or a size such as '8GB'")
    return int(number)


def weights_bytes(folder: Path) -> int:
    """Bytes of the weight files in a folder, each weight once; 0: there are none.

    Beside model*.safetensors, consolidated*.safetensors are the same weights in another layout.
    """
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    if any(file.name.startswith("model") for file in files):
        files = [file for file in files if not file.name.startswith("consolidated")]
    return sum(file.stat().st_size for file in files)


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def models_limit_bytes() -> int:
    return int(MODELS_SHARE * total_memory_bytes())


def default_kv_bytes(available_bytes: int, weights_bytes: int) -> int:
    return max(int((available_bytes - weights_bytes) * KV_SHARE), MIN_KV_BYTES)


def give_back_memory() -> None:
    """Give memory that was freed in small pieces back to the system, which glibc does not do."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def raise_file_limit(num_files: int) -> None:
    """Raise the limit of open files to `num_files` and some more, if the system allows it.

    macOS starts processes with a limit of 256, and a large model has as many files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def human_bytes(count: float) -> str:
    """1536000 -> '1.5 MB'. Decimal units, as disks and the hub count."""
    for unit in _NAMES:
        if count < 999.5 or unit == _NAMES[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
