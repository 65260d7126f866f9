"""`bench replicas`: simulated. Many servers behind a router: when affinity pays, when least load.

No machine is measured. A replica is a queue of prompts: one is computed after another, at a rate
that the answers under way lower. It keeps the newest conversations, and the system prompts of apps,
up to so many tokens. Conversations begin at random times (Poisson), each of an app; its system
prompt it shares, and go on after a pause for thought.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mlxinfer.bench.report import Report, Table

# Of a 4-bit model of 4 billion parameters on an M4 Max, as others published them (README of
# mlx-lm's benchmarks and of vllm-mlx): what is compared here are policies, not machines.
PREFILL_RATE = 1780.0  # prompt tokens a second
ANSWER_S = 4.0  # of an answer, during which it takes a share of the steps
DECODE_SHARE = 0.04  # of a replica's time, an answer under way
CACHE_TOKENS = 200_000  # that a replica keeps
APPS, SYSTEM, MESSAGE, TURNS, PAUSE_S = 20, 2000, 300, 6, 20.0
BOUND_S = 2.0  # of waiting, past which a conversation leaves its replica
SECONDS, WARM_S = 600.0, 200.0  # of a run, and of its beginning, which is not counted
LOADS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # of what the replicas can compute without any cache
LOOKED_AT = 8  # replicas with an app's system prompt, among which the idlest is taken

Policy = Callable[["Fleet", "Talk", float], int]


@dataclass(slots=True)
class Talk:
    """A conversation."""

    number: int
    app: int
    turns: int
    tokens: int = SYSTEM
    home: int | None = None  # where its last turn was answered


@dataclass(slots=True)
class Fleet:
    """Replicas: until when each has prompts to compute, what it keeps, what it answers."""

    size: int
    chance: random.Random
    busy_until: np.ndarray = field(init=False)  # (size,) seconds
    answering: list[deque[float]] = field(init=False)  # ends of answers, in their order
    kept: list[OrderedDict[tuple[str, int], int]] = field(init=False)
    held: list[int] = field(init=False)  # tokens that each keeps
    of_app: dict[int, list[int]] = field(default_factory=dict)  # where its system prompt was
    turn: int = 0

    def __post_init__(self) -> None:
        self.busy_until = np.zeros(self.size)
        self.answering = [deque() for _ in range(self.size)]
        self.kept = [OrderedDict() for _ in range(self.size)]
        self.held = [0] * self.size

    def backlog(self, place: int, now: float) -> float:
        """Seconds until a replica has computed the prompts that wait there."""
        return max(0.0, float(self.busy_until[place]) - now)

    def idlest(self) -> int:
        """The replica with the least to compute; of those without, the one idle for longest."""
        return int(self.busy_until.argmin())

    def warm(self, app: int) -> int | None:
        """A replica that keeps the system prompt of an app, one with little to do."""
        places = self.of_app.get(app, [])
        some = places
        if len(places) > LOOKED_AT:
            some = self.chance.choices(places, k=LOOKED_AT)
        still = [place for place in some if ("app", app) in self.kept[place]]
        return min(still, key=lambda place: self.busy_until[place], default=None)

    def cached(self, place: int, talk: Talk) -> int:
        """Prompt tokens of a conversation that a replica has already."""
        kept = self.kept[place]
        own = kept.get(("talk", talk.number), 0)
        return max(own, kept.get(("app", talk.app), 0))

    def answer(self, place: int, talk: Talk, now: float) -> tuple[float, int]:
        """Compute a prompt; the seconds until its first token, and the tokens that were cached."""
        answering, cached = self.answering[place], self.cached(place, talk)
        begin = max(now, float(self.busy_until[place]))
        while answering and answering[0] <= begin:  # prompts come in order, and so do the ends
            answering.popleft()
        rate = PREFILL_RATE * max(0.2, 1 - DECODE_SHARE * len(answering))
        done = begin + (talk.tokens + MESSAGE - cached) / rate
        self.busy_until[place] = done
        answering.append(done + ANSWER_S)
        self._keep(place, talk)
        talk.home = place
        return done - now, cached

    def _keep(self, place: int, talk: Talk) -> None:
        kept = self.kept[place]
        if ("app", talk.app) not in kept:
            self.of_app.setdefault(talk.app, []).append(place)
        for key, tokens in ((("app", talk.app), SYSTEM), (("talk", talk.number), talk.tokens)):
            self.held[place] += _own(key[0], tokens) - _own(key[0], kept.pop(key, None))
            kept[key] = tokens
        while self.held[place] > CACHE_TOKENS:
            (kind, _), tokens = kept.popitem(last=False)
            self.held[place] -= _own(kind, tokens)


def _own(kind: str, tokens: int | None) -> int:
    """Tokens that an entry adds: what a conversation shares with its app counts once."""
    if tokens is None:
        return 0
    return tokens if kind == "app" else tokens - SYSTEM


def round_robin(fleet: Fleet, talk: Talk, now: float) -> int:
    """One after another."""
    fleet.turn += 1
    return fleet.turn % fleet.size


def least_load(fleet: Fleet, talk: Talk, now: float) -> int:
    """The least to compute."""
    return fleet.idlest()


def affinity(fleet: Fleet, talk: Talk, now: float) -> int:
    """Where its prefix is, whatever waits there; a new one where there is least to do."""
    return fleet.idlest() if talk.home is None else talk.home


def bounded(fleet: Fleet, talk: Talk, now: float) -> int:
    """Where its prefix is, or its app's, unless much more waits there than elsewhere."""
    place, idlest = talk.home, fleet.idlest()
    if place is None:
        place = fleet.warm(talk.app)
    if place is None or fleet.backlog(place, now) - fleet.backlog(idlest, now) > BOUND_S:
        return idlest
    return place


