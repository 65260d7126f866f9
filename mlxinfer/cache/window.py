"""Which earlier positions a token sees: all, or a window and some sinks. Knows no pages' places."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The token at position q sees k <= q where k < sinks or k > q - size; `size` None: all."""

    size: int | None = None
    sinks: int = 0

    def lowest(self, position: int) -> int:
        """The first position after the sinks that the token at `position` sees."""
        return 0 if self.size is None else max(0, position - self.size + 1)

    def ranges(self, position: int, stop: int) -> list[tuple[int, int]]:
        """Positions before `stop` that tokens from `position` on may see, as few ranges."""
        lowest = self.lowest(position)
        if lowest <= self.sinks:
            return [(0, stop)] if stop else []
        parts = [(0, min(self.sinks, stop)), (lowest, stop)]
        return [(start, end) for start, end in parts if start < end]

    def sees(self, queries: NDArray[np.int32], keys: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each query position sees each key position; arrays that broadcast."""
        visible = keys <= queries
        if self.size is not None:
            visible &= (keys > queries - self.size) | (keys < self.sinks)
        return visible

    def kept_pages(self, page_size: int) -> int:
        """Pages at the front that hold sinks and are never recycled."""
        return 0 if self.size is None else -(-self.sinks // page_size)

    def first_page(self, position: int, page_size: int) -> int:
        """The first page after the kept ones that tokens from `position` on still see."""
        return self.lowest(position) // page_size

    def max_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Pages that a sequence of `num_tokens` needs at once, prefilled `chunk` at a time."""
        pages = -(-num_tokens // page_size)
        if self.size is None:
            return pages
        held = -(-(self.size - 1) // page_size) + 1 + self.kept_pages(page_size)
        return min(pages, held + chunk // page_size)
