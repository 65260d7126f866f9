"""Which states of recurrent layers are kept as snapshots, and where. No MLX."""

from collections.abc import Callable

from ..cache.inputs import CacheWork
from ..cache.pages import StateGroup
from ..cache.prefix import Page, PageNames, PrefixCache, RestorePoint
from .batch import Sequence

ROLLING_TOKENS = 4096  # of a long prompt between two snapshots of its state; whole pages


class Snapshots:
    """Decides when recurrent states are snapshotted, and collects that work for the next step.

    A snapshot is as large as the KV of thousands of tokens, so few are taken:
    - in a long prompt every `ROLLING_TOKENS`, each replacing the one before;
    - at the last page boundary before the prompt's end;
    - where prompts part: at `Request.boundaries`, and where memory has more pages than snapshots;
    - where a sequence ends or is preempted.
    """

    def __init__(
        self,
        group: StateGroup,
        prefix: PrefixCache,
        names_of: Callable[[Sequence], PageNames],
        *,
        reuse: bool,
    ) -> None:
        self._group = group
        self._prefix = prefix
        self._names_of = names_of
        self._reuse = reuse
        self._boundaries: dict[Sequence, set[int]] = {}  # of running sequences
        self._rolling: dict[Sequence, Page] = {}  # the last one
        self._save: list[tuple[int, int]] = []  # slot, snapshot
        self._leave: list[int] = []  # slots
        self._resume: dict[Sequence, tuple[int, int]] = {}  # snapshot, slot

    def begin(self, sequence: Sequence, slot: int, point: RestorePoint) -> None:
        if point.state is not None and (number := point.state.ids[-1]) is not None:
            self._resume[sequence] = number, slot
        places = [*sequence.request.boundaries, sequence.num_prompt - 1]
        if point.num_matched > point.num_tokens:
            places.append(point.num_matched)
        size = self._prefix.page_size
        self._boundaries[sequence] = {place - place % size for place in places}

    def next_boundary(self, sequence: Sequence) -> int | None:
        if not self._reuse or sequence.request.prompt_logits:
            return None
        done = sequence.num_computed
        ahead = [place for place in self._boundaries[sequence] if place > done]
        rolling = (done // ROLLING_TOKENS + 1) * ROLLING_TOKENS
        ahead += [rolling] if rolling < sequence.num_prompt else []
        return min(ahead, default=None)

    def will_stop_at(self, sequence: Sequence, place: int) -> bool:
        """Plan a snapshot where another prompt will part; False: it is too late for that."""
        if place <= sequence.num_computed or sequence not in self._boundaries:
            return False
        self._boundaries[sequence].add(place)
        return True

    def settle(self, sequence: Sequence) -> None:
        """Take a snapshot if the step that was launched last ends at a boundary."""
        place = sequence.num_computed
        if place != sequence.num_sealed or not sequence.started:
            return
        if place in self._boundaries[sequence]:
            self.snapshot(sequence, place)
        elif place % ROLLING_TOKENS == 0:
            before = self._rolling.pop(sequence, None)
            taken = self.snapshot(sequence, place)
            if taken is not None:
                self._rolling[sequence] = taken
            if before is not None:
                self._prefix.remove_state(before)

    def snapshot(self, sequence: Sequence, place: int) -> Page | None:
        """Keep the state of a sequence, of which memory has the tokens up to `place`.

        None: the state is at another place, there is a snapshot already, or there is no room.
        """
        if not sequence.started or place != sequence.num_computed or not place:
            return None
        names, request = self._names_of(sequence), sequence.request
        taken = self._prefix.add_state(names, place, request.page_priority, request.tenant)
        if taken is not None and (number := taken.ids[-1]) is not None:
            self._save.append((sequence.slot, number))
        return taken

    def end(self, sequence: Sequence) -> None:
        self._leave.append(sequence.slot)
        self._resume.pop(sequence, None)
        self._boundaries.pop(sequence, None)
        self._rolling.pop(sequence, None)

    def take(self, work: CacheWork) -> list[Sequence]:
        """Add the work on states to that of the next step; returns the sequences that resume."""
        resumed = list(self._resume)
        work.save, work.leave = self._save, self._leave
        work.resume = list(self._resume.values())
        work.drop = self._group.take_dropped()
        self._save, self._leave, self._resume = [], [], {}
        return resumed

    def forget(self) -> None:
        self._group.take_dropped()
        self._save, self._leave, self._resume = [], [], {}
