"""How short segments attend in plain MLX: those that see little together, others one by one.

Knows sizes; attends nothing itself.
"""

import numpy as np
from numpy.typing import NDArray

from .gather_attention import num_visible, plan_gather
from .run_attention import plan_runs
from .segments import Segments
from .short_plan import Part
from .window import AttentionWindow

SPAN_BYTES = (
    1 << 19
)  # gathered for one segment and layer, at most: operations of its own cost as much
STEP_BYTES = 1 << 25  # gathered for a layer, at most: what a step takes for a moment stays small


class PlainPlanner:
    """Plans the short segments of a layer group.

    Args:
        group: the layer group.
        window: what its layers keep.
        page_size: tokens a page.
        token_bytes: of keys and values of one layer, as they are attended to.
        decodes: a layer of it stores something else than vectors.
    """

    def __init__(
        self,
        group: int,
        window: AttentionWindow,
        page_size: int,
        *,
        token_bytes: int,
        decodes: bool,
    ) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size
        self._page_bytes = token_bytes * page_size
        self._decodes = decodes

    def __call__(self, segments: Segments, num_rows: int) -> list[Part]:
        """Some segments of a step of `num_rows` tokens in parts: their flat rows and their plan."""
        if self._window.size is None:  # what is seen of pages is what is sealed
            few = segments.memoised(("few", self._group), lambda: self._few(segments))
        else:
            few = self._few(segments)
        num_few = np.count_nonzero(few)
        if num_few < 2:
            return [self._alone(segments, num_rows)]
        if num_few == len(segments):
            return [self._together(segments, num_rows)]
        short, long = self._parts(segments, few)
        return [self._together(short, num_rows), self._alone(long, num_rows)]

    def _few(self, segments: Segments) -> NDArray[np.bool_]:
        """(B,) which segments see something, and little enough to be gathered."""
        pages = num_visible(segments, self._window, self._page_size)
        most = min(SPAN_BYTES, STEP_BYTES // len(segments)) // self._page_bytes
        few: NDArray[np.bool_] = (pages > 0) & (pages <= most)
        return few

    def _parts(self, segments: Segments, few: NDArray[np.bool_]) -> tuple[Segments, Segments]:
        """Those that are gathered, and the others."""
        short, long = segments.memoised(
            ("parts", few.tobytes()),
            lambda: (segments.some(np.flatnonzero(few)), segments.some(np.flatnonzero(~few))),
        )
        return short.at(segments.starts[few]), long.at(segments.starts[~few])

    def _together(self, segments: Segments, num_rows: int) -> Part:
        plan = plan_gather(segments, self._group, self._window, self._page_size, num_rows)
        return segments.tokens()[0], plan

    def _alone(self, segments: Segments, num_rows: int) -> Part:
        plan = plan_runs(
            segments, self._group, self._window, self._page_size, num_rows, self._decodes
        )
        return segments.tokens()[0], plan
