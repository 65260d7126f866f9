"""Proposals of a draft model: a small checkpoint with the same tokens runs ahead of the model.

It has a KV cache and a prefix cache of its own, made of the same parts as the model's, within a
share of the same budget. Each running sequence has a counterpart here, which follows its tokens.
Rejected proposals are taken back. Missing tokens are computed in short steps, all sequences
together. Sources: Leviathan et al., "Fast inference from transformers via speculative decoding",
2023; Chen et al., "Accelerating large language model decoding with speculative sampling", 2023.

Tokens are drawn with the settings of the request, and with the random number that the model uses at
the same place. So if both distributions are alike, both mostly draw the same token.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..cache.inputs import Move
from ..cache.prefix import common_length
from ..config import EngineConfig
from ..core import Request, SamplingParams
from ..engine.batch import MAX_SHORT, Batch, DecodeBatch, Segment, Sequence, namespace_of
from ..engine.kernels import Chooser, choose_none
from ..engine.parts import EngineParts
from ..engine.prefill import prefill_shares
from ..engine.proposals import Proposal
from ..engine.runner import Launched
from ..models.language import LanguageModel
from ..sampling.sampler import Sampler
from .controller import Key
from .speculation import ProposalSource

NAME = "draft"
PRIOR = 0.7  # chance that a proposal holds
MAX_DEPTH = 8
PREFILL_STEPS = 2  # of long segments for one round of proposals; the rest has its turn later
PREFILL_TOKENS = 256  # of such a step: answers wait for it


@dataclass(slots=True)
class Counterpart:
    """The sequence in the draft model's cache that follows a sequence of the model."""

    drafted: Sequence  # the tokens of the model's sequence, and proposals after them
    num_followed: int  # of them, tokens of the model's sequence
    offset: int = 0  # tokens at the beginning of the model's sequence that are left out


