"""Which short spans attend how in plain MLX: those with little to see together, others one by one.

Knows sizes; attends nothing itself.
"""

import numpy as np
from numpy.typing import NDArray

from .gather_attention import num_visible, plan_gather
from .reach import Reach
from .run_attention import plan_runs
from .short_plan import Part
from .spans import ShortSpans

SPAN_BYTES = 1 << 19  # gathered for one span and layer, at most: operations of its own cost as much
STEP_BYTES = 1 << 25  # gathered for a layer, at most: what a step takes for a moment stays small


class PlainPlanner:
    """Plans the short spans of a layer group.

    Args:
        group: the layer group.
        reach: what its layers keep.
        page_size: tokens a page.
        token_bytes: of keys and values of one layer, as they are attended to.
        decodes: a layer of it stores something else than vectors.
    """

    def __init__(
        self, group: int, reach: Reach, page_size: int, *, token_bytes: int, decodes: bool
    ) -> None:
        self._group = group
        self._reach = reach
        self._page_size = page_size
        self._page_bytes = token_bytes * page_size
        self._decodes = decodes

    def __call__(self, spans: ShortSpans, num_rows: int) -> list[Part]:
        """Some spans of a step of `num_rows` tokens in parts: their flat rows and their plan."""
        if self._reach.window is None:  # what is seen of pages is what is sealed
            few = spans.lasting(("few", self._group), lambda: self._few(spans))
        else:
            few = self._few(spans)
        num_few = np.count_nonzero(few)
        if num_few < 2:
            return [self._alone(spans, num_rows)]
        if num_few == len(spans):
            return [self._together(spans, num_rows)]
        short, long = self._parts(spans, few)
        return [self._together(short, num_rows), self._alone(long, num_rows)]

    def _few(self, spans: ShortSpans) -> NDArray[np.bool_]:
        """(B,) which spans see something, and little enough to be gathered."""
        pages = num_visible(spans, self._reach, self._page_size)
        most = min(SPAN_BYTES, STEP_BYTES // len(spans)) // self._page_bytes
        few: NDArray[np.bool_] = (pages > 0) & (pages <= most)
        return few

    def _parts(self, spans: ShortSpans, few: NDArray[np.bool_]) -> tuple[ShortSpans, ShortSpans]:
        """Those that are gathered, and the others."""
        short, long = spans.lasting(
            ("parts", few.tobytes()),
            lambda: (spans.some(np.flatnonzero(few)), spans.some(np.flatnonzero(~few))),
        )
        return short.at(spans.starts[few]), long.at(spans.starts[~few])

    def _together(self, spans: ShortSpans, num_rows: int) -> Part:
        plan = plan_gather(spans, self._group, self._reach, self._page_size, num_rows)
        return spans.tokens()[0], plan

    def _alone(self, spans: ShortSpans, num_rows: int) -> Part:
        plan = plan_runs(spans, self._group, self._reach, self._page_size, num_rows, self._decodes)
        return spans.tokens()[0], plan
