"""Tokens of a tenant beside another that fills the batch, in simulated time: see `Bench`."""

import random
from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest
from engine.test_prefill_slices import CHIPS, MODELS, PAGE, SLICE_S, Bench

from mlxinfer.engine.batch import Batch, Sequence
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.engine.rows import DecodeTimes
from mlxinfer.engine.scheduler import RECENT_S
from mlxinfer.fair import Tenant

HEAVY, LIGHT = Tenant("heavy"), Tenant("light")
NUM_TOKENS = 40


def flooded(bench: Bench, *, prompts: int) -> Bench:
    """A heavy tenant fills the batch with answers; `prompts` of 3000 tokens come after these."""
    for i in range(80):
        bench.add(f"heavy{i}", 50 + 37 * i % 400, 600, HEAVY)
    bench.seconds_on(10)
    for i in range(prompts):
        bench.add(f"prompt{i}", 3000, 1, HEAVY)
    return bench


def idle(chip: str, model: str) -> tuple[float, float]:
    """Seconds to a light request's first token on an idle machine, and its longest gap."""
    bench = Bench(chip, model, max_batch=64)
    bench.add("first", 100, NUM_TOKENS, LIGHT)
    while not bench.scheduler.queues.idle:
        bench.step()
    return bench.token_s["first"][0], bench.longest_gap("first")


