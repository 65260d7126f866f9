"""Which experts a cache should keep: policies over simulated routing. Knows no model.

A token goes to k of E experts of each layer. Some are popular, some fit a topic that changes now
and then, and some come again because the last token had them. Experts in memory are a share of all.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxinfer.bench.report import Report, Table

LAYERS, EXPERTS, PER_TOKEN = 12, 64, 6
TOPIC_TOKENS, WARM_TOKENS = 150, 100
SHARES = (0.125, 0.25, 0.5)


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose: weights of what decides."""

    name: str
    popular: float
    topic: float
    again: float

    def draw(self, tokens: int, seed: int = 1) -> NDArray[np.int64]:
        """(T, LAYERS, PER_TOKEN) experts."""
        rng = np.random.default_rng(seed)
        ranks = np.stack([rng.permutation(EXPERTS) + 1 for _ in range(LAYERS)])
        popular, last = -self.popular * np.log(ranks), np.zeros((LAYERS, EXPERTS))
        drawn = np.zeros((tokens, LAYERS, PER_TOKEN), np.int64)
        for token in range(tokens):
            if token % TOPIC_TOKENS == 0:
                topic = self.topic * rng.normal(size=(LAYERS, EXPERTS))
            logits = popular + topic + self.again * last + rng.gumbel(size=(LAYERS, EXPERTS))
            drawn[token] = np.argpartition(logits, -PER_TOKEN, axis=1)[:, -PER_TOKEN:]
            last[:] = 0
            np.put_along_axis(last, drawn[token], 1.0, axis=1)
        return drawn


ROUTINGS = (
    Routing("nearly even", 0.2, 0.3, 0.5),
    Routing("popular experts", 0.8, 0.3, 0.5),
    Routing("topics", 0.4, 1.5, 0.5),
    Routing("the last token's", 0.3, 0.5, 2.0),
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept: by use, with a share of the past that is left after a token; None: by age."""

    name: str
    left: float | None
    by_layer: bool = True

    def hit_rate(self, drawn: NDArray[np.int64], share: float) -> float:
        """Of the experts that tokens go to, those in memory; the first tokens do not count."""
        count = LAYERS * EXPERTS
        groups = np.arange(count) // EXPERTS if self.by_layer else np.zeros(count, np.int64)
        room = int(share * EXPERTS) * (1 if self.by_layer else LAYERS)
        here, used, age = np.zeros(count, bool), np.zeros(count), np.zeros(count)
        held = np.zeros(LAYERS, np.int64)
        hits = total = 0
        for token, layers in enumerate(drawn):
            used *= self.left or 1.0
            for layer, chosen in enumerate(layers):
                own = layer * EXPERTS + chosen
                group = groups[own[0]]
                if token >= WARM_TOKENS:
                    hits, total = hits + int(here[own].sum()), total + len(own)
                used[own] += 1
                age[own] = token
                missing = own[~here[own]]
                gone = len(missing) - (room - held[group])
                if gone > 0:
                    spare = np.flatnonzero(here & (groups == group))
                    spare = spare[~np.isin(spare, own)]
                    keys = (age[spare],) if self.left is None else (age[spare], used[spare])
                    here[spare[np.lexsort(keys)[:gone]]] = False
                    held[group] -= gone
                here[missing] = True
                held[group] += len(missing)
        return hits / total


POLICIES = (
    Policy("least recently used", None),
    Policy("the same, one pool", None, by_layer=False),
    Policy("by use, 0.9", 0.9),
    Policy("by use, 0.97", 0.97),
    Policy("the same, one pool", 0.97, by_layer=False),
    Policy("by use, 0.99", 0.99),
)


def policies(*, small: bool) -> Report:
    """Hit rates of all policies."""
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for routing in ROUTINGS:
        drawn = routing.draw(160 if small else 600)
        for share in SHARES[-1:] if small else SHARES:
            rates = [policy.hit_rate(drawn, share) for policy in POLICIES]
            rows.append([routing.name, f"{share:.1%}", *(f"{rate:.1%}" for rate in rates)])
            data.append({"routing": routing.name, "share": share, "hit_rates": rates})
    table = Table(
        f"Experts found in memory: {PER_TOKEN} of {EXPERTS} a token, {LAYERS} layers, simulated",
        ["routing", "in memory", *(policy.name for policy in POLICIES)],
        rows,
        "By use: the share of the past that is left after each token. Slots are of a layer each, "
        "but in one pool.",
    )
    return Report("experts", [table], {"policies": [p.name for p in POLICIES], "rates": data})
