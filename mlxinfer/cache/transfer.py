"""Pages of one layer group to bytes and back. Knows arrays; no tokens, no files.

The payload of a page is, for each layer of its group, the parts of the keys and then those of the
values, each (H, P, W) in the pool's own format: what comes back is what was there, bit for bit.
"""

from collections.abc import Iterator, Sequence
from math import prod

import mlx.core as mx
import numpy as np

from .kv import KVCache
from .pool import Plane

CHUNK_BYTES = 64 * 2**20  # payloads that are gathered at once

Payload = bytes | memoryview


def payload_bytes(cache: KVCache, group: int) -> int:
    """Bytes of the payload of one page of a group."""
    return cache.groups[group].page_bytes


def read_pages(cache: KVCache, group: int, pages: Sequence[int]) -> list[bytes]:
    """The payloads of pages, in order. Waits for whatever writes them."""
    return [payload for chunk in _chunks(cache, group, pages) for payload in _read(*chunk)]


def write_pages(
    cache: KVCache, group: int, pages: Sequence[int], payloads: Sequence[Payload]
) -> None:
    """Put payloads into pages. Only behind a barrier."""
    start = 0
    for planes, some, page_size in _chunks(cache, group, pages):
        _write(planes, some, page_size, payloads[start : start + len(some)])
        start += len(some)


def _chunks(
    cache: KVCache, group: int, pages: Sequence[int]
) -> Iterator[tuple[list[Plane], Sequence[int], int]]:
    planes = cache.planes(group)
    count = max(CHUNK_BYTES // payload_bytes(cache, group), 1)
    for start in range(0, len(pages), count):
        yield planes, pages[start : start + count], cache.page_size


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
