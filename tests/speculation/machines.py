"""Simulated machines: how long steps take by rows, after published figures; nothing measured here.

A machine and a model are a step of one row, what each further row adds, and what a proposal costs.
Where the sources say what speculation gave, the curve is chosen so that a fixed depth gives that.
Sources: threads and READMEs named beside each. Prior curve: see `speculation/estimates.py`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.speculation.controller import (
    Acceptance,
    Controller,
    FixedDepth,
    Key,
    MeasuredStep,
    Outlook,
    relative_cost,
)

DEPTH = 7


@dataclass(frozen=True)
class Machine:
    name: str
    step_s: float  # of one row
    cost: Callable[[int], float]  # of so many rows, in steps of one
    draft: float  # of a proposal, in steps of one row
    acceptance: float
    gains: bool  # whether speculation gives more tokens a second, by the source


def straight(slope: float) -> Callable[[int], float]:
    """Every row costs, from the second on."""
    return lambda rows: 1 + slope * (rows - 1)


MACHINES = (
    # omlx #1311: MTP of mixtures is net negative at every context; mlxcel #1165: 0.70 x.
    Machine("M1 Max, mixture of experts, MTP", 0.016, straight(0.75), 0.1, 0.75, False),
    # Rapid-MLX #3115: Qwen3.5-4B 165 -> 110 tokens a second.
    Machine("M3 Ultra, 4B at 4 bits, MTP", 1 / 165, straight(0.8), 0.25, 0.75, False),
    # mlx-examples #1281: 72B at 4 bits, 34 -> 44.
    Machine("M3 Ultra, 72B at 4 bits, draft", 1 / 34, relative_cost, 0.12, 0.7, True),
    # mlx-examples #1281: 72B at 8 bits, 14 -> 27.
    Machine("M4 Max, 72B at 8 bits, draft", 1 / 14, straight(0.06), 0.06, 0.75, True),
    # vllm-metal: Qwen3-8B with 0.6B, 1.36 to 1.48 x; here with the published curve.
    Machine("M5 Pro, 8B, draft", 1 / 67, straight(0.12), 0.1, 0.75, True),
    # mlxcel #1165: 1.2 to 1.4 x.
    Machine("M5 Max, 27B, MTP", 1 / 30, relative_cost, 0.08, 0.65, True),
)


@dataclass
class Run:
    """What a simulated answer took."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    speculative_steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    machine: Machine,
    policy: Controller,
    *,
    num_tokens: int,
    num_sequences: int = 1,
    seed: int = 0,
    acceptance: Callable[[int], float] | None = None,
    noise: float = 0.03,
    load: Callable[[int], float] = lambda _: 1.0,
) -> Run:
    """Answers of `num_tokens` together, in steps that a policy chooses.

    Args:
        acceptance: of a proposal, by step; None: the machine's.
        load: what steps take longer by, by step.
    """
    rng, run = random.Random(seed), Run()
    keys: list[Key] = [("draft", place) for place in range(DEPTH)]
    chances = Acceptance(dict.fromkeys(keys, 0.7))
    sequences = [
        Sequence(Request(str(i), [1], SamplingParams()), 10**6, [1], 1)
        for i in range(num_sequences)
    ]
    while run.tokens < num_tokens:
        outlooks = [
            Outlook([chances.chance(s, key) for key in keys], machine.draft) for s in sequences
        ]
        depths = policy.choose(outlooks, num_sequences)
        rows = num_sequences + sum(depths)
        draft_s = max(depths) * machine.draft * machine.step_s
        seconds = draft_s + machine.step_s * machine.cost(rows) * rng.uniform(1 - noise, 1 + noise)
        seconds *= load(run.steps)
        true = machine.acceptance if acceptance is None else acceptance(run.steps)
        tokens = 0
        for sequence, depth in zip(sequences, depths, strict=True):
            held = 0
            for place in range(depth):
                holds = rng.random() < true
                chances.observe(sequence, keys[place], holds)
                if not holds:
                    break
                held += 1
            tokens += 1 + held
        measured = MeasuredStep(num_sequences, sum(depths), tokens, seconds, draft_s, max(depths))
        if policy.observe(measured):
            chances.renew("draft")
        run.tokens, run.seconds = run.tokens + tokens, run.seconds + seconds
        run.steps, run.speculative_steps = run.steps + 1, run.speculative_steps + any(depths)
    return run


def best_fixed(machine: Machine, **how: int) -> tuple[int, float]:
    """The depth that gives most tokens a second, and how many."""
    rates = {k: simulate(machine, FixedDepth(k), **how).rate for k in (0, 1, 2, 3, 5, DEPTH)}
    best = max(rates, key=lambda k: rates[k])
    return best, rates[best]


def controlled(machine: Machine, **how: int) -> Run:
    """The same under the controller."""
    return simulate(machine, Controller(max_depth=DEPTH), **how)