class DraftProposer(ProposalSource):
    """Runs a draft model for all sequences of a step at once.

    Args:
        config: sizes; its budget is for the draft's KV cache alone.
        vocab_size: of the model that tokens are proposed for.
        cost: of a proposal, in plain steps of that model, as long as it was not measured.
        kernels: says which Metal kernels may be used.
        rejects: proposals are accepted by rejection sampling: they are drawn with random numbers
            of their own, and come with the weights that they were drawn with. Else they are drawn
            with the model's random numbers, to be compared with its tokens.

    Recurrent layers go back to the state behind the last token that the model gave: it is kept
    before proposals are drawn, and what the model gave of them is computed again.
    """

    name = NAME

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        vocab_size: int,
        cost: float,
        kernels: Chooser = choose_none,
        rejects: bool = False,
    ) -> None:
        self.cost = cost
        self.priors = {(self.name, place): PRIOR for place in range(MAX_DEPTH)}
        self._states: dict[Sequence, Any] = {}  # of own sequences, without proposals
        self._model = model
        self._vocab_size = vocab_size
        self._max_context = config.max_context
        self._parts = EngineParts(model, config, kernels=kernels)
        self._config = config
        self._rejects = rejects
        self._weights: dict[Sequence, list[mx.array]] = {}  # of own sequences, by proposal
        self._set_sampler()
        self._counterparts: OrderedDict[Sequence, Counterpart] = OrderedDict()  # last used last
        # A heap: low slots first keeps tails small.
        self._free_slots = list(range(self._parts.cache.max_batch))
        self._admitted: list[Sequence] = []
        self._num_steps = 0

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        return keys_within(self.name, sequences, depth, self._max_context)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        try:
            return self._propose(sequences, depths)
        except BaseException:  # a half-done step leaves the cache unusable
            self._start_afresh()
            raise

    def end(self, sequence: Sequence) -> None:
        """Keep what was computed as a prefix, and give up the slot."""
        if sequence in self._counterparts:
            self._release(sequence)

    def stats(self) -> dict[str, Any]:
        """Steps of the draft model, and its KV cache."""
        cache = self._parts.cache
        return {
            "steps": self._num_steps,
            "sequences": len(self._counterparts),
            "kv_bytes_allocated": cache.bytes_allocated,
            "weights_bytes": self._model.num_bytes,
        }

    # -- following the model's sequences --------------------------------------------------------

    def _propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        for sequence in [s for s in self._counterparts if s.slot < 0]:  # preempted
            self._release(sequence)
        wanted = dict(zip(sequences, depths, strict=True))
        rows: dict[Sequence, tuple[Counterpart, int]] = {}
        for sequence, depth in wanted.items():
            followed = self._follow(sequence, depth, keep=wanted)
            if followed is not None:
                rows[sequence] = followed, depth
        drafts = [counterpart.drafted for counterpart, _ in rows.values()]
        self._parts.scheduler.kv_manager.settle(drafts)
        self._weights = {}
        self._run([(counterpart.drafted, depth) for counterpart, depth in rows.values()])
        return [self._proposal(*rows[s]) if s in rows else Proposal(()) for s in sequences]

    def _proposal(self, counterpart: Counterpart, depth: int) -> Proposal:
        drawn = counterpart.drafted.token_ids[counterpart.num_followed :][:depth]
        unknown = [i for i, token_id in enumerate(drawn) if token_id >= self._vocab_size]
        proposal = Proposal(drawn, self._weights.get(counterpart.drafted, ()))
        return proposal.cut(unknown[0]) if unknown else proposal

    def _follow(
        self, sequence: Sequence, depth: int, keep: dict[Sequence, int]
    ) -> Counterpart | None:
        """The counterpart with the tokens that are known now; None: there is no room for it."""
        counterpart = self._counterparts.get(sequence)
        if counterpart is not None:
            self._take_over(sequence, counterpart)
        else:
            counterpart = self._begin(sequence, keep)
        if counterpart is None:
            return None
        self._counterparts.move_to_end(sequence)
        drafted = counterpart.drafted
        if not self._parts.scheduler.kv_manager.extend(drafted, len(drafted.token_ids) + depth):
            self._release(sequence)
            return None
        return counterpart

    def _take_over(self, sequence: Sequence, counterpart: Counterpart) -> None:
        drafted, start = counterpart.drafted, counterpart.num_followed
        drawn, new = drafted.token_ids[start:], sequence.token_ids[start + counterpart.offset :]
        self._forget_drawn(drafted, start, self._num_kept(drawn, new))
        drafted.token_ids[start:] = new
        counterpart.num_followed = start + len(new)
        for token_id in new:
            self._parts.runner.sampler.observe([drafted.slot], [token_id])

    def _forget_drawn(self, drafted: Sequence, start: int, num_kept: int) -> None:
        """Go back to `num_kept` tokens after the first `start`."""
        state_group = self._parts.cache.state_group
        if drafted.num_computed > start and state_group is not None:
            state_group.put_back(drafted.slot, self._states[drafted])
            num_kept = 0
        drafted.num_computed = min(drafted.num_computed, start + num_kept)

    def _num_kept(self, drawn: list[int], new: list[int]) -> int:
        return common_length(drawn, new)

    def _begin(self, sequence: Sequence, keep: dict[Sequence, int]) -> Counterpart | None:
        """A new counterpart; None: there is no room, or tokens that the draft does not have."""
        return self._begin_at(sequence, keep, 0, sequence.request.cache_salt)

    def _begin_at(
        self, sequence: Sequence, keep: dict[Sequence, int], offset: int, salt: str | None
    ) -> Counterpart | None:
        """A new counterpart; others that this step does not need may have to go for it.

        Args:
            offset: number of its first tokens that are left out.
            salt: of the namespace in which prefixes are shared.
        """
        ids = sequence.token_ids[offset:]
        vocab_size = self._model.config.vocab_size
        if max(ids, default=vocab_size) >= vocab_size:
            return None
        request = Request(
            sequence.request.id,
            [],
            self._params(sequence.request.params),
            frozenset(i for i in sequence.request.stop_ids if i < vocab_size),
            cache_salt=salt,
            breakers=frozenset(i for i in sequence.request.breakers if i < vocab_size),
        )
        num_prompt = max(sequence.num_prompt - offset, 1)
        drafted = Sequence(request, self._max_context, ids, num_prompt)
        drafted.rope_variant = self._model.rope_variant(min(sequence.max_known, self._max_context))
        drafted.namespace = namespace_of(None, drafted.rope_variant, salt)
        begin = self._parts.scheduler.kv_manager.begin
        while not (self._free_slots and begin(drafted, slot=self._free_slots[0], spare=0)):
            unneeded = next((s for s in self._counterparts if s not in keep), None)
            if unneeded is None:
                return None
            self._release(unneeded)
        drafted.slot = heapq.heappop(self._free_slots)
        self._admitted.append(drafted)
        counterpart = self._counterparts[sequence] = Counterpart(drafted, len(ids), offset)
        return counterpart

    def _params(self, params: SamplingParams) -> SamplingParams:
        vocab_size = self._model.config.vocab_size
        biases = {i: bias for i, bias in params.logit_bias.items() if i < vocab_size}
        top_k = params.top_k if params.top_k < vocab_size else 0
        return replace(params, logprobs=None, logit_bias=biases, top_k=top_k)

    def _release(self, sequence: Sequence) -> None:
        """End a counterpart; what it computed of the model's tokens stays as a prefix."""
        counterpart = self._counterparts.pop(sequence)
        drafted = counterpart.drafted
        del drafted.token_ids[counterpart.num_followed :]
        self._forget_drawn(drafted, len(drafted.token_ids), 0)
        self._states.pop(drafted, None)
        if drafted in self._admitted:
            self._admitted.remove(drafted)
        self._parts.scheduler.kv_manager.end(drafted, keep=True)
        heapq.heappush(self._free_slots, drafted.slot)
        drafted.slot = -1

    def _start_afresh(self) -> None:
        """After a fault nothing that is cached can be trusted."""
        self._counterparts.clear()
        self._states.clear()
        self._admitted.clear()
        self._parts.assemble()
        self._set_sampler()
        self._free_slots = list(range(self._parts.cache.max_batch))

    def _set_sampler(self) -> None:
        """Draw proposals with random numbers of their own, for rejection sampling."""
        if self._rejects:
            vocab_size = self._model.config.vocab_size
            self._parts.runner.sampler = Sampler(vocab_size, proposes=True)

    # -- steps of the draft model ---------------------------------------------------------------

    def _run(self, rows: list[tuple[Sequence, int]]) -> None:
        """Launch steps until each sequence has its proposals, then read them all."""
        previous: Launched | None = None
        launched: list[Launched] = []
        left = PREFILL_STEPS
        while (
            batch := self._next_batch(rows, first=not launched, may_prefill=left > 0)
        ) is not None:
            left -= bool(batch.long)
            previous = self._launch(batch, previous)
            state_group = self._parts.cache.state_group
            for drafted in batch.sampling.sequences:
                # The next steps are of proposals.
                if state_group is not None and drafted.num_pending == 1:
                    self._states[drafted] = state_group.held(drafted.slot)
            launched.append(previous)
        self._num_steps += len(launched)
        for step in launched:
            sampled = step.sampled
            tokens: Any = [] if sampled is None else sampled.tokens.tolist()
            for row, drafted in enumerate(step.batch.sampling.sequences):
                weights = None if sampled is None else sampled.drawn_with(row)
                if weights is not None:
                    self._weights.setdefault(drafted, []).append(weights)
                drafted.token_ids.append(tokens[row])
                drafted.num_pending -= 1

    def _launch(self, batch: Batch, previous: Launched | None) -> Launched:
        return self._parts.runner.launch(batch, previous)

    def _next_batch(
        self, rows: list[tuple[Sequence, int]], *, first: bool, may_prefill: bool
    ) -> Batch | None:
        short = [drafted for drafted, _ in rows if 1 < drafted.num_left <= MAX_SHORT]
        long = (
            [drafted for drafted, _ in rows if drafted.num_left > MAX_SHORT] if may_prefill else []
        )
        singles = [
            drafted
            for drafted, depth in rows
            if drafted.num_left == 1 and drafted.num_pending < depth
        ]
        if not (short or long or singles):
            return None
        few = [drafted for drafted, _ in rows if drafted.num_left <= MAX_SHORT] if first else []
        moves = self._seal_tails(few, long)
        most = min(self._config.prefill_chunk, PREFILL_TOKENS)
        shares = prefill_shares(long, most, self._config.page_size)
        segments = [(drafted, drafted.num_left) for drafted in short] + shares
        return self._made(singles, segments, moves)

    def _made(
        self, singles: list[Sequence], segments: list[tuple[Sequence, int]], moves: list[Move]
    ) -> Batch:
        """A step that counts as computed.

        Args:
            segments: others, with how many of their next tokens; the last of all gives a proposal.
            moves: from tails to pages, before it.
        """
        made = [Segment.following(drafted, n, is_chunk=n > MAX_SHORT) for drafted, n in segments]
        kv_manager = self._parts.scheduler.kv_manager
        work = kv_manager.take_work()
        work.seal += moves
        highest = max([counterpart.drafted.slot for counterpart in self._counterparts.values()])
        batch = Batch(
            DecodeBatch.of(singles),
            short=[segment for segment in made if not segment.is_chunk],
            long=[segment for segment in made if segment.is_chunk],
            cache_work=work,
            admitted=self._admitted,
            held_slots=max(highest + 1, work.num_slots),
        )
        self._admitted = []
        batch.advance_sequences(self._config.page_size)
        for segment in batch.long:
            kv_manager.wrote(segment.sequence)
        return batch

    def _seal_tails(self, drafts: list[Sequence], long: list[Sequence]) -> list[Move]:
        """Move tokens from tails to pages before a step.

        Args:
            drafts: the sequences that this round draws proposals for, in its first step: the whole
                pages of all tails move where one tail would not hold the proposals. Later steps
                move none of these, since a sealed page is not taken back.
            long: sequences with a long segment, which reads all tokens before it from pages, also
                those of a page that is partly filled.
        """
        size = self._config.page_size
        longest = max(
            [drafted.num_computed + drafted.num_left - drafted.num_sealed for drafted in drafts],
            default=0,
        )
        stops = {drafted: drafted.num_computed for drafted in long}
        if longest + MAX_DEPTH > 2 * size:
            whole = {
                drafted: drafted.num_computed - drafted.num_computed % size for drafted in drafts
            }
            stops = whole | stops
        return [
            self._seal(drafted, stop)
            for drafted, stop in stops.items()
            if stop > drafted.num_sealed
        ]

    def _seal(self, drafted: Sequence, stop: int) -> Move:
        """Move the tokens of a tail before position `stop` to pages."""
        move = Move(drafted.tables, drafted.slot, drafted.num_sealed, stop)
        drafted.num_sealed = stop - stop % self._config.page_size
        self._parts.scheduler.kv_manager.wrote(drafted)
        return move


def keys_within(
    name: str, sequences: Seq[Sequence], depth: int, max_context: int
) -> dict[Sequence, list[Key]]:
    """Keys by position, of as many proposals as a context has room for."""
    rooms = {s: max_context - len(s.token_ids) - s.num_pending - 1 for s in sequences}
    return {
        sequence: [(name, place) for place in range(min(depth, room))]
        for sequence, room in rooms.items()
        if room > 0
    }
