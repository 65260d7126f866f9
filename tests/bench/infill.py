"""`bench infill`: first token of a completion at the cursor, behind a prefix that is cached or new.

A server in a process of its own, an editor that types: each request has the file before the cursor,
a little longer than the last one, and the lines behind it. Through `/infill`, and through
`/v1/completions` with a suffix.
"""

import http.client
import json
import statistics
import time
from dataclasses import asdict, dataclass
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


KINDS = ("new", "cached, typed on", "the same again")


@dataclass(frozen=True, slots=True)
class First:
    """The first token of one request."""

    wall_s: float
    cpu_s: float  # of the server, for the whole request
    computed: int  # tokens of the prompt that no cache had


def run(*, prefix: int, suffix: int, runs: int, small: bool) -> Report:
    """Measure new and cached prefixes in turn.

    Args:
        prefix: words before the cursor.
        suffix: words behind it.
        runs: prefixes, each asked for once in each way; the median counts.
        small: a small model.
    """
    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", SMALL if small else MIDDLE, marks=MARKS)
        with serving("mlxinfer", folder) as side:
            found = {route: measured(side, route, prefix, suffix, runs) for route in ROUTES}
    rows, data = [], {}
    for route, firsts in found.items():
        new = firsts[0]
        for kind, each in zip(KINDS, firsts, strict=True):
            times = [each.wall_s * 1e3, each.cpu_s * 1e3]
            ratios = [ratio(each.wall_s, new.wall_s), ratio(each.cpu_s, new.cpu_s)]
            rows.append(
                [route, kind, f"{each.computed:,}", *(f"{time:,.1f}" for time in times), *ratios]
            )
        data[route] = [asdict(each) for each in firsts]
    table = Table(
        f"First token behind {prefix} words, {suffix} words follow the cursor",
        ["", "", "computed", "ms", "CPU ms", "to new", "of CPU"],
        rows,
        f"A random float32 model on this machine; CPU time is of the server, for {TOKENS} tokens.",
    )
    return Report("infill", [table], data)


def measured(side: Side, route: str, prefix: int, suffix: int, runs: int) -> list[First]:
    """Medians of each kind."""
    found: list[list[First]] = [[] for _ in KINDS]
    behind = "\n" + words(suffix, 1)
    for number in range(runs + 1):
        before = words(prefix, 10_000 * ROUTES.index(route) + number)
        for firsts, typed in zip(found, ("", TYPED, TYPED), strict=True):
            first = ask(side, route, before + typed, behind)
            if number:  # the first prefix is for what a server does once
                firsts.append(first)
    return [middle(firsts) for firsts in found]


def middle(firsts: list[First]) -> First:
    """Medians of each figure."""
    return First(
        statistics.median(each.wall_s for each in firsts),
        statistics.median(each.cpu_s for each in firsts),
        statistics.median_low(each.computed for each in firsts),
    )


def ask(side: Side, route: str, before: str, behind: str) -> First:
    """One streamed request, read to its end.

    Raises:
        MlxinferError: it failed.
    """
    how: dict[str, Any] = {"stream": True, "temperature": 0, "max_tokens": TOKENS}
    if route == "/infill":
        body = {"input_prefix": before, "input_suffix": behind, **how}
    else:
        body = {"model": "default_model", "prompt": before, "suffix": behind, **how}
        body["stream_options"] = {"include_usage": True}
    body["ignore_eos"] = True
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=600)
    try:
        cpu, began, first, computed = side.cpu_s(), time.perf_counter(), 0.0, 0
        connection.request("POST", route, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise MlxinferError(f"{route} answered {answer.status}: {answer.read()[:300]!r}")
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            computed = _computed(json.loads(line[6:])) or computed
        return First(first, side.cpu_s() - cpu, computed)
    finally:
        connection.close()


def _computed(event: dict[str, Any]) -> int:
    """Tokens of the prompt that were computed, of the event that says so; else 0."""
    if usage := event.get("usage"):
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    return int((event.get("timings") or {}).get("prompt_n", 0))
