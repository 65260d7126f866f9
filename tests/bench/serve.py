"""`bench serve`: two servers, one model, the same clients.

Every scene starts from an idle server and ends with one.
"""

import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxinfer.bench.load import ChatClient, TimedAnswer
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import MlxinferError
from tests.bench.checkpoints import LAPTOP, SMALL, write_served
from tests.bench.processes import Side, serving
from tests.bench.tables import NAMES, SIDES, sides

WORDS = ("page", "token", "layer", "cache", "head", "step", "model", "batch", "query", "mask")
ROUNDS = 3
THREADS = ThreadPoolExecutor(64, "client")
BEHIND_S = 0.05  # between a long prompt and the short ones behind it


@dataclass(frozen=True, slots=True)
class Found:
    """A figure of one side; `higher` is better or worse."""

    label: str
    value: float
    higher: bool = False
    unit: str = "s"


Scene = Callable[[int], list[Found]]  # of the server at a port


def words(count: int, seed: int) -> str:
    """About `count` tokens of text that no other seed begins with."""
    rng = random.Random(seed)
    return " ".join([str(seed), *rng.choices(WORDS, k=count)])


def user(count: int, seed: int) -> dict[str, str]:
    """A message of so many words."""
    return {"role": "user", "content": words(count, seed)}


def chat(
    port: int,
    messages: Sequence[dict[str, str]],
    max_tokens: int,
    answer: TimedAnswer | None = None,
    **fields: Any,
) -> TimedAnswer:
    """A streamed answer, read to its end; `answer` is filled while it comes.

    Raises:
        MlxinferError: the request failed.
    """
    body = {
        "model": "default_model",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        **fields,
    }
    answer = ChatClient(f"http://127.0.0.1:{port}").chat(body, answer)
    if answer.error is not None:
        raise MlxinferError(f"The server on port {port} failed: {answer.error}")
    return answer


def all_at_once(asks: Sequence[Callable[[], TimedAnswer]]) -> list[TimedAnswer]:
    """Answers to requests that are sent by a thread each."""
    return [running.result() for running in [THREADS.submit(ask) for ask in asks]]


@contextmanager
def a_stream(port: int, seed: int, tokens: int) -> Iterator[TimedAnswer]:
    """A request that streams, has some text already, and is read to its end at last."""
    heard = TimedAnswer()
    running = THREADS.submit(chat, port, [user(30, seed)], tokens, heard)
    while not heard.pieces_s and not running.done():
        time.sleep(0.01)
    yield heard
    running.result()


def beside_a_stream(port: int, *, stream: int, shorts: int) -> list[Found]:
    """First token of short requests, one after the other: idle, then while another streams."""
    idle = [chat(port, [user(20, 100 + i)], 8).first_s for i in range(shorts)]
    with a_stream(port, 1, stream):
        busy = [chat(port, [user(20, 200 + i)], 8).first_s for i in range(shorts)]
    return [
        Found("first token, idle: median", statistics.median(idle)),
        Found("first token while another streams: median", statistics.median(busy)),
        Found("first token while another streams: longest", max(busy)),
    ]


def behind_a_prefill(port: int, *, long: int, stream: int) -> list[Found]:
    """Three short requests behind a long prompt, beside a running stream."""
    with a_stream(port, 2, stream) as heard:
        prompt = THREADS.submit(chat, port, [user(long, 3)], 4)
        time.sleep(BEHIND_S)
        asks = [partial(chat, port, [user(20, 300 + i)], 8) for i in range(3)]
        first_s = max(answer.first_s for answer in all_at_once(asks))
        prompt.result()
    return [
        Found(f"first token behind a {long}-word prompt", first_s),
        Found("longest gap of a running stream meanwhile", max(heard.gaps_s, default=0.0)),
    ]


def together(
    port: int, *, count: int, tokens: int, label: str, settings: Callable[[int], dict[str, Any]]
) -> list[Found]:
    """Tokens a second of `count` requests that come at once: the median of some rounds.

    No server has had these prompts before, not in a scene with other settings either.
    """
    rates, seed = [], zlib.crc32(f"{count} {label}".encode())
    for number in range(ROUNDS + 1):
        began = time.monotonic()
        asks = [
            partial(chat, port, [user(30, seed + 100 * number + i)], tokens, **settings(i))
            for i in range(count)
        ]
        made = sum(answer.num_tokens for answer in all_at_once(asks))
        rates.append(made / (time.monotonic() - began))
    rate = statistics.median(rates[1:])  # the first one warms up
    return [Found(f"{count} at once, {label}", rate, higher=True, unit="tokens/s")]


