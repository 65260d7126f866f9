"""How prompts share the prefill budget of a step. Pure arithmetic; knows no pages' places.

A chunk ends at a page boundary unless it ends the prompt. A quarter of the budget is for the oldest
prompt, so that it is never starved; the rest goes to the shortest first, so that a short question
does not wait behind a long document.
"""

from collections.abc import Sequence as Seq

from .sequence import Sequence


def prefill_shares(
    prefilling: Seq[Sequence], budget: int, page_size: int
) -> list[tuple[Sequence, int]]:
    """Tokens of the next step for each prompt that gets any.

    Args:
        prefilling: oldest first.
        budget: tokens, all prompts together; at least a page.
        page_size: tokens a page.
    """
    if not prefilling:
        return []
    oldest = prefilling[0]
    shares = {oldest: _chunk(oldest, max(budget // 4, page_size), page_size)}
    budget -= shares[oldest]
    for sequence in sorted(prefilling[1:], key=lambda s: s.num_left):
        shares[sequence] = _chunk(sequence, budget, page_size)
        budget -= shares[sequence]
    shares[oldest] = _chunk(oldest, shares[oldest] + budget, page_size)
    return [(sequence, count) for sequence, count in shares.items() if count]


def _chunk(sequence: Sequence, limit: int, page_size: int) -> int:
    """Tokens of the next chunk: all that is left, or as many as end at a page boundary."""
    if sequence.num_left <= limit:
        return sequence.num_left
    stop = sequence.num_computed + limit
    return max(limit - stop % page_size, 0)
