"""Turns of the loop that tenants share, on a device that runs queued steps in simulated time."""

import random
from collections.abc import Sequence as Seq
from itertools import pairwise
from types import SimpleNamespace

import pytest
from engine.harness import config, tiny_model
from engine.test_prefill_slices import MOST, SLICE_S, SimulatedDevice
from engine.test_rows import HEAVY, LIGHT

from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.engine import loop as loop_module
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.loop import Loop
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.fair import Tenant


class SlowProposer(Proposer):
    """Works for some seconds before each step, and then proposes nothing."""

    def __init__(self, device: SimulatedDevice, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        return 1 if self._seconds else 0

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        self._device.until(self._device.now_s + self._seconds)
        return [Proposal([]) for _ in sequences]


class Shared:
    """A loop whose heavy tenant always has so many answers; a light one comes now and then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_heavy: int, **device: float) -> None:
        self.propose_s = device.pop("propose_s", 0.0)
        self.device, self.token_s = SimulatedDevice(10.0, **device), dict[str, list[float]]()
        sizes = config(prefill_chunk=MOST, prefill_slice_s=SLICE_S, max_batch=16)
        self.loop = Loop(tiny_model("qwen3-v4"), sizes, self.take)
        self.loop.runner = self.device  # type: ignore[assignment]
        self.loop.scheduler._proposer = SlowProposer(self.device, self.propose_s)
        clock = SimpleNamespace(monotonic=lambda: self.device.now_s)
        monkeypatch.setattr(loop_module, "time", clock)
        self.num_heavy = num_heavy

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.token_s[event.request_id].append(self.device.now_s)

    def add(self, name: str, num_prompt: int, max_tokens: int, tenant: Tenant) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, [1] * num_prompt, params, tenant=tenant)
        self.token_s[name] = []
        self.loop.add(request, self.loop.limits.check(request))

    def turn(self) -> None:
        queues = self.loop.scheduler.queues
        while sum(s.request.tenant == HEAVY for s in queues.unfinished()) < self.num_heavy:
            self.add(f"heavy{len(self.token_s)}", 4, 3000, HEAVY)
        self.loop.turn()


@pytest.mark.parametrize("seed", range(5))
def test_a_first_token_waits_for_one_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for another one that was launched behind it, where rows take most of a slice."""
    rnd, late = random.Random(seed), 0
    row_s, num_prompt = rnd.uniform(0.012, 0.03), 8
    shared = Shared(monkeypatch, 16, row_s=row_s)
    for turn in range(12):
        for _ in range(rnd.randint(10, 20)):
            before_s = shared.device.now_s
            shared.turn()
        name, asked_s = f"light{turn}", rnd.uniform(before_s, shared.device.now_s)
        shared.add(name, num_prompt, 4, LIGHT)
        while not shared.token_s[name]:
            shared.turn()
        alone_s = shared.device.shared_s + num_prompt * shared.device.token_s
        wait_s = shared.token_s[name][0] - asked_s
        late += turn > 0 and wait_s > 1.1 * (2 * alone_s + SLICE_S)
        while len(shared.token_s[name]) < 4:
            shared.turn()
    assert late <= 2, f"seed {seed}"  # of steps that try more rows


@pytest.mark.parametrize("propose_s", [0.0, 0.1])
def test_proposals_count_as_step_time(propose_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a long prompt, gaps of an answer are within a slice."""
    shared = Shared(monkeypatch, 0, propose_s=propose_s)
    shared.add("light", 4, 3000, LIGHT)
    for _ in range(8):
        shared.turn()
    shared.add("long", 3000, 1, LIGHT)
    while not shared.token_s["long"]:
        shared.turn()
    gaps = sorted(late - early for early, late in pairwise(shared.token_s["light"]))
    assert gaps[-4] <= 1.2 * SLICE_S