def shared_prefix(port: int, *, count: int, prefix: int) -> list[Found]:
    """Cold requests that begin with one text: the longest wait for a first token."""
    system = {"role": "system", "content": words(prefix, 4)}
    asks = [partial(chat, port, [system, user(16, 400 + i)], 4) for i in range(count)]
    label = f"{count} cold requests with one prefix of {prefix} words: last first token"
    return [Found(label, max(answer.first_s for answer in all_at_once(asks)))]


def conversations(port: int, *, count: int, turns: int) -> list[Found]:
    """Conversations in turn; the mean wait for a first token from the second turn on."""
    histories: list[list[dict[str, str]]] = [[] for _ in range(count)]
    waits: list[float] = []
    for turn in range(turns):
        for i, history in enumerate(histories):
            history.append(user(100, 5000 + 100 * turn + i))
            heard = chat(port, history, 24)
            history.append({"role": "assistant", "content": heard.text})
            if turn:
                waits.append(heard.first_s)
    label = f"{count} conversations in turn: first token from the second turn on"
    return [Found(label, statistics.mean(waits))]


def processor_time(side: Side, tokens: int) -> Found:
    """Processor time of the whole process for one streamed token, 8 streams at once."""
    before = side.cpu_s()
    together(side.port, count=8, tokens=tokens, label="streams", settings=_greedy)
    spent_ms = (side.cpu_s() - before) * 1e3
    label = "8 streams: processor time a token, model included"
    return Found(label, spent_ms / (8 * tokens * (ROUNDS + 1)), unit="ms")


def run(*, small: bool, peer: bool) -> Report:
    """Every scene on both servers, one after the other."""
    if peer:
        require_peer()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = write_served(Path(scratch) / "model", SMALL if small else LAPTOP)
        names = NAMES if peer else NAMES[:1]
        sides = [stack.enter_context(serving(name, folder)) for name in names]
        figures: list[list[Found]] = []
        for scene in scenes(small):
            figures += map(list, zip(*(scene(side.port) for side in sides), strict=True))
        figures.append([processor_time(side, 32 if small else 64) for side in sides])
    data = {"figures": [[asdict(side) for side in row] for row in figures]}
    return Report("serve", [_table(figures, small)], data)


def scenes(small: bool) -> list[Scene]:
    """Return the scenes in order."""
    tokens, long, counts = (8, 60, (1, 4)) if small else (32, 1500, (1, 8, 32))
    greedy: list[Scene] = [
        partial(together, count=n, tokens=tokens, label="greedy", settings=_greedy) for n in counts
    ]
    mixed: list[Scene] = [
        partial(together, count=n, tokens=tokens, label="each its own top-p", settings=_top_p)
        for n in counts[1:]
    ]
    return [
        partial(beside_a_stream, stream=24 if small else 400, shorts=3 if small else 16),
        partial(behind_a_prefill, long=long, stream=24 if small else 400),
        *greedy,
        *mixed,
        partial(together, count=4, tokens=tokens, label="seeded", settings=_seeded),
        partial(shared_prefix, count=6, prefix=40 if small else 800),
        partial(conversations, count=4 if small else 16, turns=2 if small else 3),
    ]


def _greedy(index: int) -> dict[str, Any]:
    return {}


def _top_p(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "top_p": 0.7 + 0.005 * index}


def _seeded(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": index}


def _table(figures: Sequence[Sequence[Found]], small: bool) -> Table:
    rows = []
    for row in figures:
        ours = row[0]
        form = ",.3f" if ours.unit == "s" else ",.1f"
        cells = sides([side.value for side in row], form, higher=ours.higher)
        rows.append([f"{ours.label} ({ours.unit})", *cells])
    return Table(
        "Two servers, one model" + (", small" if small else ""),
        ["", *SIDES],
        rows,
        "A random float32 model with the demo's tokens (55M weights), both servers with their "
        "defaults, OpenBLAS under both; one after the other over loopback, streamed.",
    )
