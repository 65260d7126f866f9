"""The states of recurrent layers as integers, kept and moved as the real ones are. Knows no queues.

What is given up is gone at once: going on from it fails.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

from simulator.oracle import NO_STATE, State, next_state

from mlxinfer.cache.inputs import CacheWork


class FakeStates:
    """States by slot, and snapshots by number."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """After a fault nothing that was there is there."""
        self._states: dict[int, State] = {}
        self._snapshots: dict[int, State] = {}
        self._trails: dict[int, list[State]] = {}  # after each token of the last step
        # Of steps with proposals, oldest first; and the slots that have them.
        self._undoable: deque[tuple[dict[int, list[State]], Sequence[int]]] = deque()

    def save(self, work: CacheWork) -> None:
        """Snapshots, before anything is read out."""
        for slot, snapshot in work.save:
            assert snapshot not in self._snapshots, "a number is used twice"
            self._snapshots[snapshot] = self._states[slot]
            for trails, verified in self._undoable:
                if slot in verified and trails[slot][-1] is self._states[slot]:
                    self._snapshots[snapshot] = trails[slot][0]  # no proposal of it counts

    def finish(self, work: CacheWork) -> None:
        """Slots change hands, and what was given up goes."""
        for slot in work.leave:
            self._states.pop(slot, None)
        for snapshot, slot in work.resume:
            self._states[slot] = self._snapshots[snapshot]
        for snapshot in work.drop:
            self._snapshots.pop(snapshot, None)

    def read(self, snapshot: int) -> bytes:
        return array("q", self._snapshots[snapshot]).tobytes()

    def load(self, snapshot: int, payload: memoryview) -> None:
        first, last = array("q", payload.tobytes())
        self._snapshots[snapshot] = first, last

    def state(self, snapshot: int) -> State:
        return self._snapshots[snapshot]

    # -- a step ----------------------------------------------------------------------------------

    def begin_step(self, verified: Sequence[int]) -> None:
        self._trails = {}
        if verified:
            self._undoable.append((self._trails, verified))

    def run(self, layer: int, slot: int, inputs: Sequence[int]) -> list[int]:
        """A layer over the new tokens of a sequence: its state after each."""
        trail = self._trails.setdefault(slot, [self._states.get(slot, NO_STATE)] * len(inputs))
        state = self._states.get(slot, NO_STATE)[layer]
        states = []
        for i, x in enumerate(inputs):
            state = next_state(state, layer, x)
            states.append(state)
            trail[i] = (state, trail[i][1]) if layer == 0 else (trail[i][0], state)
        return states

    def end_step(self) -> None:
        for slot, trail in self._trails.items():
            self._states[slot] = trail[-1]

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """Go back to the tokens that were kept, of the oldest step that verifies."""
        trails = self._undoable.popleft()[0] if num_kept else {}
        for slot, kept in num_kept.items():
            if self._states.get(slot) is trails[slot][-1]:  # else it changed hands
                self._states[slot] = trails[slot][kept - 1]
