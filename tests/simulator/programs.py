"""Random programs, each from one seed: sizes, arrivals and everything that goes wrong.

Every seed switches on some features only: what all of them together would hide shows then.
"""

import random
from dataclasses import dataclass, replace
from typing import cast

from engine.oracle import Oracle as Guesses
from engine.pictures import picture
from simulator.fake_disk import FakeTier
from simulator.oracle import Rules
from simulator.simulation import WIDTH, Simulation
from simulator.sizes import draw_sizes

from mlxinfer.cache.prefix import Lease
from mlxinfer.core import Grammar, Request, SamplingParams
from mlxinfer.engine.prompt_pictures import LEAST_KEY, feature_keys
from mlxinfer.images import Picture, PlacedPicture

FEATURES = (
    "shared prefixes",
    "turns of a chat",
    "the same again",
    "cancels",
    "stop tokens",
    "prompt logits",
    "forced preemption",
    "faults",
    "clears",
    "pins",
    "bursts",
    "long answers",
    "pauses",
    "tight pool",
    "disk",
    "bad disk",
    "restarts",
    "grammars",
)


@dataclass
class Pin:
    """A prefix that is kept for a while."""

    lease: Lease
    until: int
    num_pages: int


class Program:
    """What happens, turn by turn; `log` says it in words.

    Args:
        seed: of all that is drawn.
        proposes: whether steps verify proposals: the same program, and the same tokens.
        recurrent: whether there are recurrent layers: their states are kept as snapshots.
        num_stages: steps of different rows in flight.
        sees: whether prompts have pictures.
    """

    def __init__(
        self,
        seed: int,
        *,
        proposes: bool = False,
        recurrent: bool = False,
        num_stages: int = 1,
        sees: bool = False,
    ) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        share = rng.choice([0.2, 0.5, 0.8])
        self.features = {name for name in FEATURES if rng.random() < share}
        self.extra_pages = rng.randint(1, 4) if "pins" in self.features else 0
        tight = "tight pool" in self.features
        disk = "disk" in self.features
        if disk:  # it is of use to long prompts that come again when they were evicted
            self.features |= {"the same again", "tight pool"}
        sizes = draw_sizes(rng, tight=tight, disk=disk, extra_pages=self.extra_pages)
        self.sizes = replace(sizes, num_stages=num_stages)
        self.tier = FakeTier(random.Random(seed), fault_share=0.1 * ("bad disk" in self.features))
        answers: dict[str, list[int]] = {}
        proposer = Guesses(answers, seed, vocab=4) if proposes else None
        self.state_rng = random.Random(f"states {seed}")
        max_snapshots = self.state_rng.choice([0, 1, 2, 5, 50]) if recurrent else None
        self.picture_rng = random.Random(f"pictures {seed}")
        self.pictures = self._draw_pictures() if sees else []
        largest = max([picture.num_features for picture in self.pictures], default=0)
        self.simulation = Simulation(
            self.sizes,
            self.tier,
            answers,
            proposer=proposer,
            max_snapshots=max_snapshots,
            feature_bytes=4 * WIDTH * largest * self.picture_rng.choice([1, 1, 2, 9]),
        )
        self.log = [f"seed {seed}: {sorted(self.features)}", str(self.sizes)]
        self.num_left = rng.randint(2, 20 if disk else 14)  # requests still to come
        self.preempt_share = rng.choice([0.05, 0.15, 0.5])
        self.fault_share = rng.choice([0.02, 0.1])
        self.arrival_share = rng.choice([0.05, 0.2, 0.5])
        self.bases = [[rng.randrange(self.sizes.vocab) for _ in range(200)] for _ in range(2)]
        for base in self.bases if sees else ():
            self._put_pictures(base)
        self.pins: list[Pin] = []

    def run(self) -> None:
        """All of it, then until nothing is left.

        Raises:
            AssertionError: something that must hold does not.
        """
        simulation = self.simulation
        while self.num_left:
            self._something()
            simulation.turn()
        for _ in range(self.rng.choice([0, 5, 30])):
            self._trouble()
            simulation.turn()
        simulation.next_fault = None
        for _ in range(self._bound()):
            if simulation.idle:
                break
            simulation.turn()
        assert simulation.idle, "the queue does not drain"
        self._unpin(everything=True)
        simulation.check_end()

    def _bound(self) -> int:
        """Turns in which what is left must end, whatever has to be computed twice."""
        left = [a for a in self.simulation.asked.values() if a.reason is None]
        return 20 + sum(2 * (len(a.request.prompt_ids) + 2 * len(a.expected)) for a in left)

    def _say(self, text: str) -> None:
        self.log.append(f"turn {self.simulation.turns}: {text}")

    def _on(self, feature: str, share: float) -> bool:
        return feature in self.features and self.rng.random() < share

    # -- what happens ----------------------------------------------------------------------------

    def _something(self) -> None:
        hurry = self.simulation.idle and not self._on("pauses", 0.5)
        while self.num_left and (hurry or self.rng.random() < self.arrival_share):
            self._arrive()
            hurry = self._on("bursts", 0.7)
        self._trouble()

    def _trouble(self) -> None:
        simulation, rng = self.simulation, self.rng
        live = [name for name, asked in simulation.asked.items() if asked.reason is None]
        if live and self._on("cancels", 0.06):
            name = rng.choice(live)
            self._say(f"cancel {name}")
            simulation.abort(name)
        some_run = bool(simulation.scheduler.queues.running)
        if some_run and self._on("forced preemption", self.preempt_share):
            sequence = rng.choice(simulation.scheduler.queues.running)
            self._say(f"preempt {sequence.request.id}")
            simulation.scheduler.queues.preempt(sequence)
        if self._on("faults", self.fault_share):
            simulation.next_fault = rng.choice(
                ["start", "middle", "end", "sample_constrained", "read"]
            )
            self._say(f"the next step fails: {simulation.next_fault}")
        if self.pictures and self.picture_rng.random() < 0.02:
            self._say("the tower fails")
            simulation.tower.fails = RuntimeError("asked for")
        if self._on("clears", 0.03):
            self._say("clear")
            simulation.scheduler.kv_manager.prefix.clear()
        if simulation.idle and not self.pins and self._on("restarts", 0.2):
            self._say("restart")
            simulation.restart()
        self._unpin()
        if self._on("pins", 0.1):
            self._pin()

    def _pin(self) -> None:
        """Keep a prefix, as long as all pins together leave what requests need."""
        prefix = self.simulation.scheduler.kv_manager.prefix
        tokens = self._prompt()
        match = prefix.probe(prefix.names(None, tokens), limit=len(tokens))
        num_pages = match.num_pages + (match.cut is not None)
        if num_pages and sum(p.num_pages for p in self.pins) + num_pages <= self.extra_pages:
            until = self.simulation.turns + self.rng.randint(0, 20)
            self._say(f"pin {match.num_tokens} tokens until turn {until}")
            self.pins.append(Pin(prefix.lock(match), until, num_pages))
            self.simulation.pins = [pin.lease for pin in self.pins]

    def _unpin(self, *, everything: bool = False) -> None:
        for pin in list(self.pins):
            if everything or pin.until <= self.simulation.turns:
                self.simulation.scheduler.kv_manager.prefix.release(pin.lease)
                self.pins.remove(pin)
        self.simulation.pins = [pin.lease for pin in self.pins]

    # -- pictures --------------------------------------------------------------------------------

    def _draw_pictures(self) -> list[Picture]:
        """Some, of which those that a chunk can hold see themselves."""
        rng, most = self.picture_rng, self.sizes.prefill_chunk
        counts = [rng.choice([1, 3, rng.randint(1, 30), most]) for _ in range(3)]
        return [
            replace(
                picture(i, 1, count, sees_itself=count <= most),
                token_ids=(1,) * count,
                feature_id=1,
            )
            for i, count in enumerate(counts)
        ]

    def _put_pictures(self, keys: list[int]) -> None:
        """Put the ids of pictures in some places of a prompt."""
        rng = self.picture_rng
        for _ in range(rng.choice([1, 1, 2, 4])):
            shown = rng.choice(self.pictures)
            place = rng.randint(0, min(len(keys) - 1, 60))
            keys[place:place] = feature_keys(shown)

    def _read_pictures(self, keys: list[int]) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Token ids and pictures of a prompt of key ids; it ends before a picture that is cut."""
        first = {feature_keys(one)[0]: one for one in self.pictures}
        ids: list[int] = []
        placed = []
        while len(ids) < len(keys):
            if keys[len(ids)] < LEAST_KEY:
                ids.append(keys[len(ids)])
                continue
            one = first.get(keys[len(ids)])
            if one is None or keys[len(ids) :][: one.num_features] != feature_keys(one):
                break
            placed.append(PlacedPicture(one, len(ids)))
            ids += one.token_ids
        return ids or [0], tuple(placed)

    # -- arrivals --------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.num_left -= 1
        keys = self._prompt()
        if self.pictures and self.picture_rng.random() < 0.3:
            self._put_pictures(keys)
        rng, (prompt, pictures) = self.rng, self._read_pictures(keys)
        stop = {rng.randrange(self.sizes.vocab) for _ in range(2)}
        params = SamplingParams(
            max_tokens=rng.choice([1, rng.randint(1, 10), rng.randint(1, 40)])
            + self._on("long answers", 0.7) * rng.randint(10, 30),
            seed=rng.randint(0, 3),
        )
        request = Request(
            f"r{len(self.simulation.asked)}",
            prompt,
            params,
            frozenset(stop) if self._on("stop tokens", 0.7) else frozenset(),
            prompt_logits=self._on("prompt logits", 0.2),
            grammar=cast(Grammar, Rules()) if self._on("grammars", 0.6) else None,
            pictures=pictures,
        )
        if self.simulation.states is not None and self.state_rng.random() < 0.3:
            request.boundaries = (self.state_rng.randint(0, len(prompt)),)
        max_output = self._check(request)
        if max_output is not None:
            self._say(f"{request.id} arrives: {len(prompt)} tokens, {max_output} wanted")
            self.simulation.add(request, max_output)

    def _check(self, request: Request) -> int | None:
        """How long the answer may be, so that the request fits alone; None: it never does."""
        kv_manager, sizes = self.simulation.scheduler.kv_manager, self.sizes
        for max_output in range(request.params.max_tokens or 1, 0, -1):
            num_tokens = len(request.prompt_ids) + max_output
            needed = [group.max_pages(num_tokens) for group in kv_manager.groups]
            spare = [n - m - self.extra_pages for n, m in zip(sizes.num_pages, needed, strict=True)]
            if min(spare) >= 0:
                return max_output
        return None

    def _prompt(self) -> list[int]:
        rng = self.rng
        unshared = [
            rng.randrange(self.sizes.vocab)
            for _ in range(rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 70)]))
        ]
        earlier = list(self.simulation.asked.values())
        if earlier and self._on("turns of a chat", 0.5):
            tokens = rng.choice(earlier).tokens
            return tokens[: max(len(tokens) - rng.choice([0, 0, 1, 3]), 1)] + unshared[:20]
        if earlier and self._on("the same again", 0.3):
            tokens = rng.choice(earlier).tokens
            return tokens[: rng.choice([len(tokens), rng.randint(1, len(tokens))])]
        if self._on("shared prefixes", 0.7):
            return rng.choice(self.bases)[: rng.randint(0, 60)] + unshared[:30]
        return unshared
