"""The engine's loop around a real scheduler and a runner of hashes. Draws nothing by chance.

Whatever happens, each request must get the tokens of its oracle, once, in order, to the end.
"""

from collections import deque
from dataclasses import asdict
from typing import cast

import mlx.core as mx
from cache.prefix_invariants import token_ids_of
from engine.pictures import RandomTower
from simulator.asked import Asked
from simulator.fake_disk import FakeTier
from simulator.fake_kv import FakeKV, WatchedAllocator
from simulator.fake_runner import FakeRunner, Launched, StepFailed
from simulator.fake_states import FakeStates
from simulator.invariants import check_batch, check_decodes, check_ownership
from simulator.oracle import ROUNDS, Oracle
from simulator.sizes import Sizes

from mlxinfer.cache.disk import DiskTier
from mlxinfer.cache.pages import PageGroup, StateGroup
from mlxinfer.cache.prefix import Lease
from mlxinfer.core import FinishReason, Request
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.features import PictureFeatures
from mlxinfer.engine.kv_manager import KVManager
from mlxinfer.engine.pagestore import PageStore
from mlxinfer.engine.prompt_pictures import PromptPictures
from mlxinfer.engine.proposals import Proposer
from mlxinfer.engine.scheduler import Scheduler
from mlxinfer.fair import Tenant

WIDTH = 2  # numbers of a feature
TENANTS = (Tenant("one"), Tenant("two"), Tenant("heavier", 3.0))


