"""Proposals of a DFlash draft: a block of tokens in one pass, for all sequences of a step.

The draft keeps its own keys and values for positions whose hidden states the model's steps gave.
Each sequence has its own arrays. Pages of a causal cache would not do, because rows of a block see
each other. Nothing is ever taken back from them, since only verified positions are kept. Hidden
states of a cached prefix are not there; the block is proposed without them.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx

from ..config import EngineConfig
from ..engine.batch import Batch, Sequence
from ..engine.proposals import Proposal
from ..models.dflash import BlockDraft, KeysValues
from .controller import Key
from .draft import keys_within
from .predictor import FOLLOW_AT, HeldStates, keep_states
from .speculation import ProposalSource

NAME = "dflash"
PRIORS = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
GROWN_BY = 256  # positions that arrays have more room for


class Context:
    """Keys and values of one sequence, by layer, for positions from `start` to `stop`."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self._room: list[KeysValues] = []

    def extend(self, new: Seq[KeysValues]) -> None:
        count, length = new[0][0].shape[1], self.stop - self.start
        have = self._room[0][0].shape[1] if self._room else 0
        if not self._room:
            self._room = [(k[:, :0], v[:, :0]) for k, v in new]
        if length + count > have:
            more = -(-(length + count - have) // GROWN_BY) * GROWN_BY
            self._room = [(_grown(keys, more), _grown(values, more)) for keys, values in self._room]
        for keys_values, added in zip(self._room, new, strict=True):
            for array, part in zip(keys_values, added, strict=True):
                array[:, length : length + count] = part
        self.stop += count

    def layers(self) -> list[KeysValues]:
        """(kv_heads, S, head_dim) each."""
        length = self.stop - self.start
        return [(k[:, :length], v[:, :length]) for k, v in self._room]

    def arrays(self) -> list[mx.array]:
        return [array for keys_values in self._room for array in keys_values]


class BlockProposer(ProposalSource):
    """Runs a block draft for all sequences of a step at once.

    Args:
        config: its budget is for the contexts of all sequences; the one used least goes first.
        cost: of a block, in plain steps of the model, as long as it was not measured.
    """

    name = NAME

    def __init__(
        self, draft: BlockDraft, config: EngineConfig, *, vocab_size: int, cost: float
    ) -> None:
        self.taps: Seq[int] = draft.taps
        self.cost = cost
        self.priors = {(NAME, place): chance for place, chance in enumerate(PRIORS)}
        self._draft = draft
        self._vocab_size = vocab_size
        self._max_context = config.max_context
        numbers = sum(spec.numbers for spec in draft.cache_specs)
        self._room = config.kv_budget_bytes // (numbers * draft.activation_dtype.size)  # positions
        self._held: dict[Sequence, HeldStates] = {}
        self._contexts: OrderedDict[Sequence, Context] = OrderedDict()  # last used last
        self._num_steps = 0

    def take(self, batch: Batch, hidden: mx.array) -> None:
        """Keep the hidden states (T, taps * hidden) of a step, and follow where many wait."""
        keep_states(self._held, batch, hidden)
        for sequence in batch.sequences:
            held = self._held.get(sequence)
            if held is not None and len(held.rows) > FOLLOW_AT:
                self._follow(sequence, len(sequence.token_ids))
                mx.async_eval(self._contexts[sequence].arrays())

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        """Keys of as many proposals as a block has, where the context has room."""
        most = min(depth, self._draft.block_size - 1, len(PRIORS))
        return keys_within(NAME, sequences, most, self._max_context)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        rows = [s for s in sequences if self._follow(s, len(s.token_ids) - 1)]
        by_sequence: dict[Sequence, list[int]] = {}
        if rows:
            self._num_steps += 1
            contexts = [self._contexts[s].layers() for s in rows]
            newest, places = [s.token_ids[-1] for s in rows], [len(s.token_ids) - 1 for s in rows]
            tokens: Any = self._draft.propose(newest, places, contexts, max(depths)).tolist()
            by_sequence = dict(zip(rows, tokens, strict=True))
        proposed = [
            by_sequence.get(s, [])[:depth] for s, depth in zip(sequences, depths, strict=True)
        ]
        return [Proposal([t for t in ids if t < self._vocab_size]) for ids in proposed]

    def end(self, sequence: Sequence) -> None:
        self._held.pop(sequence, None)
        self._contexts.pop(sequence, None)

    def stats(self) -> dict[str, Any]:
        return {
            "steps": self._num_steps,
            "sequences": len(self._contexts),
            "positions_kept": sum(c.stop - c.start for c in self._contexts.values()),
            "weights_bytes": self._draft.num_bytes,
        }

    def _follow(self, sequence: Sequence, stop: int) -> bool:
        """Take over hidden states; whether there are some, and none is missing before `stop`.

        Args:
            stop: one past the last position with a token that was verified, and then computed.
        """
        held, context = self._held.get(sequence), self._contexts.get(sequence)
        if held is None:
            return context is not None and context.stop >= stop
        if context is None or held.start > context.stop:  # positions are missing: begin anew
            context = self._contexts[sequence] = Context(held.start)
        self._contexts.move_to_end(sequence)
        held.drop_before(context.stop)
        count = min(held.stop, stop) - context.stop
        if count > 0 and self._make_room(sequence, count):
            tapped = held.taken(count)
            context.extend(self._draft.context(tapped, context.stop))
            held.drop_before(context.stop)
        if not held.rows:
            del self._held[sequence]
        return context.start < context.stop and context.stop >= stop

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Drop contexts that were not used for longest; False: it alone is too long."""
        num_held = sum(c.stop - c.start for c in self._contexts.values())
        while num_held + count > self._room:
            oldest, context = next(iter(self._contexts.items()))
            if oldest is sequence:
                return False
            num_held -= context.stop - context.start
            del self._contexts[oldest]
        return True


def _grown(array: mx.array, more: int) -> mx.array:
    """(heads, S, dim) with room for more positions."""
    return mx.pad(array, [(0, 0), (0, more), (0, 0)])