@pytest.mark.alike
@pytest.mark.parametrize("prompts", [0, 40])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_tokens_of_a_light_tenant_follow_its_share(chip: str, model: str, prompts: int) -> None:
    """The first within twice its idle time and a slice, the others within 1.5 of an equal share.

    An equal share is half of the machine, so twice the time between tokens. A step has a row of
    each tenant, and, if there are prompts, a page at least, however long that takes.
    """
    alone_s, gap_s = idle(chip, model)
    bench = flooded(Bench(chip, model, max_batch=64), prompts=prompts)
    for i in range(6):
        name, asked_s = f"light{i}", bench.now_s
        bench.add(name, 100, NUM_TOKENS, LIGHT)
        first_s = bench.until(name, NUM_TOKENS) - asked_s
        if not i:  # the first one finds nothing measured
            continue
        assert first_s <= 2 * alone_s + 1.2 * SLICE_S
        page_s = bench.scheduler.prefill.page_s
        most_s = max(1.5 * 2 * gap_s, gap_s + gap_s + page_s)
        gaps = bench.gaps(name)
        assert gaps[len(gaps) // 2] <= most_s
        assert gaps[-1] <= 1.1 * most_s


class NoGpu(Bench):
    """A processor: each token takes as long as any other, so a page takes as long as 16 answers."""

    slowness = 1.0

    def seconds(self, batch: Batch) -> float:
        return 0.02 * batch.num_tokens * self.slowness


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_a_page_far_slower_than_an_answer_is_computed_bit_by_bit(max_tokens: int) -> None:
    """Beside documents of another tenant, with short answers or with none."""
    bench = NoGpu("M5", "4B", max_batch=64)
    for i in range(30):
        bench.add(f"heavy{i}", 400, max_tokens, HEAVY)
    for i in range(4):
        bench.steps(20)
        name, asked_s = f"light{i}", bench.now_s
        bench.add(name, 16, NUM_TOKENS, LIGHT)
        first_s = bench.until(name, NUM_TOKENS) - asked_s
        if not i:
            continue
        assert first_s <= 2 * 16 * 0.02 + 2 * SLICE_S
        gaps = bench.gaps(name)
        assert gaps[len(gaps) * 9 // 10] <= 1.5 * 2 * 0.02 + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_a_short_prompt_takes_few_steps_whatever_was_measured(seed: int) -> None:
    """Two for two pages, and one that is without prompts, though a busy machine held up others.

    So also right after an answer, which has put the tenant ahead of the others.
    """
    rnd, bench = random.Random(seed), NoGpu("M5", "4B", max_batch=64)
    for i in range(rnd.choice([2, 8, 30])):
        bench.add(f"heavy{i}", 20, 10_000, HEAVY)
    for i in range(10):
        for _ in range(rnd.choice([0, 1, 10])):
            bench.slowness = rnd.choice([1, 1, 1, 40])
            bench.step()
        bench.add(f"light{i}", rnd.randint(1, 2 * PAGE), 8, LIGHT)
        before = len(bench.sizes)
        bench.until(f"light{i}")
        assert len(bench.sizes) - before <= 3, f"seed {seed}"
        while len(bench.token_s[f"light{i}"]) < 8:
            bench.slowness = rnd.choice([1, 1, 1, 40])
            bench.step()


class RandomProposals(Proposer):
    """Up to `most` proposals for each sequence; token 7 holds."""

    def __init__(self, rnd: random.Random, most: int) -> None:
        self._rnd, self._most = rnd, most

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        return self._most

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        return [Proposal(self._rnd.choices([7, 5], k=self._rnd.randint(0, 7))) for _ in sequences]


@pytest.mark.parametrize("seed", range(12))
def test_verified_proposals_take_no_more_of_a_step_than_rows_may(seed: int) -> None:
    """On a GPU and without one; a tenant alone has as many as are proposed."""
    rnd = random.Random(seed)
    kind, most = rnd.choice([Bench, NoGpu]), rnd.randint(1, 7)
    chip, model = rnd.choice([*CHIPS]), rnd.choice([*MODELS])
    _, gap_s = idle(chip, model)
    bench = kind(chip, model, max_batch=64, proposer=RandomProposals(rnd, most))
    for i in range(rnd.randint(1, 63)):
        bench.add(f"heavy{i}", rnd.randint(1, 60), 10_000, HEAVY)
    while not all(len(times) > 20 for times in bench.token_s.values()):
        bench.step()
    counters = bench.scheduler.counters
    assert counters.tokens_proposed > 0
    bench.add("light", 16, 400, LIGHT)
    while len(set(bench.token_s["light"])) < NUM_TOKENS:
        bench.step()
    times = sorted(set(bench.token_s["light"]))[4:]
    gaps = sorted(after - before for before, after in pairwise(times))
    row_s = 0.02 if kind is NoGpu else gap_s
    assert gaps[len(gaps) * 8 // 10] <= 1.5 * 2 * row_s + 1e-9, f"seed {seed}"
    assert gaps[-1] <= 1.5 * SLICE_S, f"seed {seed}"


def test_what_a_busy_machine_measured_is_soon_forgotten() -> None:
    """Also of a context that no prompt has had since."""
    bench = NoGpu("M5", "4B", max_batch=64)
    bench.slowness = 30
    bench.add("light", 16, 8, LIGHT)
    for i in range(40):
        bench.add(f"heavy{i}", 400, 8, HEAVY)
    bench.until("light")
    bench.slowness = 1
    bench.steps(12)
    assert bench.scheduler.prefill.page_s <= 1.5 * PAGE * 0.02


@pytest.mark.alike
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_half_of_all_tokens_remains_beside_a_light_tenant(chip: str, model: str) -> None:
    """And all of them again when it has left for a while."""
    bench = Bench(chip, model, max_batch=64)
    for i in range(63):
        bench.add(f"heavy{i}", 20, 5000, HEAVY)
    while not all(bench.token_s.values()):
        bench.step()
    alone = rate(bench)
    bench.add("light", 100, 5000, LIGHT)
    bench.until("light", 20)
    assert rate(bench) >= 0.48 * alone
    light = bench.scheduler.queues.find("light")
    assert light is not None
    bench.scheduler.queues.finish(light)
    bench.seconds_on(1.1 * RECENT_S)
    before, steps = num_tokens(bench), len(bench.sizes)
    rate(bench)
    assert num_tokens(bench) - before == 63 * (len(bench.sizes) - steps), "all rows in each step"


def rate(bench: Bench) -> float:
    """Tokens a second of all answers, for some steps."""
    began_s, before = bench.now_s, num_tokens(bench)
    bench.steps(50)
    return (num_tokens(bench) - before) / (bench.now_s - began_s)


def num_tokens(bench: Bench) -> int:
    return sum(len(times) for times in bench.token_s.values())


class SomeMachine(Bench):
    """Steps of any cost for what all share, for a row and for a token; measured with some noise."""

    def __init__(self, rnd: random.Random) -> None:
        super().__init__("M5", "4B", max_batch=64)
        self.shared_s, self.row_s = rnd.choice([0, 0.01, 0.03, 0.06]), rnd.uniform(0.002, 0.02)
        self.prompt_token_s, self.rnd = rnd.uniform(0.2, 1.2) * self.row_s, rnd

    def seconds(self, batch: Batch) -> float:
        rows, tokens = len(batch.decodes.sequences), sum(s.num_tokens for s in batch.ragged)
        pure_s = self.shared_s + rows * self.row_s + tokens * self.prompt_token_s
        return pure_s * self.rnd.lognormvariate(0, 0.05)


FLOODS = {  # tokens of each prompt and answer
    "answers": ((10, 20), (40, 40)),
    "documents": ((300, 1500), (1, 12)),
    "short ones": ((1, 16), (1, 4)),
    "all kinds": ((5, 600), (1, 100)),
}


@pytest.mark.alike
@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("seed", range(6))
def test_first_tokens_come_in_time_beside_a_flood_on_any_machine(seed: int, flood: str) -> None:
    """A light tenant comes back again and again; what it had before is no debt."""
    rnd = random.Random(f"{seed} {flood}")
    bench, number, late = SomeMachine(rnd), 0, 0
    num_heavy = rnd.choice([8, 24, 70])
    for turn in range(20):
        name, num_prompt = f"light{turn}", rnd.randint(1, 2 * PAGE)
        steps = rnd.randint(12, 20)
        while not bench.token_s.get(name):
            while len(bench.scheduler.queues.unfinished()) < num_heavy:
                number += 1
                num_tokens = [rnd.randint(*ends) for ends in FLOODS[flood]]
                bench.add(f"heavy{number}", *num_tokens, HEAVY)
            before_s, steps = bench.now_s, steps - 1
            bench.step()
            if not steps:
                asked_s = rnd.uniform(before_s, bench.now_s)
                bench.add(name, num_prompt, 24, LIGHT)
        alone_s = bench.shared_s + num_prompt * bench.prompt_token_s
        first_s = bench.token_s[name][0] - asked_s
        late += turn > 0 and first_s > 1.05 * (2 * alone_s + SLICE_S)
        while bench.scheduler.queues.find(name) is not None:
            bench.step()
    assert late <= 1, f"seed {seed}"  # of steps that try more rows


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(8))
def test_a_step_that_ended_before_it_was_read_has_its_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch may be held up: then the step before it seems to take the time of both."""
    rnd = random.Random(seed)
    bench, held = SomeMachine(rnd), list[tuple[Batch, float]]()
    observe = bench.scheduler.prefill.observe

    def observe_late(batch: Batch, seconds: float) -> None:
        if held:
            before, before_s = held.pop()
            observe(before, before_s + seconds)
            observe(batch, 0.01 * seconds)
        elif batch.ragged or rnd.random() < 0.5:
            observe(batch, seconds)
        else:
            held.append((batch, seconds))

    monkeypatch.setattr(bench.scheduler.prefill, "observe", observe_late)
    for i in range(400):
        if len(bench.scheduler.queues.unfinished()) < 12:
            bench.add(f"{i}", rnd.randint(1, 40), rnd.randint(1, 30), rnd.choice([HEAVY, LIGHT]))
        bench.step()
        if i > 50:
            page_s = PAGE * bench.prompt_token_s
            assert bench.scheduler.prefill.page_s > page_s / 4, f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_times_of_nearly_as_many_rows_say_nothing_wild_of_others(seed: int) -> None:
    """Whatever rows cost, and however much steps of a busy machine differ: see `TRIED_EVERY`."""
    rnd, times = random.Random(seed), DecodeTimes()
    shared, each = rnd.choice([(0.03, 0.011), (0.0, 0.02), (0.1, 0.002)])
    fitting = (SLICE_S - shared) / each
    wild = 0
    for step in range(1000):
        rows = int(fitting * rnd.uniform(0.75, 0.85)) * (2 + (step % 8 == 0)) // 2
        times.note((rows, (shared + each * rows) * rnd.lognormvariate(0, 0.3)))
        wild += step > 50 and times.rows_in(SLICE_S) > 1.5 * fitting
    assert wild <= 10, f"seed {seed}"


def test_a_line_through_times_follows_what_steps_take() -> None:
    """Also after a step that something else held up, and when the context has grown."""
    times, moment = DecodeTimes(), 0

    def run(shared: float, each: float, count: int) -> None:
        nonlocal moment
        for _ in range(count):
            moment += 1
            rows = 8 if moment % 8 else 12
            times.note((rows, shared + each * rows))

    run(0.02, 0.001, 40)
    assert times.of(1) == pytest.approx(0.021, rel=0.1)
    times.note((8, 30.0))
    run(0.02, 0.001, 60)
    assert times.of(1) == pytest.approx(0.021, rel=0.1)
    run(0.04, 0.005, 100)
    assert times.of(1) == pytest.approx(0.045, rel=0.1)
    assert times.rows_in(0.09) in (9, 10)
