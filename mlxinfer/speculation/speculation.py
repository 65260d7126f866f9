"""Sources and controller as the one `Proposer` of an engine."""

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from ..engine.batch import Batch, CommitResult, Segment, Sequence
from ..engine.proposals import Proposal, Proposer
from .controller import Acceptance, Controller, Key, MeasuredStep, Outlook

log = logging.getLogger("mlxinfer.speculation")
LOOKED_AT = 2  # sequences of a step, as long as nothing is proposed
TOTALS = ("drafts", "drafted", "accepted", "switched_off")


@dataclass(slots=True)
class SourceCounts:
    """How many proposals of one source were made and accepted."""

    drafts: int = 0  # proposals of one sequence in one step
    drafted: int = 0  # tokens
    accepted: int = 0
    switched_off: int = 0  # requests for which the source failed and proposes no more
    last_error: str | None = None  # why
    accepted_at: list[int] = field(default_factory=list)  # by position


class ProposalSource(ABC):
    """Proposes tokens. Its methods are called from the engine's thread.

    Attributes:
        needs_grammar: it proposes for requests with a grammar only, and is asked for no others.
        is_free: it scores its guesses itself as tokens come, whether they were verified or not.
        cost: cost of a proposal in plain steps, until it is measured; 0: nothing.
        priors: chance that a proposal of each key holds, until it is measured.
        score: a free source calls it with each guess and whether the guess held.
    """

    name: str
    taps: Seq[int] = ()
    needs_grammar: bool = False
    is_free: bool = False
    cost: float = 0.0
    priors: Mapping[Key, float]
    score: Callable[[Sequence, Key, bool], None]  # a proposal of this key; whether it held
    counts: SourceCounts

    @abstractmethod
    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        """The keys of the proposals that the source could make after the tokens in flight.

        There are at most `depth` for each sequence. A sequence without proposals is left out.
        """

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        """Tokens that may follow the known ones of each sequence, at most as many as its depth."""

    def take(self, batch: Batch, hidden: Any) -> None:
        """Read the outputs (T, n * hidden) of the n layers of `taps` in a step that was read."""
        assert not self.taps, "a source that reads layers takes their outputs"

    @abstractmethod
    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def stats(self) -> dict[str, Any]:
        return {}


class SourcePlan(NamedTuple):
    """The proposals that a source is to make for a sequence."""

    source: ProposalSource
    keys: list[Key]  # of its proposals, by position
    chances: list[float]  # that each holds if those before it do
    draft_s: float = 0.0  # seconds for all proposals of the step


