"""`bench fair`: what streams of a light key get over HTTP while a heavy key does what it likes.

A server with two keys, each of one half. The light key streams an answer, waits a second, and asks
again: on the idle server, beside one stream of the heavy key, beside 64 of its clients that hang up
in 30 % of requests (chats, prompts, grammars, PDFs, pictures), beside a queue that it fills, and
beside floods of one kind. With the key of the heavy clients, the same shows what there would be
without shares. The heavy clients are a process: `python -m benchmarks.fair PORT SCENE`. Clients
are usually on other machines, so this process leaves the cores to the server (`nice`).
"""

import asyncio
import base64
import contextlib
import io
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.processes import ROOT, serving
from benchmarks.tables import Figures
from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import MlxinferError
from tests.pdf_files import pdf
from tests.seeing_folder import seeing_folder

LIGHT, HEAVY = "sk-light-0123456789abcdef", "sk-heavy-0123456789abcdef"
KEYS = f'[light]\nkey = "{LIGHT}"\n[heavy]\nkey = "{HEAVY}"\n'
MAX_WAITING = 32
ANSWER = 24  # tokens of the light key's answers
PAUSE_S = 1.0  # between two answers of the light key
STARTED_S = 5.0  # for which the heavy clients are served before anything is timed
LEAVE = 0.3  # share of the heavy requests that hang up
SLICE_S = 0.25
LONGEST = 1 << 25  # bytes of a line: the ids of a long text are one
Body = dict[str, Any]
Call = tuple[str, Body]  # the path and the body of a request
Clock = Callable[[], float]


def chat(content: Any, max_tokens: int, **fields: Any) -> Call:
    """A request to the chat API, streamed."""
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "stream": True}
    return "/v1/chat/completions", {**body, "max_tokens": max_tokens, **fields}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(["red", "number", "fact", "of", f"{rng.random()}"], k=count))


def _file(rng: random.Random) -> Call:
    data = pdf(*[_words(rng, 5) for _ in range(20)])
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
    return chat([file, {"type": "text", "text": "What is it?"}], 8)


def _picture(rng: random.Random) -> Call:
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (300, 400, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    shown = {"type": "image_url", "image_url": {"url": url}}
    return chat([shown, {"type": "text", "text": "What is it?"}], 8, model="see")


def _grammar(rng: random.Random) -> Call:
    return chat("A number", 24, guided_regex=f"[0-9]{{{rng.randint(4, 12)}}}{rng.randrange(999)}")


def _talk(rng: random.Random) -> Call:
    return chat(_words(rng, rng.choice([5, 30, 80])), rng.choice([5, 15, 40, 200]))


def _document(rng: random.Random) -> Call:
    return chat(_words(rng, 300), 12)


def _long(rng: random.Random) -> Call:
    return chat(_words(rng, 5), 600, ignore_eos=True)


def _eight(rng: random.Random) -> Call:
    return chat(_words(rng, 20), 40, n=8, ignore_eos=True)


def _background(rng: random.Random) -> Call:
    asked = {"input": _words(rng, 30), "max_output_tokens": 60}
    return "/v1/responses", {"model": "demo", "background": True, **asked}


def _prompts(rng: random.Random) -> Call:
    prompts = [_words(rng, 20) for _ in range(32)]
    return "/v1/completions", {
        "model": "demo",
        "prompt": prompts,
        "max_tokens": 20,
        "ignore_eos": True,
    }


def _tokenize(rng: random.Random) -> Call:
    return "/tokenize", {"model": "demo", "prompt": _words(rng, 1000) * 400}  # 3 MB


@dataclass(frozen=True, slots=True)
class Scene:
    """The load of the heavy key: clients that each send one request after the other.

    Attributes:
        clients: how many.
        kinds: functions that make a request; each client draws one at random, again and again.
        leave: share of the requests that hang up.
    """

    clients: int
    kinds: tuple[Callable[[random.Random], Call], ...]
    leave: float = 0.0


SCENES = {
    "an idle server": Scene(0, ()),
    "one stream": Scene(1, (_long,)),
    "64 clients": Scene(64, (_talk, _talk, _talk, _document, _grammar, _file, _picture), LEAVE),
    "a full queue": Scene(150, (_long,)),
    "24 clients with n=8": Scene(24, (_eight,)),
    "24 clients with responses in the background": Scene(24, (_background,)),
    "12 clients with 32 prompts in a request": Scene(12, (_prompts,)),
    "8 clients with 3 MB for /tokenize": Scene(8, (_tokenize,)),
}
CASES = [(True, name) for name in SCENES]  # whether the light client has a key of its own
CASES += [(False, "64 clients"), (False, "a full queue")]


# -- the heavy key --------------------------------------------------------------------------------


@dataclass(slots=True)
class Streamed:
    """A request that was answered: its status, when it was sent, and when each piece came (s)."""

    status: str
    sent: float
    pieces: list[float] = field(default_factory=list)


async def ask(
    port: int, key: str, call: Call, leaves_s: float | None = None, clock: Clock = time.monotonic
) -> Streamed:
    """Read an answer as it comes, or hang up after a time."""
    path, body = call
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST)
    answer = Streamed("left", clock())
    try:
        writer.write(head.encode() + data)
        async with asyncio.timeout(leaves_s):
            status = (await reader.readline()).split(b" ")[1].decode()
            while line := await reader.readline():
                if b'"content":"' in line and b'"content":""' not in line:
                    answer.pieces.append(clock())
        answer.status = status
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return answer


