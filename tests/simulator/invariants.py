"""What must hold of a scheduler between two steps, and of every batch. Changes nothing."""

from collections.abc import Sequence as Seq
from itertools import pairwise

from cache.prefix_invariants import check, check_users
from engine.spelled import segments_of

from mlxinfer.cache.prefix import Lease
from mlxinfer.engine.batch import MAX_SHORT, Batch, DecodeBatch
from mlxinfer.engine.scheduler import Scheduler


def check_batch(scheduler: Scheduler, batch: Batch) -> None:
    """Budget, order, slots, room for every token, all that any token sees is held."""
    page, segments = scheduler.page_size, segments_of(batch)
    assert segments
    prefill = [s for s in segments if s.num_tokens > 1 or s.start < s.sequence.num_prompt]
    prompts = [s for s in prefill if not s.proposals]
    assert sum(s.num_tokens for s in prompts) <= scheduler.prefill.most
    assert len({s.slot for s in segments}) == len(segments)
    assert all(s.started for s in scheduler.queues.running)
    assert all(s.slot == s.sequence.slot >= 0 for s in segments)
    assert all(a.row + a.num_tokens == b.row for a, b in pairwise(segments))
    for segment in segments:
        goes_on = not segment.num_samples  # a later chunk reads it from pages
        assert segment.is_chunk == (segment.num_tokens > min(MAX_SHORT, page) or goes_on)
        pictures = segment.sequence.pictures
        for low, high in pictures.spans if pictures else ():
            assert not any(low < edge < high for edge in (segment.start, segment.stop)), (
                "a cut span"
            )
        if segment.is_chunk:
            assert segment.sealed == segment.start - segment.start % page
        else:
            assert segment.stop - segment.sealed <= 2 * page, "the tail is too short"
        for table in segment.tables:
            assert table.end >= segment.stop, "a token without a slot"


def check_decodes(scheduler: Scheduler, decodes: DecodeBatch) -> None:
    """A batch that advanced agrees with its sequences, and so does what it has memoised."""
    sequences, segments = decodes.sequences, decodes.segments
    assert set(sequences) <= set(scheduler.queues.running)
    assert list(decodes.slots) == segments.slots.tolist() == [s.slot for s in sequences]
    assert segments.rows.tolist() == list(range(len(sequences)))
    assert segments.starts.tolist() == [s.num_computed - 1 for s in sequences]  # it is launched
    assert segments.sealed.tolist() == [s.num_sealed for s in sequences]
    assert decodes.output_index.tolist() == [s.num_output - 1 for s in sequences]
    lengths = [s.num_computed for s in sequences]
    tails = [n - s.num_sealed for n, s in zip(lengths, sequences, strict=True)]
    assert decodes.max_tail == max(tails, default=0)
    assert all(a is b.tables for a, b in zip(segments.tables, sequences, strict=True))
    for group, page_group in enumerate(scheduler.kv_manager.groups):
        if page_group.window.size is None:
            numbers = [s.tables[group].numbers_before(s.num_sealed).tolist() for s in sequences]
            assert segments.memoised(("check", group), list(numbers).copy) == numbers


def check_ownership(scheduler: Scheduler, pins: Seq[Lease]) -> None:
    """Every page is free, a sequence's or named; every request runs or waits; locks agree."""
    prefix = scheduler.kv_manager.prefix
    check(prefix)
    running, waiting = set(scheduler.queues.running), set(scheduler.queues.waiting)
    assert not running & waiting
    assert running | waiting == set(scheduler.queues.unfinished())
    slots = [s.slot for s in scheduler.queues.running]
    assert len(set(slots)) == len(slots)
    assert min(slots, default=0) >= 0
    for s in scheduler.queues.waiting:
        assert s.slot < 0
        assert not s.tables
        assert s.lease is None
    check_users(prefix, [s.required_lease for s in scheduler.queues.running] + list(pins))
