"""The scheduler, the KV manager and the prefix cache under random programs, against a closed form.

MLXINFER_SEEDS=10000 pytest tests/simulator -s
MLXINFER_FIRST_SEED=4711 MLXINFER_SEEDS=1 pytest tests/simulator -s
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from models.runs import every
from simulator.programs import Program

from mlxinfer.cache import pages
from mlxinfer.cache.inputs import CacheWork
from mlxinfer.cache.pages import PageGroup, PageTable, StateGroup
from mlxinfer.engine import snapshots
from mlxinfer.engine.batch import Batch, Sequence
from mlxinfer.engine.features import PictureFeatures
from mlxinfer.engine.kv_manager import KVManager
from mlxinfer.engine.prompt_pictures import PromptPictures
from mlxinfer.engine.scheduler import Scheduler

NUM_SEEDS = int(os.environ.get("MLXINFER_SEEDS", "30"))
FIRST_SEED = int(os.environ.get("MLXINFER_FIRST_SEED", "0"))
STATES = {"proposes": True, "recurrent": True}


def run(seed: int, **how: Any) -> Program:
    """One program; where it fails, what happened is said."""
    program = Program(seed, **how)
    try:
        program.run()
    except Exception as error:
        again = f"MLXINFER_FIRST_SEED={seed} MLXINFER_SEEDS=1 pytest tests/simulator -s"
        lines = [*program.log, f"in turn {program.simulation.turns}: {error!r}", again]
        raise AssertionError("\n".join(lines)) from error
    return program


def run_all(first_seed: int, count: int, **how: Any) -> None:
    for seed in range(first_seed, first_seed + count):
        run(seed, **how)


def test_random_programs_give_every_request_the_tokens_of_its_oracle() -> None:
    started_s = time.perf_counter()
    run_all(FIRST_SEED, NUM_SEEDS)
    took_s = time.perf_counter() - started_s
    print(f"\nseeds {FIRST_SEED} to {FIRST_SEED + NUM_SEEDS - 1}: {took_s:.0f} s")


def test_random_programs_give_the_same_tokens_where_steps_verify_proposals() -> None:
    """Right, wrong and half-right ones at random, with everything else that a program does."""
    accepted = proposed = 0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS):
        counters = run(seed, proposes=True).simulation.scheduler.counters
        accepted += counters.tokens_accepted
        proposed += counters.tokens_proposed
    last = FIRST_SEED + NUM_SEEDS - 1
    print(f"\nseeds {FIRST_SEED} to {last}: {accepted} of {proposed} proposals accepted")
    assert NUM_SEEDS < 30 or 0 < accepted < proposed


@pytest.mark.parametrize("proposes", every(2, [False, True]))
def test_recurrent_layers_resume_at_the_right_state(
    proposes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "ROLLING_TOKENS", 32)
    run_all(FIRST_SEED, NUM_SEEDS, proposes=proposes, recurrent=True)


def test_random_programs_with_pictures_share_what_was_computed_of_equal_ones() -> None:
    """Little room for features, and a tower that fails at times."""
    cached = seen = 0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS):
        rest = {"proposes": seed % 5 < 2, "recurrent": seed % 3 == 0, "num_stages": 1 + seed % 2}
        simulation = run(seed, sees=True, **rest).simulation
        seen += len(simulation.tower.passes)
        for asked in simulation.asked.values():
            for _, start in asked.request.pictures:
                cached += asked.sequence.num_cached > start
    print(f"\n{seen} passes of the tower, {cached} pictures were cached")
    assert NUM_SEEDS < 30 or (seen > NUM_SEEDS // 2 and cached > NUM_SEEDS // 8)


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        # A sequence that is all cached is admitted again while nothing runs: it decodes at once.
        (81043, {"num_stages": 2}),
        # A page that a clear frees is read by a copy that waits for its sequence's picture.
        (81073, {"num_stages": 2}),
        # A later prompt holds all room for pictures, and steps have few tokens.
        (91227, {"num_stages": 2, "recurrent": True}),
        # The prompt that holds all features is preempted: others get room in the next turn.
        (90180, {"proposes": True, "recurrent": True}),
    ],
)
def test_programs_that_failed_once(seed: int, how: dict[str, Any]) -> None:
    run(seed, sees=True, **how)


def test_random_programs_give_the_same_tokens_where_ranks_are_stages() -> None:
    """Every step is of rows that are in none in flight; with proposals and with states, too."""
    most = verified = 0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS // 2):
        rest = {"proposes": seed % 5 < 3, "recurrent": seed % 2 == 0}
        simulation = run(seed, num_stages=2 + seed % 3, **rest).simulation
        most = max(most, simulation.most_in_flight)
        verified = max(verified, simulation.most_verified)
    assert NUM_SEEDS < 30 or most == 4
    assert NUM_SEEDS < 30 or verified >= 2, "steps with proposals at the same time"


def keeps_all(self: Scheduler, batch: Batch, token_ids: Any, commit: Any = Scheduler.commit) -> Any:
    result = commit(self, batch, token_ids)
    result.num_kept = {s.slot: s.num_tokens for s in batch.short if s.proposals}
    return result


def without_leave(self: snapshots.Snapshots, sequence: Sequence) -> None:
    self._boundaries.pop(sequence, None)


def test_a_seed_is_one_program() -> None:
    first, again = run(3), run(3)
    assert first.log == again.log
    assert first.simulation.turns == again.simulation.turns
    assert [a.got for a in first.simulation.asked.values()] == [
        a.got for a in again.simulation.asked.values()
    ]


def nothing(*args: object, **kwargs: object) -> None:
    pass


def one_page_more(self: PageGroup, num_tokens: int) -> int:
    return self.window.lowest(num_tokens) // self.page_size + 1


def without(name: str) -> Callable[[KVManager], CacheWork]:
    """`take_work` that leaves a part of the work out."""
    take_work = KVManager.take_work

    def incomplete(kv_manager: KVManager) -> CacheWork:
        work = take_work(kv_manager)
        getattr(work, name).clear()
        return work

    return incomplete


@pytest.mark.alike
@pytest.mark.parametrize(
    ("owner", "name", "broken", "how"),
    [
        (Batch, "writes_pages", property(lambda batch: bool(batch.long)), {}),
        (KVManager, "take_work", without("copies"), {}),
        (KVManager, "forget", nothing, {}),
        (KVManager, "take_work", without("seal"), {}),
        (PageTable, "replace", nothing, {}),
        (PageGroup, "first_page", one_page_more, {}),
        (Scheduler, "_seal_tails", nothing, {}),
        (Scheduler, "commit", keeps_all, STATES),
        (snapshots.Snapshots, "end", without_leave, STATES),
        # One program in 300 shows it: a step has to fail while a snapshot is due.
        (snapshots.Snapshots, "forget", nothing, {"first_seed": 190, **STATES}),
        (StateGroup, "release", nothing, STATES),
        (PromptPictures, "uncut", lambda pictures, start, stop: stop, {"sees": True}),
        (pages, "span_rule", lambda start, stop: lambda point: point, {"sees": True}),
        (PictureFeatures, "release", nothing, {"sees": True}),
    ],
)
def test_mutants_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="pytest tests/simulator"):
        run_all(**{"first_seed": 0, "count": 150, **how})