async def client(port: int, scene: Scene, rng: random.Random) -> None:
    """One request after the other, until the process is killed."""
    while True:
        leaves_s = rng.uniform(0, 2) if rng.random() < scene.leave else None
        with contextlib.suppress(OSError, IndexError):  # the server is ending
            answer = await ask(port, HEAVY, rng.choice(scene.kinds)(rng), leaves_s)
            if answer.status == "503":
                await asyncio.sleep(0.3)
            elif answer.status not in ("200", "left"):
                raise MlxinferError(f"A heavy request failed: {answer.status}")


async def flood(port: int, scene: Scene) -> None:
    """All clients of a scene at once."""
    await asyncio.gather(*(client(port, scene, random.Random(n)) for n in range(scene.clients)))


@contextlib.contextmanager
def beside(port: int, name: str, clock: Clock) -> Iterator[None]:
    """The heavy clients of a scene in a process of their own, which have been served a while."""
    if not SCENES[name].clients:
        yield
        return
    command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.fair", str(port), name]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            until_s = clock() + STARTED_S
            while clock() < until_s and process.poll() is None:
                time.sleep(0.1)
            yield
            if process.poll() is not None:
                raise MlxinferError(f"The heavy clients ended before the light one, beside {name}.")
        finally:
            process.kill()  # its clients hang up


# -- the light key --------------------------------------------------------------------------------


async def light(port: int, key: str, count: int, clock: Clock) -> list[Streamed]:
    """Short answers, one after the other."""
    answers = []
    for _ in range(count):
        call = chat(f"What is {time.monotonic():.6f}", ANSWER, ignore_eos=True, temperature=0)
        answers.append(await ask(port, key, call, clock=clock))
        await asyncio.sleep(PAUSE_S)
    return answers


def figures(answers: list[Streamed]) -> Figures:
    """Counts; percentiles of seconds to first tokens, and between tokens."""
    statuses = Counter(answer.status for answer in answers)
    if set(statuses) - {"200", "503"}:
        raise MlxinferError(f"Answers failed: {dict(statuses)}")
    good = [answer for answer in answers if answer.status == "200"]
    counts: Figures = {"answers": len(good), "refused": statuses["503"]}
    for name, values in (
        ("first", [answer.pieces[0] - answer.sent for answer in good]),
        ("gap", [late - early for answer in good for early, late in pairwise(answer.pieces)]),
    ):
        if values:
            p50, p95 = np.percentile(values, (50, 95)).tolist()
            counts |= {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_max": max(values)}
    return counts


def cpu_clock(pid: int) -> Clock:
    """CPU seconds of another process (Linux): what it computed, whatever else the machine does."""
    return partial(time.clock_gettime, (~pid << 3) | 2)


def run(*, answers: int, skip_same: bool, cpu_time: bool) -> Report:
    """Each scene, with `answers` answers of the light client."""
    measured: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        keys, see = Path(temporary) / "keys.toml", seeing_folder(Path(temporary) / "see")
        keys.write_text(KEYS)
        options = ["-m", "demo", "-m", f"see={see}", "--keys-file", str(keys)]
        with serving(*options, MLXINFER_SERVE_MAX_WAITING=str(MAX_WAITING)) as (port, pid):
            clock = cpu_clock(pid) if cpu_time else time.monotonic
            asyncio.run(light(port, LIGHT, 3, clock))  # what is done once
            for own, name in CASES:
                if not own and skip_same:
                    continue
                key = LIGHT if own else HEAVY
                with beside(port, name, clock):
                    streams = asyncio.run(light(port, key, answers, clock))
                measured.append({"own_key": own, "beside": name, **figures(streams)})
                time.sleep(PAUSE_S)
    clock_name = "CPU seconds of the server" if cpu_time else "seconds"
    return Report("fair", [table(measured, clock_name)], {"scenes": measured})


NUMBERS = [f"{name}_{which}" for name in ("first", "gap") for which in ("p50", "p95", "max")]


def table(measured: list[dict[str, Any]], clock_name: str) -> Table:
    """A row for each scene."""
    rows = [
        [
            f"{'a key of its own' if scene['own_key'] else 'the same key'}, {scene['beside']}",
            f"{scene['answers']} / {scene['refused']}",
            *(f"{scene[name]:.3f}" if name in scene else "-" for name in NUMBERS),
        ]
        for scene in measured
    ]
    idle = measured[0]
    first_s, gap_s = 2 * idle["first_p50"] + SLICE_S, 3 * idle["gap_p95"]
    return Table(
        f"Streams of a light client, {clock_name}",
        ["the light client has", "answers / 503", *(name.replace("_", " ") for name in NUMBERS)],
        rows,
        f"Twice the idle time and a slice: {first_s:.3f}; three times its gaps (p95): {gap_s:.3f}.",
    )


if __name__ == "__main__":
    asyncio.run(flood(int(sys.argv[1]), SCENES[sys.argv[2]]))
