"""Finds the kernel that wrote NaN or infinities, by halving, while requests go on.

Knows kinds of kernels by name only. Where a step was not finite, its requests start over in plain
MLX. If they get past that place, kernels are at fault: half of them are used again. Those that then
serve some steps are cleared, and those that fail are halved. A kind that fails alone is named, left
out and remembered.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import RequestFailedError
from .batch import Batch
from .batch import Sequence as Running
from .kernels import Kernels

logger = logging.getLogger("mlxinfer.kernels")
CLEAN_STEPS = 8  # after which the kinds that served them are cleared
MAX_OF_MODEL = 3  # times that plain MLX gave NaN too: then the model is known to do so

Tell = Callable[[Sequence[str], str], None]


class Suspects:
    """Which kinds of kernels are left out now.

    Args:
        tell: lets other ranks leave out the same kinds, see `Followers.leave_out`.

    Attributes:
        kinds: that are suspected, in the order of their trials. While there are any, nothing is
            kept beyond this process.
        of_model: times that a step without kernels was not finite.
    """

    def __init__(self, kernels: Kernels, tell: Tell) -> None:
        self._kernels, self._tell = kernels, tell
        self._all: list[str] = []  # that were in use when it began
        self._cleared: set[str] = set()
        self.kinds: list[str] = []
        self._trial: list[str] = []  # of the suspects: used now, or when the last step failed
        self._waiting: dict[Running, int] = {}  # tokens known when it failed; not got past that
        self._shape: set[str] = set()  # of the step that failed
        self._num_clean = Counter[str]()  # by part of a shape
        self.of_model = 0

    def met(self, batch: Batch, sequences: Sequence[Running]) -> bool:
        """A step gave numbers that are not finite in these sequences.

        Returns:
            Whether the running requests are to start over, now in plain MLX; False: the model
            itself gives such numbers.
        """
        if self._waiting:  # plain MLX gave them
            self._end_plain(is_model=True)
            return False
        if not self.kinds:
            if self.of_model >= MAX_OF_MODEL or not self._kernels.kinds:
                return False
            self._all = self.kinds = self._trial = sorted(self._kernels.kinds)
            self._cleared = set()
        self._shape = _shape(batch)
        self._waiting = {sequence: len(sequence.token_ids) for sequence in sequences}
        self._leave_out(self._all)
        return True

    def passed(self, batch: Batch) -> None:
        if self._waiting:
            self._waiting = {
                s: n for s, n in self._waiting.items() if not s.finished and len(s.token_ids) <= n
            }
            if not self._waiting:
                self._end_plain(is_model=False)
        elif self.kinds:
            self._num_clean.update(_shape(batch))
            if all(self._num_clean[part] >= CLEAN_STEPS for part in self._shape):
                self._cleared.update(self._trial)
                self._try([kind for kind in self.kinds if kind not in self._trial])
            if not self.kinds:
                logger.warning("Numbers that are not finite did not come again: no kernel is named")

    def _end_plain(self, *, is_model: bool) -> None:
        """Plain MLX got past the place: the kernels on trial are at fault; or it did not."""
        self._waiting = {}
        if is_model:
            self.of_model += 1
            first = self._trial == self.kinds and len(self._trial) > 1
            self._try([] if first else self.kinds, [] if first else self._trial)
        elif len(self._trial) > 1:
            self._try(self._trial)
        else:
            self._name(self._trial[0])

    def _try(self, suspects: Sequence[str], trial: Sequence[str] = ()) -> None:
        """Use half of the suspects, or `trial`; without suspects, all kernels are used again."""
        self.kinds, self._num_clean = list(suspects), Counter()
        self._trial = list(trial or self.kinds[: -(-len(suspects) // 2)])
        used = {*self._cleared, *self._trial} if suspects else set(self._all)
        self._leave_out([kind for kind in self._all if kind not in used])

    def _name(self, kind: str) -> None:
        logger.error(
            "The Metal kernel %s gave NaN or infinities where plain MLX gives none. It is not used "
            "any more on this machine; the requests went on in plain MLX.",
            kind,
        )
        self.kinds = self._trial = []
        self._kernels.condemn(kind)
        self._leave_out([], faulty=kind)

    def _leave_out(self, kinds: Sequence[str], faulty: str = "") -> None:
        self._kernels.leave_out(kinds)
        self._tell(kinds, faulty)


def _shape(batch: Batch) -> set[str]:
    widths = [segment.num_tokens for segment in batch.short]
    parts = {
        "single tokens": bool(batch.decodes.sequences) or 1 in widths,
        "several tokens": any(width > 1 for width in widths),
        "pieces of prompts": bool(batch.long),
    }
    return {name for name, is_there in parts.items() if is_there}


def not_finite_error(sequence: Running, *, is_half: bool) -> RequestFailedError:
    """The error of a request for which plain MLX gives NaN or infinities too."""
    advice = "Its weights may be damaged: download it again."
    if is_half:
        advice = "They may have outgrown float16: try dtype='bfloat16'."
    return RequestFailedError(
        f"The model's numbers are NaN or infinite after {len(sequence.token_ids)} tokens, also "
        f"without Metal kernels. {advice}"
    )
