"""The scheduler between tenants, no model and no arrays: slots, steps and pages are shared."""

import random
from collections import Counter
from itertools import combinations

import pytest
from engine.spelled import segments_of
from engine.test_scheduler import assert_only_cached, build, finish, request, step, try_step

from mlxinfer.engine.batch import Batch, Sequence
from mlxinfer.engine.queues import ANSWER_WORK, MOST_PASSES, SLICE
from mlxinfer.engine.scheduler import Scheduler
from mlxinfer.fair import Tenant

HEAVY, LIGHT = Tenant("heavy"), Tenant("light")


def add(
    scheduler: Scheduler,
    name: str,
    tenant: Tenant,
    num_prompt: int,
    max_tokens: int,
    priority: int = 0,
    prompt_ids: list[int] | None = None,
) -> Sequence:
    asked = request(name, num_prompt, max_tokens)
    asked.priority = priority
    asked.prompt_ids = prompt_ids or [hash((name, i)) % 10**6 for i in range(num_prompt)]
    asked.tenant = tenant
    return scheduler.queues.add(asked, max_output=max_tokens)


def held(scheduler: Scheduler) -> Counter[Tenant]:
    return Counter(s.request.tenant for s in scheduler.queues.running)


def work_of(batch: Batch) -> Counter[Tenant]:
    """Work of each tenant, counted another way than the scheduler does."""
    work: Counter[Tenant] = Counter()
    for segment in segments_of(batch):
        samples = segment.num_samples
        work[segment.sequence.request.tenant] += (
            segment.num_tokens - samples + samples * ANSWER_WORK
        )
    return work


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_of_tenants(seed: int) -> None:
    """Slots go by weight, none stays free, every request ends, and all pages come back."""
    rnd = random.Random(seed)
    max_batch = rnd.randint(1, 6)
    pages = rnd.choice([24, 40, 400])
    scheduler = build(pages=pages, max_batch=max_batch, chunk=64)
    tenants = [Tenant(str(i), rnd.choice([0.5, 1, 1, 3])) for i in range(rnd.randint(1, 4))]
    sequences: list[Sequence] = []
    for turn in range(400):
        if turn < 200 and rnd.random() < 0.3:
            heavy = rnd.random() < 0.7
            for _ in range(rnd.choice([1, 1, 8])):
                name, tenant = f"r{len(sequences)}", tenants[0] if heavy else rnd.choice(tenants)
                sequences.append(
                    add(scheduler, name, tenant, rnd.randint(1, 40), rnd.randint(1, 40))
                )
        if rnd.random() < 0.05 and sequences:
            gone = rnd.choice(sequences)
            if not gone.finished:
                scheduler.queues.finish(gone)
        before = scheduler.counters.preemptions
        if scheduler.queues.idle:
            continue
        batch = scheduler.next_batch()
        if batch is None:
            continue
        if pages == 400:
            check_slots(scheduler, max_batch, preempted=scheduler.counters.preemptions > before)
        scheduler.commit(batch, [7] * len(batch.sampling))
    turns = 0
    while not scheduler.queues.idle:
        try_step(scheduler)
        turns += 1
        assert turns < 20000, f"seed {seed}: requests starve"
    assert all(s.finished for s in sequences)
    assert not scheduler.queues.contested
    assert_only_cached(scheduler)


def check_slots(scheduler: Scheduler, max_batch: int, *, preempted: bool) -> None:
    """While memory suffices: no free slot beside one who waits, and no part taken from another."""
    queues, counts = scheduler.queues, held(scheduler)
    waiting = {s.request.tenant for s in queues.waiting if not s.num_preempted}
    if not waiting or preempted or len(queues.running) < max_batch:
        assert preempted or not waiting or len(queues.running) == max_batch
        return
    for tenant in waiting:
        for other, count in counts.items():
            if other != tenant and count > 1:
                assert count / other.weight <= (counts[tenant] + 1) / tenant.weight


def test_a_light_tenant_gets_a_slot_at_once() -> None:
    scheduler = build(pages=400, max_batch=4, chunk=64)
    for i in range(30):
        add(scheduler, f"heavy{i}", HEAVY, 8, 50)
    step(scheduler, times=10)
    light = add(scheduler, "light", LIGHT, 8, 4)
    step(scheduler, times=5)
    assert light.finished
    assert scheduler.counters.preemptions == 1
    step(scheduler)
    assert held(scheduler) == {HEAVY: 4}  # all of it again, once nobody else wants it


def test_with_one_slot_tenants_take_turns_of_a_slice() -> None:
    scheduler = build(pages=800, max_batch=1, chunk=64)
    heavy = add(scheduler, "heavy", HEAVY, 8, 1000)
    step(scheduler, times=20)
    light = add(scheduler, "light", LIGHT, 8, 1000)
    changes, runs = 0, heavy
    for _ in range(2 * SLICE):
        step(scheduler)
        now = heavy if heavy.slot >= 0 else light
        changes, runs = changes + (now is not runs), now
    assert 2 <= changes <= 5  # a token has a work of two, and who was behind gets ahead
    assert abs(heavy.num_answered - 20 - light.num_answered) <= SLICE