class Speculation(Proposer):
    """Proposes tokens from several sources, as many as a controller finds worth it.

    Each sequence gets proposals of the source that promises most. If a source raises an error, the
    error is logged, and the source is switched off for the requests of that step. So no request
    fails because of a proposal.

    Args:
        sources: at least one.
        max_depth: proposals of one sequence, at most.
        method: what was asked for, for `stats`.
        clock: seconds.
    """

    def __init__(
        self,
        sources: Seq[ProposalSource],
        controller: Controller,
        *,
        max_depth: int,
        method: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._controller = controller
        self._max_depth = max_depth
        self._method = method
        self._clock = clock
        self.taps = next((source.taps for source in sources if source.taps), ())
        priors = {key: chance for source in sources for key, chance in source.priors.items()}
        self._acceptance = Acceptance(priors)
        for source in sources:
            source.score, source.counts = self._acceptance.observe, SourceCounts()
        self._off: dict[Sequence, set[str]] = {}  # sources that failed for a sequence
        self._planned: dict[Sequence, SourcePlan] = {}  # of the steps in flight
        self._known: set[Sequence] = set()
        self._read_s: dict[Sequence, float] = {}  # first of a step's rows -> when it was read last
        self._num_plain = 0  # steps that were read since one was foreseen to have proposals
        self._num_decoding = 0  # in the step that is planned, and in those beside it
        self._draft_s = 0.0  # seconds for making the proposals of the last step that has some
        self._hopeful: set[Sequence] = set()  # of steps in which one was worth it
        self._next_look = 0

    # -- the engine's Proposer ------------------------------------------------------------------

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """The most proposals that any sequence is expected to have.

        A turn may ask twice: before it reads the step in flight, and after.

        While no proposal is worth it, a step looks at a few sequences only, in turn. If the
        controller wants no proposals at all, it looks at none. So a large batch costs nearly
        nothing.
        """
        self._num_decoding = num_decoding
        self._known.update(sequences)
        if not sequences or not self._controller.is_open(num_decoding):
            self._hopeful.difference_update(sequences)
            return 0
        few = sequences
        if len(sequences) > LOOKED_AT and not self._hopeful.intersection(sequences):
            first = self._next_look % len(sequences)
            self._next_look = first + LOOKED_AT
            few = sequences[first : first + LOOKED_AT]
        plans = self._plans(few)
        depth = max(self._choose(plans, len(sequences)), default=0) if plans else 0
        if depth and few is not sequences:
            depth = max(self._choose(self._plans(sequences), len(sequences)), default=0)
        if depth:
            self._hopeful.update(sequences)
            self._num_plain = 0
        else:
            self._hopeful.difference_update(sequences)
        return depth

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        plans = self._plans(sequences)
        proposals: dict[Sequence, Proposal] = {}
        if plans:
            depths = dict(zip(plans, self._choose(plans, len(sequences)), strict=True))
            self._draft_s = 0.0
            for source in self._sources:
                drafting = [s for s, plan in plans.items() if plan.source is source and depths[s]]
                if drafting:
                    proposals |= self._ask(
                        source, drafting, [min(depths[s], depth) for s in drafting]
                    )
        for sequence in proposals:
            self._planned[sequence] = plans[sequence]._replace(draft_s=self._draft_s)
        return [proposals.get(s, Proposal(())) for s in sequences]

    def take(self, batch: Batch, hidden: Any) -> None:
        for source in self._sources:
            off = [source.name in self._off.get(s, ()) for s in batch.sequences]
            if not source.taps or all(off):
                continue
            try:
                source.take(batch, hidden)
            except Exception:  # the fault boundary of a source, as in `_ask`
                self._switch_off(source, batch.sequences)

    def observe(self, batch: Batch, result: CommitResult) -> None:
        """Score the proposals of a step, and tell the controller how long the step took."""
        drafted: list[Segment] = []
        if batch.sampling.proposals is not None:
            drafted = [segment for segment in batch.short if segment.proposals]
            self._count(result, drafted)
        self._measure(batch, result, drafted)
        for segment in drafted:
            self._planned.pop(segment.sequence, None)
        if batch.admitted or result.finished or result.failed or result.discarded:
            for sequence in [s for s in self._known if s.finished]:
                self._end(sequence)

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what was proposed and accepted, in all and by source."""
        sources = {
            origin.name: {**asdict(origin.counts), **origin.stats()} for origin in self._sources
        }
        positions = [source.counts.accepted_at for source in self._sources]
        return {
            "method": self._method,
            "max_draft": self._max_depth,
            **{name: sum(s[name] for s in sources.values()) for name in TOTALS},
            "accepted_at": [
                sum(row[i] for row in positions if i < len(row)) for i in range(self._max_depth)
            ],
            "chances": {f"{name} {n}": c for (name, n), c in self._acceptance.measured().items()},
            "sources": sources,
        }

    # -- what to propose ------------------------------------------------------------------------

    def _plans(self, sequences: Seq[Sequence]) -> dict[Sequence, SourcePlan]:
        rows = [
            s for s in sequences if s.request.params.speculate and s.num_computed >= s.num_prompt
        ]
        best: dict[Sequence, tuple[float, SourcePlan]] = {}  # with the tokens that it promises
        for source in self._sources:
            on = rows
            if source.needs_grammar:
                on = [s for s in rows if s.request.grammar is not None]
            if self._off:
                on = [s for s in on if source.name not in self._off.get(s, ())]
            try:
                outlook = source.outlook(on, self._max_depth) if on else {}
            except Exception:  # the fault boundary of a source, as in `_ask`
                self._switch_off(source, on)
                continue
            for sequence, keys in outlook.items():
                chances = [self._acceptance.chance(sequence, key) for key in keys]
                tokens = sum(accumulate(chances, mul))
                if sequence not in best or tokens > best[sequence][0]:
                    best[sequence] = tokens, SourcePlan(source, keys, chances)
        return {sequence: plan for sequence, (_, plan) in best.items()} if best else {}

    def _choose(self, plans: dict[Sequence, SourcePlan], num_sequences: int) -> list[int]:
        outlooks = [Outlook(plan.chances, plan.source.cost) for plan in plans.values()]
        num_decoding = max(self._num_decoding, num_sequences)
        return self._controller.choose(outlooks, num_decoding, num_sequences / num_decoding)

    def _ask(
        self, source: ProposalSource, sequences: list[Sequence], depths: list[int]
    ) -> dict[Sequence, Proposal]:
        """The proposals of a source; none where it fails."""
        began_s = self._clock()
        try:
            proposed = source.propose(sequences, depths)
        except Exception:  # the fault boundary of a source: the requests go on without it
            self._switch_off(source, sequences)
            return {}
        if source.cost:
            self._draft_s += self._clock() - began_s
        return {
            s: proposal
            for s, proposal in zip(sequences, proposed, strict=True)
            if proposal.token_ids
        }

    def _switch_off(self, source: ProposalSource, sequences: Seq[Sequence]) -> None:
        names = ", ".join(sequence.request.id for sequence in sequences)
        log.exception("no more proposals by %s for the requests %s", source.name, names)
        error, counts = sys.exception(), source.counts
        counts.switched_off += len(sequences)
        counts.last_error = f"{type(error).__name__}: {error}"
        for sequence in sequences:
            self._off.setdefault(sequence, set()).add(source.name)

    # -- what came of it ------------------------------------------------------------------------

    def _count(self, result: CommitResult, drafted: Seq[Segment]) -> None:
        for segment in drafted:
            sequence, num_drafted = segment.sequence, len(segment.proposals)
            plan, held = self._planned.get(sequence), result.num_accepted[sequence]
            if plan is None:
                continue
            counts = plan.source.counts
            counts.drafts, counts.drafted = counts.drafts + 1, counts.drafted + num_drafted
            counts.accepted += held
            counts.accepted_at += [0] * (num_drafted - len(counts.accepted_at))
            for place in range(held):
                counts.accepted_at[place] += 1
            if not plan.source.is_free:  # else it scores its own guesses
                tried = held if sequence.finished else min(held + 1, num_drafted)
                for place in range(tried):
                    self._acceptance.observe(sequence, plan.keys[place], place < held)

    def _measure(self, batch: Batch, result: CommitResult, drafted: Seq[Segment]) -> None:
        """Tell the controller how long a decode step took, and how many tokens it gave.

        If steps take turns, a step counts as one of all rows: its numbers are scaled to all rows
        that decode, and its time is the time since its own rows were read last.
        """
        num_proposals = sum([len(segment.proposals) for segment in drafted]) if drafted else 0
        num_sequences = len(batch.sampling.sequences) - num_proposals
        if not num_sequences:
            return
        num_decoding = max(batch.num_decoding, num_sequences)
        scale, seconds = num_decoding / num_sequences, None  # steps until all rows had one
        steady = batch.num_tokens > 0 and not batch.long and not batch.begins_answers
        steady &= not batch.was_delayed
        if steady:
            first, now_s = batch.sampling.sequences[0], self._clock()
            before_s, self._read_s[first] = self._read_s.get(first), now_s
            # A plain step that was foreseen to have proposals was not launched ahead.
            if before_s is not None and (num_proposals or self._num_plain >= scale):
                seconds = now_s - before_s
        else:
            self._read_s.clear()
        self._num_plain = self._num_plain + 1 if steady and not num_proposals else 0
        if seconds is None:
            scale = 1
        draft_s, depth = 0.0, 0
        for segment in drafted:
            plan = self._planned.get(segment.sequence)
            if plan is not None and plan.source.cost:
                draft_s, depth = plan.draft_s, max(depth, len(segment.proposals))
        step = MeasuredStep(
            num_decoding,
            round(num_proposals * scale),
            round((len(batch.sampling.sequences) - len(result.discarded)) * scale),
            seconds,
            draft_s * scale,
            depth,
        )
        if self._controller.observe(step):
            for source in self._sources:
                if not source.is_free:
                    self._acceptance.renew(source.name)

    def _end(self, sequence: Sequence) -> None:
        self._known.discard(sequence)
        self._off.pop(sequence, None)
        self._planned.pop(sequence, None)
        self._read_s.pop(sequence, None)
        self._acceptance.forget(sequence)
        has_grammar = sequence.request.grammar is not None
        for source in self._sources:
            if has_grammar or not source.needs_grammar:
                source.end(sequence)
