"""Layer groups: layers that keep the same thing under the same rule. Pure Python; no arrays.

A page group keeps a vector or more for each token, in pages: attention or latent attention, over
all positions or a window with sinks.
"""

from dataclasses import dataclass

from .page_table import PageTable
from .pages import PageAllocator
from .window import AttentionWindow

ENDLESS = 2**31  # more tokens than any sequence has


@dataclass(slots=True)
class PageGroup:
    """Layers that keep the same positions of every sequence, and so share page tables.

    Args:
        window: which positions a token sees.
        allocator: of the group's pages.
        page_size: tokens a page.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        page_bytes: of a page, all layers together.
    """

    window: AttentionWindow
    allocator: PageAllocator
    page_size: int
    prefill_chunk: int
    page_bytes: int

    @property
    def num_kept(self) -> int:
        """Pages at the front that are never recycled: they hold sinks."""
        return self.window.kept_pages(self.page_size)

    @property
    def recycles(self) -> bool:
        """Whether pages of a running sequence ever become free."""
        return self.num_skippable(ENDLESS) > 0

    def num_skippable(self, num_tokens: int) -> int:
        """Positions, from the sinks on, that no token after the first `num_tokens` needs."""
        return self.window.lowest(num_tokens)

    def first_page(self, num_tokens: int) -> int:
        """Number of the first page, after the sinks', that a later token needs."""
        return self.num_skippable(num_tokens) // self.page_size

    def needed_pages(self, num_tokens: int) -> list[int]:
        """Numbers of the whole pages that are needed to go on after `num_tokens` positions."""
        first = self.first_page(num_tokens)
        return [*range(min(self.num_kept, first)), *range(first, num_tokens // self.page_size)]

    def max_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` holds at once, at most."""
        return self.window.max_pages(num_tokens, self.prefill_chunk, self.page_size)

    def begin(self, restored: int, num_known: int) -> int:
        """Positions to have pages for when a sequence of `num_known` tokens begins.

        All that are known where none is ever recycled, so that a prompt lies in one run of pages;
        else those that are restored.
        """
        return restored if self.recycles else num_known

    def commit(self, table: PageTable, num_tokens: int) -> list[int]:
        """Recycle pages that no token after the first `num_tokens` needs; they are returned."""
        return table.drop_before(self.first_page(num_tokens))