def test_one_tenant_is_served_as_without_tenants() -> None:
    """The same steps, whatever the tenant is called."""

    def steps(tenant: Tenant) -> list[list[tuple[str, int, int]]]:
        rnd, scheduler, seen = random.Random(1), build(pages=60, max_batch=4, chunk=32), []
        for turn in range(200):
            if turn % 5 == 0:
                add(scheduler, f"r{turn}", tenant, rnd.randint(1, 50), rnd.randint(1, 30))
            if (batch := try_step(scheduler)) is not None:
                seen.append(
                    [(s.sequence.request.id, s.start, s.num_tokens) for s in segments_of(batch)]
                )
        return seen

    assert steps(Tenant()) == steps(Tenant("one", 3.0))


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(5))
def test_priority_orders_the_requests_of_one_tenant_and_starves_none(seed: int) -> None:
    """Of those that wait the lowest begins; the oldest one is passed three times at most.

    Another tenant's requests begin at the same steps, whatever the priorities are.
    """
    begun = dict[bool, list[tuple[int, str]]]()
    for ranked in (False, True):
        draw, begun[ranked] = random.Random(seed), []
        scheduler = build(pages=400, max_batch=2, chunk=64)
        waiting: list[Sequence] = []
        passes = 0
        for turn in range(300):
            if draw.random() < 0.4:
                priority = draw.randint(-3, 0) if ranked else 0
                waiting.append(add(scheduler, f"r{turn}", HEAVY, 8, 6, priority))
            if turn % 20 == 0:
                add(scheduler, f"light{turn}", LIGHT, 8, 3)
            if scheduler.queues.idle:
                continue
            batch = step(scheduler)
            for sequence in batch.admitted:
                name = sequence.request.id
                if sequence.request.tenant == LIGHT:
                    begun[ranked].append((turn, name))
                elif sequence in waiting:
                    passes = 0 if sequence is waiting[0] else passes + 1
                    assert passes <= MOST_PASSES, f"seed {seed}"
                    first = min(waiting, key=lambda s: s.request.priority)
                    assert sequence is first or sequence is waiting[0], f"seed {seed}"
                    waiting.remove(sequence)
                else:
                    passes = 0  # one that had lost its slot to the other tenant
        assert len(waiting) > 5, "they wait for each other"
    assert begun[False] == begun[True]


def test_requests_in_the_background_stay_behind_those_of_every_tenant() -> None:
    """A slot for each other request at once, and nearly all steps; they still go on."""
    scheduler = build(pages=4000, max_batch=4, chunk=64)
    behind = [add(scheduler, f"b{i}", HEAVY.at(1), 20, 400) for i in range(8)]
    step(scheduler, times=20)
    assert held(scheduler) == {HEAVY.at(1): 4}
    for tenant in (HEAVY, LIGHT):
        asked = add(scheduler, f"of {tenant.name}", tenant, 20, 4)
        step(scheduler)
        assert asked.num_answered == 1
    for i in range(30):
        add(scheduler, f"h{i}", HEAVY, 20, 100)
    step(scheduler, times=20)
    assert held(scheduler)[HEAVY] == 3
    before = sum(s.num_answered for s in behind)
    step(scheduler, times=100)
    assert sum(s.num_answered for s in behind) > before, "none starves"


@pytest.mark.parametrize(("tenant", "least", "most"), [(HEAVY, 500, 1000), (LIGHT, 1, 1)])
def test_steps_to_a_first_token_beside_64_requests(tenant: Tenant, least: int, most: int) -> None:
    """The figures of docs/benchmarks.md: as one of the heavy tenant's requests, and of another."""
    scheduler = build(pages=4000, max_batch=16, chunk=64)
    for i in range(64):
        add(scheduler, f"heavy{i}", HEAVY, 20 + 7 * i % 60, 200)
    step(scheduler, times=100)
    light, steps = add(scheduler, "light", tenant, 20, 4), 0
    while not light.num_answered:
        step(scheduler)
        steps += 1
    assert least <= steps <= most


