"""What clients do to a server at once, and what each of them waits. Knows a port, no server.

Every scene starts from an idle server and ends with one.
"""

import asyncio
import random
import statistics
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .serve_client import Heard, Messages, chat

WORDS = ("page", "token", "layer", "cache", "head", "step", "model", "batch", "query", "mask")
ROUNDS = 3
BEHIND_S = 0.05  # between a long prompt and the short ones behind it


@dataclass(frozen=True, slots=True)
class Found:
    """A figure of one side; `higher` is better or worse."""

    label: str
    value: float
    higher: bool = False
    unit: str = "s"


Scene = Callable[[int], Awaitable[list[Found]]]


def words(count: int, seed: int) -> str:
    """About `count` tokens of text that no other seed begins with."""
    rng = random.Random(seed)
    return " ".join([str(seed), *rng.choices(WORDS, k=count)])


def user(text: str) -> dict[str, str]:
    """A message."""
    return {"role": "user", "content": text}


async def gather(asks: Sequence[Awaitable[Heard]]) -> list[Heard]:
    """Hear all at once."""
    return list(await asyncio.gather(*asks))


async def beside_a_stream(port: int, *, stream: int, shorts: int) -> list[Found]:
    """First token of short requests, one after the other: idle, then while another streams."""
    idle = [(await chat(port, [user(words(20, 100 + i))], 8)).first_s for i in range(shorts)]
    heard = Heard(0.0)
    running = asyncio.create_task(chat(port, [user(words(30, 1))], stream, heard))
    while not heard.pieces_s and not running.done():
        await asyncio.sleep(0.01)
    busy = [(await chat(port, [user(words(20, 200 + i))], 8)).first_s for i in range(shorts)]
    await running
    return [
        Found("first token, idle: median", statistics.median(idle)),
        Found("first token while another streams: median", statistics.median(busy)),
        Found("first token while another streams: longest", max(busy)),
    ]


async def behind_a_prefill(port: int, *, long: int, stream: int) -> list[Found]:
    """Three short requests behind a long prompt, beside a running stream."""
    heard = Heard(0.0)
    running = asyncio.create_task(chat(port, [user(words(30, 2))], stream, heard))
    while not heard.pieces_s and not running.done():
        await asyncio.sleep(0.01)
    prompt = asyncio.create_task(chat(port, [user(words(long, 3))], 4))
    await asyncio.sleep(BEHIND_S)
    shorts = await gather([chat(port, [user(words(20, 300 + i))], 8) for i in range(3)])
    await prompt
    await running
    return [
        Found(f"first token behind a {long}-word prompt", max(s.first_s for s in shorts)),
        Found("longest gap of a running stream meanwhile", heard.longest_gap_s),
    ]


async def together(
    port: int, *, count: int, tokens: int, label: str, settings: Callable[[int], dict[str, Any]]
) -> list[Found]:
    """Tokens a second of `count` requests that come at once: the median of some rounds.

    Nobody has heard these prompts before, not in a scene with other settings either.
    """
    rates, seed = [], zlib.crc32(f"{count} {label}".encode())
    for number in range(ROUNDS + 1):
        began = time.monotonic()
        asks = [
            chat(port, [user(words(30, seed + 100 * number + i))], tokens, **settings(i))
            for i in range(count)
        ]
        heard = await gather(asks)
        rates.append(sum(h.num_tokens for h in heard) / (time.monotonic() - began))
    rate = statistics.median(rates[1:])  # the first one warms up
    return [Found(f"{count} at once, {label}", rate, higher=True, unit="tokens/s")]


async def shared_prefix(port: int, *, count: int, prefix: int) -> list[Found]:
    """Cold requests that begin with one text: the longest wait for a first token."""
    system = {"role": "system", "content": words(prefix, 4)}
    asks = [chat(port, [system, user(words(16, 400 + i))], 4) for i in range(count)]
    heard = await gather(asks)
    label = f"{count} cold requests with one prefix of {prefix} words: last first token"
    return [Found(label, max(h.first_s for h in heard))]


async def conversations(port: int, *, count: int, turns: int) -> list[Found]:
    """Conversations in turn; the mean wait for a first token from the second turn on."""
    histories: list[list[dict[str, str]]] = [[] for _ in range(count)]
    waits: list[float] = []
    for turn in range(turns):
        for i, history in enumerate(histories):
            history.append(user(words(100, 5000 + 100 * turn + i)))
            heard = await chat(port, _as_messages(history), 24)
            history.append({"role": "assistant", "content": heard.text})
            if turn:
                waits.append(heard.first_s)
    label = f"{count} conversations in turn: first token from the second turn on"
    return [Found(label, statistics.mean(waits))]


def _as_messages(history: list[dict[str, str]]) -> Messages:
    return list(history)
