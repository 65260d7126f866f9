"""What KV caches copy and waste: decode steps, live tokens, comings and goings. No tables.

MLX updates an array in place only if nobody else holds it, and operations in flight do. MLX limits
how many those are, so an engine that launches ahead copies its KV cache only where a whole step has
few; such copies would show as memory above what is held between steps. Padding shows as bytes held
a live token, and moving whole caches as memory while somebody joins or leaves.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .checkpoints import Dense, random_prompt
from .kv_cost import peak_bytes
from .served import Ask, Server

WIDE = Dense(hidden=64, inner=128, layers=2, heads=4, kv_heads=4, head_dim=64, vocab=256)
TOKEN_BYTES = WIDE.layers * 2 * WIDE.kv_heads * WIDE.head_dim * 4  # float32
PAGE = 16
ENDLESS = 1 << 14


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode steps of streams that hold much KV."""

    held_bytes: int  # of KV cache
    extra_bytes: int  # peak memory of the steps, above what was held before them
    tokens_per_s: float

    @property
    def extra_share(self) -> float:
        """Of the KV cache: 1.0 is a second copy of all of it."""
        return self.extra_bytes / self.held_bytes


@dataclass(frozen=True, slots=True)
class Waste:
    """KV held for live tokens of different lengths."""

    live_bytes: int  # what the tokens themselves take
    rounded_bytes: int  # the same in whole pages
    held_bytes: int
    tail_bytes: int  # of which tails


@dataclass(frozen=True, slots=True)
class Change:
    """Peak memory of steps, above what was held before them."""

    steady_bytes: int  # nobody comes or goes
    join_bytes: int  # in the steps until a short prompt has its first token
    leave_bytes: int  # in the steps until one has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many streams of how many tokens."""

    streams: tuple[tuple[int, int], ...] = ((1, 8192), (64, 1024))
    steps: int = 32
    rounds: int = 3
    lengths: tuple[int, ...] = (3000, 500, 10)
    crowd: tuple[int, int] = (15, 1024)  # whom somebody joins


SMALL = Scale(streams=((2, 200),), steps=20, lengths=(120, 50, 10), crowd=(3, 100))


def fill(server: Server, lengths: Sequence[int], limits: Sequence[int] | None = None) -> None:
    """Start a stream for each length and step until every one decodes."""
    waiting = set()
    for index, length in enumerate(lengths):
        limit = limits[index] if limits else ENDLESS
        prompt = random_prompt(length, WIDE.vocab, index)
        server.submit(Ask(str(index), [("user", prompt)], limit))
        waiting.add(str(index))
    while waiting:
        waiting -= {token.name for token in server.step()}


def settle(server: Server, steps: int = 2 * PAGE + 2) -> None:
    """Decode steps; after so many, rings are full and every kind of step was seen."""
    for _ in range(steps):
        server.step()


def decode(
    servers: Sequence[Server], count: int, length: int, steps: int, rounds: int
) -> list[Decode]:
    """Peak and speed of `steps` decode steps; the sides alternate, and speed is the median."""
    for server in servers:
        fill(server, [length] * count)
        settle(server)
    held = [server.running_bytes for server in servers]
    extra = [0] * len(servers)
    speeds: list[list[float]] = [[] for _ in servers]
    for _ in range(rounds):
        for index, server in enumerate(servers):
            started = time.perf_counter()
            extra[index] = max(extra[index], peak_bytes(partial(settle, server, steps)))
            speeds[index].append(count * steps / (time.perf_counter() - started))
    return [Decode(*each) for each in zip(held, extra, map(statistics.median, speeds), strict=True)]


def waste(server: Server, lengths: Sequence[int]) -> Waste:
    """What is held for `lengths` just after their first tokens."""
    fill(server, lengths)
    live = sum(lengths)
    rounded = sum(-(-length // PAGE) * PAGE for length in lengths)
    held = server.running_bytes
    return Waste(live * TOKEN_BYTES, rounded * TOKEN_BYTES, held, server.tail_bytes)


def change(server: Server, count: int, length: int) -> Change:
    """A crowd decodes; one joins with a short prompt, and one leaves."""
    fill(server, [length] * count)
    settle(server)
    steady = peak_bytes(partial(settle, server, 4))

    def join() -> None:
        ask = Ask("new", [("user", random_prompt(PAGE, WIDE.vocab, 77))], 4)
        server.submit(ask)
        until(server, lambda names: "new" in names)

    def leave() -> None:
        until(server, lambda names: "new" not in names)

    joined = peak_bytes(join)
    return Change(steady, joined, peak_bytes(leave))


def until(server: Server, done: Callable[[set[str]], bool]) -> None:
    """Step until the names that got a token are as `done` wants them."""
    while not done({token.name for token in server.step()}):
        pass