def earliest(fleet: Fleet, talk: Talk, now: float) -> int:
    """Where the first token is expected soonest: what waits there, and what is not cached there."""
    places = {fleet.idlest(), talk.home, fleet.warm(talk.app)}

    def expected_s(place: int) -> float:
        return fleet.backlog(place, now) - fleet.cached(place, talk) / PREFILL_RATE

    return min(sorted(p for p in places if p is not None), key=expected_s)


POLICIES: dict[str, Policy] = {
    "round robin": round_robin,
    "least load": least_load,
    "affinity": affinity,
    "affinity, bounded": bounded,
    "earliest": earliest,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one policy, size and load."""

    policy: str
    replicas: int
    load: float
    cached: float  # of all prompt tokens
    median_s: float  # to the first token
    p95_s: float


def simulate(policy: str, replicas: int, load: float, seed: int) -> Outcome:
    """Run conversations through a fleet for a while."""
    chance = random.Random(seed)
    fleet = Fleet(replicas, random.Random(seed + 1))
    mean_tokens = SYSTEM + MESSAGE * (TURNS + 1)  # of a prompt, on average: two messages a turn
    rate = load * replicas * PREFILL_RATE / mean_tokens / TURNS  # conversations a second
    events: list[tuple[float, int, Talk]] = []
    began, number = chance.expovariate(rate), 0
    while began < SECONDS:
        turns = max(1, round(chance.expovariate(1 / TURNS)))
        heapq.heappush(events, (began, number, Talk(number, chance.randrange(APPS), turns)))
        began, number = began + chance.expovariate(rate), number + 1
    waits, cached, tokens = [], 0, 0
    while events:
        now, number, talk = heapq.heappop(events)
        if now > SECONDS:
            continue
        asked = talk.tokens + MESSAGE
        first_s, reused = fleet.answer(POLICIES[policy](fleet, talk, now), talk, now)
        if now > WARM_S:
            waits.append(first_s)
            cached, tokens = cached + reused, tokens + asked
        talk.tokens, talk.turns = asked + MESSAGE, talk.turns - 1
        if talk.turns:
            pause_s = chance.expovariate(1 / PAUSE_S)
            heapq.heappush(events, (now + first_s + ANSWER_S + pause_s, number, talk))
    median, late = np.percentile(waits, [50, 95])
    return Outcome(policy, replicas, load, cached / tokens, float(median), float(late))


def measure(sizes: Sequence[int], seed: int, plot: Path | None) -> Report:
    """All policies, sizes and loads."""
    found = [simulate(p, n, load, seed) for n in sizes for load in LOADS for p in POLICIES]
    rows = [
        [
            *(f"{o.replicas}", f"{o.load:g}", o.policy),
            *(f"{o.cached:.0%}", f"{o.median_s:.2f}", f"{o.p95_s:.2f}"),
        ]
        for o in found
    ]
    table = Table(
        "Simulated: replicas behind a router",
        ["replicas", "load", "policy", "cached", "first token (s)", "95 % (s)"],
        rows,
        f"Load: prompts beside what the replicas compute without a cache. Seed {seed}.",
    )
    if plot is not None:
        draw(found, plot)
    return Report("replicas", [table], {"outcomes": [asdict(outcome) for outcome in found]})


def draw(found: Sequence[Outcome], path: Path) -> None:
    """The time to the first token over the load, a panel for each size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({o.replicas for o in found})
    figure, panels = plt.subplots(1, len(sizes), figsize=(4 * len(sizes), 3.4), sharey=True)
    for panel, size in zip(np.atleast_1d(panels), sizes, strict=True):
        for policy in POLICIES:
            some = [o for o in found if o.replicas == size and o.policy == policy]
            panel.plot([o.load for o in some], [o.p95_s for o in some], marker="o", label=policy)
        panel.set(title=f"{size} replicas", xlabel="load without a cache", yscale="log")
        panel.grid(alpha=0.3)
    np.atleast_1d(panels)[0].set_ylabel("first token, 95 % (s)")
    np.atleast_1d(panels)[0].legend(fontsize=8)
    figure.suptitle("Simulated, not measured", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