@pytest.mark.alike
@pytest.mark.parametrize("weight", [0.5, 1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_flood_evicts_no_prefix_within_another_share(seed: int, weight: float) -> None:
    """After a flood of many times the memory, a conversation of a light tenant goes on as before.

    Requests have fewer pages than the share of their tenant. Alone, the heavy one had used all.
    """
    rnd, pages = random.Random(seed), 60
    light = Tenant("light", weight)
    scheduler = build(pages=pages, max_batch=6, chunk=64)

    def flood(turn: int) -> None:
        for i in range(40):
            name = f"heavy {turn} {i}"
            add(scheduler, name, HEAVY, rnd.randint(4, 40), rnd.randint(1, 10))
        finish(scheduler)

    flood(0)
    (allocator,) = scheduler.kv_manager.allocators
    assert allocator.num_free < 20, "one tenant alone uses everything"
    share = int(pages * weight / (1 + weight))
    length = rnd.randint(2, share - 2) * scheduler.page_size
    ids = [7000 + i for i in range(length)]
    add(scheduler, "first", light, length, 1, prompt_ids=ids)
    finish(scheduler)
    for turn in range(1, 4):
        flood(turn)
        longer = [*ids, *range(9000 + turn, 9008 + turn)]
        sequence = add(scheduler, f"again {turn}", light, length + 8, 1, prompt_ids=longer)
        finish(scheduler)
        assert sequence.num_cached >= length, f"seed {seed}, turn {turn}"
    assert_only_cached(scheduler)


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(5))
def test_tenants_with_work_differ_by_a_slice_in_random_programs(seed: int) -> None:
    """Each time in which two tenants both wait: their work for their weight, from any turn on.

    Weights, lengths and times of requests are random; some of it is in the background.
    """
    rnd = random.Random(seed)
    scheduler = build(pages=4000, max_batch=rnd.randint(1, 6), chunk=64)
    tenants = [Tenant(str(i), rnd.choice([0.5, 1, 1, 2])) for i in range(rnd.randint(2, 4))]
    tenants.append(tenants[0].at(1))
    longest = {tenant: rnd.choice([5, 40, 150]) for tenant in tenants}
    wants = dict.fromkeys(tenants, True)
    got, number = dict.fromkeys(tenants, 0.0), 0
    ahead: dict[tuple[Tenant, Tenant], tuple[float, float]] = {}  # the least and the most
    for _ in range(700):
        counts = Counter(s.request.tenant for s in scheduler.queues.waiting)
        for tenant in tenants:
            if rnd.random() < 0.01:
                wants[tenant] = not wants[tenant]
            for _ in range(8 - counts[tenant] if wants[tenant] else 0):
                number += 1
                sizes = rnd.randint(1, longest[tenant]), rnd.randint(1, longest[tenant])
                add(scheduler, f"r{number}", tenant, *sizes)
        batch = try_step(scheduler)
        if batch is None:
            continue
        for tenant, work in work_of(batch).items():
            got[tenant] += work / tenant.weight
        waiting = {s.request.tenant for s in scheduler.queues.waiting}
        for pair in combinations(tenants, 2):
            if not waiting.issuperset(pair):
                ahead.pop(pair, None)
                continue
            now = got[pair[0]] - got[pair[1]]
            least, most = ahead.get(pair, (now, now))
            ahead[pair] = min(least, now), max(most, now)
            bound = sum((SLICE + 64) / tenant.weight for tenant in pair)
            assert ahead[pair][1] - ahead[pair][0] <= bound, f"seed {seed}"


def test_a_small_request_passes_one_that_waits_for_memory() -> None:
    """One tenant fills the memory, a second one needs most of it, a third one a page at a time."""
    scheduler = build(pages=60, max_batch=4, chunk=64)
    for i in range(2):
        add(scheduler, f"heavy{i}", HEAVY, 60, 40)
    step(scheduler, times=5)
    large = add(scheduler, "large", Tenant("large", 0.5), 150, 1)
    step(scheduler)
    assert large.slot < 0
    for turn in range(400):
        if large.finished:
            break
        light = add(scheduler, f"light{turn}", LIGHT, 4, 2)
        if turn < 20:
            step(scheduler)
            assert light.num_answered == 1
        add(scheduler, f"again{turn}", HEAVY, 60, 40)
        step(scheduler)
    assert large.finished, "who passes it does so for a slice"


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(10))
def test_steps_to_a_first_token_in_random_programs(seed: int) -> None:
    """A prompt of a page, of a tenant without requests: each other tenant may go first, once."""
    rnd = random.Random(seed)
    heavy = [Tenant(str(i), rnd.choice([0.5, 1, 3])) for i in range(rnd.randint(1, 4))]
    heavy.append(heavy[0].at(1))
    scheduler = build(pages=rnd.choice([150, 4000]), max_batch=len(heavy) + 1, chunk=64)
    number, waited = 0, []
    for turn in range(150):
        for _ in range(rnd.choice([0, 1, 6])):
            number += 1
            sizes = rnd.randint(1, 150), rnd.randint(1, 60)
            add(scheduler, f"r{number}", rnd.choice(heavy), *sizes, rnd.randint(-9, 0))
        if turn % 15 == 10:
            light = add(scheduler, f"light{turn}", LIGHT, rnd.randint(1, scheduler.page_size), 3)
            steps = 0
            while not light.num_answered:
                try_step(scheduler)
                steps += 1
                assert steps < 500, f"seed {seed}"
            waited.append(steps)
        try_step(scheduler)
    assert max(waited) <= len(heavy), f"seed {seed}: {waited}"
