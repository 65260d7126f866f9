"""Pages of one layer group to bytes and back. Knows planes of arrays; no tokens, no files.

The payload of a page is, for each layer of its group, the parts of each of its planes (keys and
then values, or latent vectors), each (H, P, W) in the pool's own format: what comes back is what
was there, bit for bit.
"""

from collections.abc import Iterator, Sequence
from math import prod

import mlx.core as mx
import numpy as np

from .pool import Plane

CHUNK_BYTES = 64 * 2**20  # payloads that are gathered at once

Payload = bytes | memoryview


def read_pages(planes: Sequence[Plane], pages: Sequence[int], page_size: int) -> list[bytes]:
    """The payloads of pages, in order. Waits for whatever writes them."""
    if not planes:
        return [b""] * len(pages)
    return [
        payload
        for some in _chunks(planes, pages, page_size)
        for payload in _read(planes, some, page_size)
    ]


def write_pages(
    planes: Sequence[Plane], pages: Sequence[int], page_size: int, payloads: Sequence[Payload]
) -> None:
    """Put payloads into pages. Only behind a barrier."""
    start = 0
    if not planes:
        return
    for some in _chunks(planes, pages, page_size):
        _write(planes, some, page_size, payloads[start : start + len(some)])
        start += len(some)


def _chunks(
    planes: Sequence[Plane], pages: Sequence[int], page_size: int
) -> Iterator[Sequence[int]]:
    page_bytes = page_size * sum(
        len(part) * part.shape[-1] * part.itemsize for plane in planes for part in plane.pages
    )
    count = max(CHUNK_BYTES // max(page_bytes, 1), 1)
    for start in range(0, len(pages), count):
        yield pages[start : start + count]


def _slots(pages: Sequence[int], page_size: int) -> mx.array:
    """(N * P,) pool slots of N pages."""
    starts = np.array(pages, dtype=np.int32)[:, None] * page_size
    return mx.array((starts + np.arange(page_size, dtype=np.int32)).reshape(-1))


def _read(planes: Sequence[Plane], pages: Sequence[int], page_size: int) -> list[bytes]:
    slots = _slots(pages, page_size)
    parts = []
    for plane in planes:
        for array in plane.pages:
            taken = mx.unflatten(array[:, slots], 1, (len(pages), page_size))  # (H, N, P, W)
            taken = mx.contiguous(taken.swapaxes(0, 1))  # (N, H, P, W)
            parts.append(taken.view(mx.uint8).flatten(1))
    rows = mx.concatenate(parts, axis=1)  # (N, bytes of a page)
    mx.eval(rows)
    return [row.tobytes() for row in np.array(rows, copy=False)]


def _write(
    planes: Sequence[Plane], pages: Sequence[int], page_size: int, payloads: Sequence[Payload]
) -> None:
    rows = mx.array(np.stack([np.frombuffer(payload, dtype=np.uint8) for payload in payloads]))
    runs = _runs(pages)
    start = 0
    for plane in planes:
        for i, (width, dtype) in enumerate(plane.fmt.parts):
            shape = plane.pages[i].shape[0], page_size, width  # (H, P, W)
            stop = start + prod(shape) * dtype.size
            part = mx.contiguous(rows[:, start:stop]).view(dtype)
            part = mx.unflatten(part, 1, shape).swapaxes(0, 1)  # (H, N, P, W)
            for row, page, count in runs:
                tokens = part[:, row : row + count].flatten(1, 2)
                plane.pages[i][:, page * page_size : (page + count) * page_size] = tokens
            start = stop
    assert start == rows.shape[1], "a payload of another format"
    mx.eval([plane.pages for plane in planes])


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive pages as (place of the first in `pages`, its id, how many)."""
    runs: list[tuple[int, int, int]] = []
    for row, page in enumerate(pages):
        if runs and page == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((row, page, 1))
    return runs
