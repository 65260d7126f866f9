"""Proposals of a predictor that goes on from the model's hidden states: MTP modules and EAGLE-3.

A predictor runs as a draft model does, with pages and a prefix cache of its own, one position
behind the model: at position i it reads the model's hidden states there and the token at i + 1.
The hidden states come from the steps of the model as they are read. They are kept until the
predictor has written its pages; where more than `FOLLOW_AT` wait, as in a long prompt or while
nothing is proposed, the predictor runs over whole pages of them at once.

A prefix that the model reuses has no hidden states. If the predictor's own prefix cache has that
prefix, the predictor goes on from it; otherwise it begins at the first position with hidden states:
its proposals are somewhat worse then, and no token changes.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import mlx.core as mx

from ..config import EngineConfig
from ..engine.batch import MAX_SHORT, Batch, Sequence
from ..engine.kernels import Chooser, choose_none
from ..engine.runner import Launched
from ..models.predictor import Predictor
from .draft import Counterpart, DraftProposer

FOLLOW_AT = 256  # positions of a sequence that wait until the predictor runs over them

Row = tuple[mx.array, int]  # an array (n, width) and a row of it


@dataclass(slots=True)
class HeldStates:
    """Hidden states of consecutive positions of a sequence."""

    start: int  # position of the first
    rows: list[Row] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def put(self, start: int, rows: list[Row]) -> None:
        """Keep those of a step that began at a position; what stood there before was rejected."""
        if not self.start <= start <= self.stop:
            self.start, self.rows = start, []
        self.rows[start - self.start :] = rows

    def drop_before(self, position: int) -> None:
        count = min(max(position - self.start, 0), len(self.rows))
        del self.rows[:count]
        self.start += count

    def taken(self, count: int) -> mx.array:
        """(count, width) the hidden states of the first positions."""
        runs = _runs([(row, False) for row in self.rows[:count]])
        parts = [array[mx.array(places)] for array, places, _ in runs]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def compact(self) -> None:
        """Copy what is left, so that the arrays of long steps can go."""
        parts = [
            array[mx.array(places)] for array, places, _ in _runs([(r, False) for r in self.rows])
        ]
        mx.async_eval(parts)
        self.rows = [(part, row) for part in parts for row in range(part.shape[0])]


def keep_states(held: dict[Sequence, HeldStates], batch: Batch, hidden: mx.array) -> None:
    """Keep the hidden states (T, taps * hidden) of a step, of sequences that speculate."""
    starts = batch.decodes.segments.starts.tolist()
    parts = [(s, starts[row], row, 1) for row, s in enumerate(batch.decodes.sequences)]
    parts += [(s.sequence, s.start, s.row, s.num_tokens) for s in batch.ragged]
    for sequence, start, row, count in parts:
        if sequence.request.params.speculate and not sequence.finished:
            if sequence not in held:
                held[sequence] = HeldStates(start)
            held[sequence].put(start, [(hidden, row + i) for i in range(count)])


class PredictorProposer(DraftProposer):
    """Runs a predictor for all sequences of a step at once.

    Args:
        head: an MTP module or an EAGLE-3 draft.
        config: sizes; its budget is for the predictor's KV cache alone.
        vocab_size, cost, kernels, rejects: see `DraftProposer`.
    """

    def __init__(
        self,
        head: Predictor,
        config: EngineConfig,
        *,
        name: str,
        vocab_size: int,
        cost: float,
        kernels: Chooser = choose_none,
        rejects: bool = False,
    ) -> None:
        self.name = name
        super().__init__(
            head, config, vocab_size=vocab_size, cost=cost, kernels=kernels, rejects=rejects
        )
        self.taps = head.taps
        self._head = head
        self._held: dict[Sequence, HeldStates] = {}
        self._follows: dict[Sequence, Sequence] = {}  # own sequence -> the model's
        self._output: mx.array | None = None  # (T, hidden) of the predictor's last step
        self._output_rows: dict[Sequence, int] = {}  # own sequence -> row of its last position
        self._ahead: Launched | None = None  # the last step that nothing waits for

    def take(self, batch: Batch, hidden: mx.array) -> None:
        """Keep the hidden states (T, taps * hidden) of a step, and follow where many wait."""
        keep_states(self._held, batch, hidden)
        waiting = [s for s in batch.sequences if s.slot >= 0 and self._num_waiting(s) > FOLLOW_AT]
        if not waiting:
            return
        try:
            self._follow_pages(waiting)
        except BaseException:  # as in `propose`
            self._start_afresh()
            raise

    def end(self, sequence: Sequence) -> None:
        """Keep what was computed as a prefix, and forget the hidden states."""
        super().end(sequence)
        self._held.pop(sequence, None)

    # -- following ------------------------------------------------------------------------------

    def _num_kept(self, drawn: list[int], new: list[int]) -> int:
        """None: keys of proposals come from the predictor's states, and the model's are better."""
        return 0

    def _begin(self, sequence: Sequence, keep: dict[Sequence, int]) -> Counterpart | None:
        held = self._held.get(sequence)
        if held is None or not held.rows:
            return None
        # The predictor's result at its first position depends on the token before it, too.
        # Hidden states depend on pictures, which its token ids do not tell apart.
        seen = [picture.digest.hex() for picture, _ in sequence.request.pictures]
        salt = f"{sequence.token_ids[0]} {sequence.namespace} {' '.join(seen)}"
        counterpart = self._begin_at(sequence, keep, 1, salt)
        if counterpart is None or held.start <= counterpart.drafted.num_computed:
            return self._known_as(sequence, counterpart)
        self._release(sequence)
        salt = f"{sequence.request.id} from {held.start}"  # shared with nothing
        return self._known_as(sequence, self._begin_at(sequence, keep, held.start + 1, salt))

    def _known_as(self, sequence: Sequence, counterpart: Counterpart | None) -> Counterpart | None:
        if counterpart is not None:
            self._follows[counterpart.drafted] = sequence
        return counterpart

    def _follow(
        self, sequence: Sequence, depth: int, keep: dict[Sequence, int]
    ) -> Counterpart | None:
        """Follow, and drop hidden states of positions whose keys and values are in pages."""
        held, before = self._held.get(sequence), self._counterparts.get(sequence)
        if before is not None and (held is None or held.start > self._position(before)):
            self._release(sequence)
        counterpart = super()._follow(sequence, depth, keep)
        if counterpart is not None and held is not None:
            held.drop_before(counterpart.drafted.num_sealed + counterpart.offset - 1)
        return counterpart

    def _release(self, sequence: Sequence) -> None:
        super()._release(sequence)
        self._follows = {drafted: s for drafted, s in self._follows.items() if drafted.slot >= 0}

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._follows.clear()
        self._held.clear()
        self._output_rows.clear()
        self._output = self._ahead = None

    def _position(self, counterpart: Counterpart) -> int:
        return counterpart.drafted.num_sealed + counterpart.offset - 1

    def _num_waiting(self, sequence: Sequence) -> int:
        held, counterpart = self._held.get(sequence), self._counterparts.get(sequence)
        if held is None:
            return 0
        begin = held.start if counterpart is None else self._position(counterpart)
        return held.stop - max(begin, held.start)

    def _follow_pages(self, sequences: list[Sequence]) -> None:
        size = self._config.page_size
        keep = dict.fromkeys(sequences, 0)
        counts: dict[Sequence, int] = {}  # by own sequence
        for sequence in sequences:
            counterpart = self._follow(sequence, 0, keep)
            if counterpart is None:
                self._held[sequence].drop_before(self._held[sequence].stop - FOLLOW_AT)
                continue
            drafted = counterpart.drafted
            stop = self._held[sequence].stop - counterpart.offset + 1
            stop = min(stop, len(drafted.token_ids) - 1) // size * size
            if stop - drafted.num_computed > MAX_SHORT:
                counts[drafted] = stop - drafted.num_computed
        if not counts:
            return
        moves = self._seal_tails([], list(counts))
        batch = self._made([], list(counts.items()), moves)
        self._ahead = self._launch(batch, self._ahead)
        self._num_steps += 1
        for drafted in counts:
            sequence = self._follows[drafted]
            self._held[sequence].drop_before(self._position(self._counterparts[sequence]))
            self._held[sequence].compact()

    # -- steps of the predictor ------------------------------------------------------------------

    def _launch(self, batch: Batch, previous: Launched | None) -> Launched:
        self._head.feed(self._inputs(batch))
        launched = super()._launch(batch, self._ahead if previous is None else previous)
        self._output, self._ahead = self._head.output, None
        self._output_rows = {drafted: row for row, drafted in enumerate(batch.decodes.sequences)}
        for segment in batch.ragged:
            self._output_rows[segment.sequence] = segment.row + segment.num_tokens - 1
        return launched

    def _inputs(self, batch: Batch) -> mx.array:
        """(T, hidden) that the rows of a counted step read: the model's, or the predictor's own."""
        rows: list[tuple[Row, bool]] = []  # and whether the row is the predictor's own
        starts = batch.decodes.segments.starts.tolist()
        for drafted, start in zip(batch.decodes.sequences, starts, strict=True):
            if drafted.num_pending > 1:  # its token was drawn in the step before
                assert self._output is not None
                rows.append(((self._output, self._output_rows[drafted]), True))
            else:
                rows += self._of_model(drafted, start, 1)
        for segment in batch.ragged:
            rows += self._of_model(segment.sequence, segment.start, segment.num_tokens)
        pieces = []
        for array, places, is_own in _runs(rows):
            whole = len(places) == array.shape[0] and places == list(range(len(places)))
            part = array if whole else array[mx.array(places)]
            pieces.append(part if is_own else self._head.enter(part))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _of_model(self, drafted: Sequence, start: int, count: int) -> list[tuple[Row, bool]]:
        sequence = self._follows[drafted]
        held = self._held[sequence]
        first = start + self._counterparts[sequence].offset - 1 - held.start
        assert 0 <= first <= len(held.rows) - count, "hidden states are missing"
        return [(row, False) for row in held.rows[first : first + count]]


def _runs(rows: Seq[tuple[Row, bool]]) -> list[tuple[mx.array, list[int], bool]]:
    runs: list[tuple[mx.array, list[int], bool]] = []
    for (array, place), is_own in rows:
        if runs and runs[-1][0] is array and runs[-1][2] == is_own:
            runs[-1][1].append(place)
        else:
            runs.append((array, [place], is_own))
    return runs
