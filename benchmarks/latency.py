"""`bench latency`: short requests that arrive behind a long prompt.

One request streams. A long prompt arrives, and just behind it three short ones. How long until the
short ones have their first token, how long does the stream stand still, and what does it cost the
long one? Each engine runs its own defaults.
"""

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoints import LAPTOP, SMALL, random_prompt, write_checkpoint
from benchmarks.engines import CLOCKS, Ask, Clock, Engine, Loaded, Work, engine_clock
from benchmarks.tables import NAMES, SIDES, Figures, medians, sides
from mlxinfer.bench.report import Report, Table
from mlxinfer.session.options import MOST_PREFILL, PREFILL_SLICE_MS

STREAM_PROMPT = 64
STREAM_STARTED = 8  # tokens of the stream before anything else arrives
SHORT_PROMPT = 25
SHORTS = ("short 1", "short 2", "short 3")
SHORT_ARRIVES_S = 0.05  # after the long prompt
ROWS = {  # of the table: the figure's name in the data, and its form
    "short requests: first token, median (s)": ("short_first_s", ",.3f"),
    "short requests: first token, last (s)": ("short_last_s", ",.3f"),
    "running stream: longest gap (s)": ("stream_gap_s", ",.3f"),
    "long prompt: first token (s)": ("long_first_s", ",.3f"),
    "long prompt alone (s)": ("long_alone_s", ",.3f"),
    "long prompt: with others / alone": ("long_share", ",.3f"),
    "rows computed before the short ones had a token": ("short_rows", ",.0f"),
    "forward passes until then": ("short_passes", ",.0f"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at its own time, whatever the engine is doing."""

    at_s: float
    name: str
    prompt_ids: list[int]


class Timeline:
    """Plays arrivals against an engine and notes when each token came, and after how much work."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self.tokens_s: dict[str, list[float]] = defaultdict(list)
        self.work: dict[str, Work] = {}  # from each arrival to its first token
        self._done_at: list[tuple[float, Work]] = [(0.0, engine.done)]

    def play(self, arrivals: Sequence[Arrival], *, until: Callable[[], bool]) -> None:
        """Step until `until`; time runs from 0 at the call."""
        started = self._clock()
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        before = {arrival.name: Work() for arrival in arrivals}
        while coming or not until():
            while coming and coming[0].at_s <= self._clock() - started:
                arrival = coming.popleft()
                before[arrival.name] = self._work_at(arrival.at_s)
                self._engine.submit(Ask.of(arrival.name, arrival.prompt_ids))
            named = [token.request_id for token in self._engine.step()]
            now = self._clock() - started
            self._done_at.append((now, self._engine.done))
            for name in named:
                self.tokens_s[name].append(now)
                if name in before:
                    self.work.setdefault(name, self._engine.done.since(before[name]))

    def play_alone(self, name: str, prompt_ids: list[int], tokens: int) -> None:
        """Step until one request that comes at once has `tokens` tokens."""
        arrivals = [Arrival(0.0, name, prompt_ids)]
        self.play(arrivals, until=lambda: len(self.tokens_s[name]) >= tokens)

    def _work_at(self, when_s: float) -> Work:
        """Return the work that was done by then, without a turn that was under way."""
        return max((at, work.passes, work) for at, work in self._done_at if at <= when_s)[-1]


def scenario(fresh: Engine, engine: Engine, vocab: int, long: int, clock: Clock) -> Figures:
    """The long prompt alone on a fresh engine, and the whole scene on another."""
    alone = Timeline(fresh, clock)
    long_ids = random_prompt(long, vocab, 99)
    alone.play_alone("long", long_ids, 1)
    stream_ids = random_prompt(STREAM_PROMPT, vocab, 98)
    Timeline(engine, clock).play_alone("stream", stream_ids, STREAM_STARTED)

    line = Timeline(engine, clock)
    arrivals = [Arrival(0.0, "long", long_ids)]
    for index, name in enumerate(SHORTS):
        arrivals.append(Arrival(SHORT_ARRIVES_S, name, random_prompt(SHORT_PROMPT, vocab, index)))

    def done() -> bool:
        """All have a token, and the stream has one after that: its gap is over."""
        firsts = [line.tokens_s[name] for name in ("long", *SHORTS)]
        return all(firsts) and line.tokens_s["stream"][-1:] > [max(f[0] for f in firsts)]

    line.play(arrivals, until=done)
    return _measured(line, alone.tokens_s["long"][0])


def _measured(line: Timeline, long_alone_s: float) -> Figures:
    """Seconds and work; rows and passes are all that was not done when the short ones came."""
    firsts = [line.tokens_s[name][0] - SHORT_ARRIVES_S for name in SHORTS]
    stream = [0.0, *line.tokens_s["stream"]]
    works = [line.work[name] for name in SHORTS]
    return {
        "short_first_s": statistics.median(firsts),
        "short_last_s": max(firsts),
        "stream_gap_s": max(later - earlier for earlier, later in itertools.pairwise(stream)),
        "long_first_s": line.tokens_s["long"][0],
        "long_alone_s": long_alone_s,
        "short_rows": max(work.rows for work in works),
        "short_passes": max(work.passes for work in works),
    }


def run(
    *, long: int, runs: int, prefill_chunk: int | None, small: bool, cpu_time: bool, peer: bool
) -> Report:
    """`runs` scenarios of each side, alternating.

    Args:
        long: tokens of the long prompt.
        runs: scenarios of each side; the median counts.
        prefill_chunk: of mlxinfer; None: by time, as it is by default.
        small: a model of 1M weights instead of 55M.
        cpu_time: time is what the process computed, not what passed, also for the sizes of steps:
            for a machine that others use.
        peer: also mlx-lm.
    """
    dense, clock = SMALL if small else LAPTOP, CLOCKS[cpu_time]
    with TemporaryDirectory() as scratch:
        loaded = Loaded.of(write_checkpoint(Path(scratch) / "model", dense), peer=peer)
    slice_s = PREFILL_SLICE_MS / 1000 if prefill_chunk is None else None
    how: dict[str, Any] = {
        "prefill_chunk": prefill_chunk or MOST_PREFILL,
        "prefill_slice_s": slice_s,
    }
    warm = random_prompt(STREAM_PROMPT, dense.vocab, 97)
    for engine in loaded.engines(**how):  # first calls load and allocate what later ones find
        Timeline(engine, clock).play_alone("warm", warm, STREAM_STARTED)
    collected: dict[str, list[Figures]] = defaultdict(list)
    with engine_clock(clock):
        for _ in range(runs):
            pairs = zip(loaded.engines(**how), loaded.engines(**how), strict=True)
            for name, (fresh, engine) in zip(NAMES, pairs, strict=False):
                collected[name].append(scenario(fresh, engine, dense.vocab, long, clock))
    middle = {name: medians(value) for name, value in collected.items()}
    data = {
        "prompt_tokens": long,
        "weights": dense.num_weights,
        "runs": dict(collected),
        "median": middle,
    }
    sized = "by time" if prefill_chunk is None else f"{prefill_chunk} tokens a step"
    note = f"{dense.num_weights / 1e6:.0f}M float32 weights; mlxinfer prefills {sized}."
    note += " Seconds of CPU time." if cpu_time else ""
    return Report("latency", [_table(note, long, middle)], data)


def _table(note: str, long: int, middle: Mapping[str, Figures]) -> Table:
    result = [{**m, "long_share": m["long_first_s"] / m["long_alone_s"]} for m in middle.values()]
    rows = [
        [label, *sides([item[name] for item in result], form)]
        for label, (name, form) in ROWS.items()
    ]
    title = (
        f"A prompt of {long:,} tokens, and {SHORT_ARRIVES_S * 1e3:.0f} ms later three of "
        f"{SHORT_PROMPT}, beside a running stream"
    )
    return Table(title, ["", *SIDES], rows, note)
