"""`bench infill`: first token of a completion at the cursor, behind a prefix that is cached or new.

A server in a process of its own, an editor that types: each request has the file before the cursor,
a little longer than the last one, and the lines behind it. Through `/infill`, and through
`/v1/completions` with a suffix.
"""

import http.client
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.errors import MlxinferError
from tests.bench.checkpoints import MIDDLE, SMALL
from tests.bench.serve import words, write_served
from tests.bench.servers import Side, serving

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
TOKENS = 4  # of an answer
TYPED = " self.page"  # between two requests
ROUTES = ("/infill", "/v1/completions")


@dataclass(frozen=True, slots=True)
class First:
    """The first token of one request."""

    wall_s: float
    cpu_s: float  # of the server, for the whole request


def run(*, prefix: int, suffix: int, runs: int, small: bool) -> Report:
    """Measure new and cached prefixes in turn.

    Args:
        prefix: words before the cursor.
        suffix: words behind it.
        runs: prefixes, each asked for once new and once cached; the median counts.
        small: a small model.
    """
    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", SMALL if small else MIDDLE, marks=MARKS)
        with serving("mlxinfer", folder) as side:
            found = {route: measured(side, route, prefix, suffix, runs) for route in ROUTES}
    rows, data = [], {}
    for route, (new, cached) in found.items():
        times = [new.wall_s * 1e3, cached.wall_s * 1e3, new.cpu_s * 1e3, cached.cpu_s * 1e3]
        ratios = [ratio(cached.wall_s, new.wall_s), ratio(cached.cpu_s, new.cpu_s)]
        rows.append([route, *(f"{each:,.1f}" for each in times), *ratios])
        keys = ("new_ms", "cached_ms", "new_cpu_ms", "cached_cpu_ms")
        data[route] = dict(zip(keys, times, strict=True))
    table = Table(
        f"First token behind {prefix} words, {suffix} words follow the cursor",
        ["", "new (ms)", "cached (ms)", "new (CPU ms)", "cached (CPU ms)", "ratio", "of CPU"],
        rows,
        f"A random float32 model on this machine; CPU time is of the server, for {TOKENS} tokens.",
    )
    return Report("infill", [table], data)


def measured(side: Side, route: str, prefix: int, suffix: int, runs: int) -> tuple[First, First]:
    """Medians of new prefixes, and of the next request behind each."""
    new, cached = [], []
    behind = "\n" + words(suffix, 1)
    for number in range(runs + 1):
        before = words(prefix, 10_000 * ROUTES.index(route) + number)
        pair = [ask(side, route, before + typed, behind) for typed in ("", TYPED)]
        if number:  # the first one is for what a server does once
            new.append(pair[0])
            cached.append(pair[1])
    return middle(new), middle(cached)


def middle(firsts: list[First]) -> First:
    """Medians of each figure."""
    return First(
        statistics.median(each.wall_s for each in firsts),
        statistics.median(each.cpu_s for each in firsts),
    )


def ask(side: Side, route: str, before: str, behind: str) -> First:
    """One streamed request, read to its end."""
    how: dict[str, Any] = {"stream": True, "temperature": 0, "max_tokens": TOKENS}
    if route == "/infill":
        body = {"input_prefix": before, "input_suffix": behind, **how}
    else:
        body = {"model": "default_model", "prompt": before, "suffix": behind, **how}
    body["ignore_eos"] = True
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=600)
    try:
        cpu, began, first = side.cpu_s(), time.perf_counter(), 0.0
        connection.request("POST", route, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise MlxinferError(f"{route} answered {answer.status}: {answer.read()[:300]!r}")
        while line := answer.readline():
            if not first and line.startswith(b"data: "):
                first = time.perf_counter() - began
        return First(first, side.cpu_s() - cpu)
    finally:
        connection.close()