class Simulation:
    """Turn by turn: the same order of calls as in the engine's loop.

    Args:
        tier: where evicted pages go, if `sizes` has a disk.
        answers: gets those of all requests.
        proposer: of tokens that steps verify.
        max_snapshots: of states of recurrent layers; None: there are no such layers.
        feature_bytes: for features of pictures.
    """

    def __init__(
        self,
        sizes: Sizes,
        tier: FakeTier,
        answers: dict[str, list[int]],
        *,
        proposer: Proposer | None = None,
        max_snapshots: int | None = None,
        feature_bytes: int = 0,
    ) -> None:
        self.sizes, self.answers = sizes, answers
        self.tower, self._feature_bytes = RandomTower(WIDTH), feature_bytes
        self.proposer = proposer
        self.max_snapshots = max_snapshots
        self.asked: dict[str, Asked] = {}
        self.next_fault: str | None = None
        self.num_faults = 0
        self.pins: list[Lease] = []  # held by no request
        self.turns = self.most_in_flight = self.most_verified = 0  # the last: with proposals
        self.store = self._open(tier) if sizes.disk else None
        self.start()

    def _open(self, tier: FakeTier) -> PageStore:
        return PageStore(
            cast(DiskTier, tier),
            groups=self._groups(),
            states=self._state_group(),
            max_bytes=2**40,
            clock=lambda: 0.0,
        )

    def _groups(self) -> list[PageGroup]:
        sizes = self.sizes
        return [
            PageGroup(
                window,
                WatchedAllocator(num_pages, headroom=sizes.headroom),
                sizes.page_size,
                sizes.prefill_chunk,
                page_bytes=ROUNDS * sizes.page_size * 8,
            )
            for window, num_pages in zip(sizes.windows, sizes.num_pages, strict=True)
        ]

    def _state_group(self) -> StateGroup | None:
        return None if self.max_snapshots is None else StateGroup(16, self.max_snapshots)

    def start(self) -> None:
        """A fresh cache, scheduler and runner; the disk stays."""
        sizes = self.sizes
        groups = self._groups()
        self.states = self._state_group()
        allocators = [cast(WatchedAllocator, group.allocator) for group in groups]
        self.features = PictureFeatures(self.tower, dtype=mx.float32, max_bytes=self._feature_bytes)
        self.scheduler = Scheduler(
            KVManager(groups, reuse=sizes.reuse, states=self.states, store=self.store),
            max_batch=sizes.max_batch,
            prefill_chunk=sizes.prefill_chunk,
            proposer=self.proposer,
            num_stages=sizes.num_stages,
            features=self.features,
        )
        self.kv = FakeKV(
            sizes.windows,
            allocators,
            page_size=sizes.page_size,
            max_batch=sizes.max_batch,
            states=None if self.states is None else FakeStates(),
        )
        self.runner = FakeRunner(
            self.kv,
            vocab=sizes.vocab,
            verify=self._verify,
            fault=self._take_fault,
            gather=self.features.gather,
        )
        self._in_flight: deque[Launched] = deque()
        self._counters = asdict(self.scheduler.counters)

    @property
    def idle(self) -> bool:
        return not self._in_flight and self.scheduler.queues.idle

    # -- what may happen between two turns -------------------------------------------------------

    def add(self, request: Request, max_output: int) -> None:
        pictures = None
        if request.pictures:
            pictures = PromptPictures.of(request, sees_spans=True)
        oracle = Oracle(
            self.sizes.windows,
            request.prompt_ids if pictures is None else pictures.key_ids,
            history=sum(request.prompt_ids),
            seed=request.params.seed or 0,
            vocab=self.sizes.vocab,
            constrained=request.grammar is not None,
            recurrent=self.states is not None,
        )
        expected, reason = oracle.answer(request, max_output)
        self.answers[request.id] = expected
        request.tenant = TENANTS[sum(request.prompt_ids) % len(TENANTS)]
        sequence = self.scheduler.queues.add(request, max_output=max_output, pictures=pictures)
        self.asked[request.id] = Asked(request, sequence, oracle, expected, reason)

    def abort(self, name: str) -> None:
        sequence = self.scheduler.queues.find(name)
        if sequence is not None:
            self.scheduler.queues.finish(sequence)
            self.asked[name].end(FinishReason.ABORT)

    def restart(self) -> None:
        """Save what is cached and start afresh. Nothing runs or waits."""
        kv_manager = self.scheduler.kv_manager
        self.kv.may_write_pages = True
        spilled = self.kv.carry_out(kv_manager.take_work(), lambda: None)
        if self.store is not None:
            self.store.put(spilled)
        if self.store is not None and self.sizes.reuse:
            self.store.save(kv_manager.prefix, self.kv.read_out)
        self.start()

    # -- one turn, as in engine/loop.py ----------------------------------------------------------

    def turn(self) -> None:
        self.turns += 1
        steps = self._in_flight
        if self.features.wanted and self._read(0) and self.features.wanted:
            self._see()
        batch = self.scheduler.next_batch()
        self.most_in_flight = max(self.most_in_flight, len(steps) + 1)
        all_in_flight = [*(step.batch for step in steps), *([batch] if batch else [])]
        verified = sum([b.sampling.proposals is not None for b in all_in_flight])
        self.most_verified = max(self.most_verified, verified)
        if batch is None:
            self._read(max(len(steps) - 1, 0))
        elif self._launch(batch, steps[-1] if steps else None):
            step, runs = steps[-1], self._read(self.scheduler.max_in_flight(batch))
            if runs and step.unsampled:
                self._sample_constrained(step)
            if steps and self.scheduler.reads_first(batch):
                self._read(0)
        self._check()

    def _see(self) -> None:
        failed = self.features.work()
        if failed is not None:
            self.tower.fails = None
            self.scheduler.queues.finish(failed[0])
            self.asked[failed[0].request.id].end(FinishReason.ERROR)

    def _read(self, num_left: int) -> bool:
        while len(self._in_flight) > num_left:
            if not self._commit(self._in_flight.popleft()):
                return False
        return True

    def _launch(self, batch: Batch, previous: Launched | None) -> bool:
        check_batch(self.scheduler, batch)
        check_decodes(self.scheduler, batch.decodes)
        try:
            self._in_flight.append(self.runner.launch(batch, previous))
            return True
        except StepFailed:
            if self._read(0):
                self._fail_step(batch)
            return False

    def _sample_constrained(self, launched: Launched) -> None:
        try:
            self.runner.sample_constrained(launched)
        except StepFailed:
            self._fail_step(launched.batch)

    def _commit(self, launched: Launched) -> bool:
        if launched.unreadable:
            self._fail_step(launched.batch)
            return False
        launched.done = True
        if self.store is not None:
            self.store.put(launched.spilled)
        sampling = launched.batch.sampling
        result = self.scheduler.commit(launched.batch, launched.tokens)
        self.runner.commit(launched.batch, launched.tokens, result)
        for row, (sequence, token) in enumerate(
            zip(sampling.sequences, launched.tokens, strict=True)
        ):
            if row in result.discarded:
                continue
            self.asked[sequence.request.id].take(token, result.finished.get(row))
        return True

    def _fail_step(self, batch: Batch) -> None:
        self._in_flight.clear()
        for sequence in batch.sequences:
            if not sequence.finished:
                self.scheduler.queues.finish(sequence, keep=False)
                self.asked[sequence.request.id].end(FinishReason.ERROR)
        for sequence in reversed(list(self.scheduler.queues.running)):
            self.scheduler.queues.preempt(sequence, keep=False)
        for sequence in self.scheduler.queues.unfinished():
            sequence.num_pending = 0
        self.scheduler.kv_manager.forget()
        self.kv.reset()

    def _take_fault(self) -> str | None:
        fault, self.next_fault = self.next_fault, None
        self.num_faults += fault is not None
        return fault

    # -- what must hold --------------------------------------------------------------------------

    def _verify(self, name: str, start: int, token_ids: list[int], hidden: list[int]) -> None:
        """All that a step computed, up to the first proposal that is wrong."""
        asked = self.asked[name]
        for position, (token_id, x) in enumerate(zip(token_ids, hidden, strict=True), start):
            if token_id != asked.oracle.token(position):
                assert position > start, "a token that is no proposal"
                break
            asked.check_hidden(position, x)

    def _check(self) -> None:
        check_ownership(self.scheduler, self.pins)
        counters = asdict(self.scheduler.counters)
        assert all(counters[name] >= before for name, before in self._counters.items())
        self._counters = counters
        for asked in self.asked.values():
            asked.check_cached(self.asked.values(), reuse=self.sizes.reuse)

    # -- the end ---------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Every request ended; what is cached is what it says, and all of it can go."""
        assert all(a.reason is not None for a in self.asked.values())
        self.kv.may_write_pages = True
        self.scheduler.kv_manager.settle(())
        self.kv.carry_out(self.scheduler.kv_manager.take_work(), lambda: None)
        self._check_stored()
        prefix = self.scheduler.kv_manager.prefix
        if self.states is not None:
            prefix.evict(len(self.sizes.windows), self.states.num_held)
        for group, allocator in enumerate(self.scheduler.kv_manager.allocators):
            assert allocator.num_held == len(prefix.by_id[group]) == prefix.num_evictable(group)
            prefix.evict(group, allocator.num_held)
            assert allocator.num_free == allocator.num_pages
        assert not prefix.page_of
        assert self.states is None or self.states.num_held == 0
        assert not self.features.wanted
        assert not self.features.stats()["in_use"]
        assert self.features.num_bytes <= self._feature_bytes
        assert not self.tower.num_open

    def _check_stored(self) -> None:
        """Every named page holds the keys of the tokens that lead to it."""
        size, windows = self.sizes.page_size, self.sizes.windows
        prefix = self.scheduler.kv_manager.prefix
        for stored in prefix.page_of.values():
            tokens = token_ids_of(prefix, stored)
            if tokens is None:
                continue
            recurrent = self.states is not None
            oracle = Oracle(windows, tokens, seed=0, vocab=self.sizes.vocab, recurrent=recurrent)
            start = stored.number * size
            keys = [oracle.keys(position) for position in range(start, len(tokens))]
            for layer, group in enumerate(self.kv.groups):
                page = stored.ids[group]
                if page is not None:
                    cached = self.kv.pools[layer][page * size : page * size + len(keys)]
                    assert cached == [k[layer] for k in keys], "a cached page holds something else"
            if self.kv.states is not None and (number := stored.ids[-1]) is not None:
                state = self.kv.states.state(number)
                assert state == oracle.state(len(tokens)), "a snapshot of another place"
