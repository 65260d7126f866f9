"""`bench latency`: short requests that arrive behind a long prompt.

One request streams. A long prompt arrives, and just behind it three short ones. How long until the
short ones have their first token, how long does the stream stand still, and what does it cost the
long one? Each engine runs its own defaults.
"""

import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table
from mlxinfer.models import load
from mlxinfer.session.options import MOST_PREFILL, PREFILL_SLICE_MS
from tests.bench.checkpoints import LAPTOP, SMALL, Dense, random_prompt, write_checkpoint
from tests.bench.engines import ENDLESS, Ask, Engine, OurEngine, Work, engine_clock
from tests.bench.peer import PeerEngine
from tests.bench.tables import SIDES, sides

STREAM_PROMPT = 64
STREAM_STARTED = 8  # tokens of the stream before anything else arrives
SHORT_PROMPT = 25
SHORTS = ("short 1", "short 2", "short 3")
SHORT_ARRIVES_S = 0.05  # after the long prompt


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at its own time, whatever the engine is doing."""

    at_s: float
    name: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """One scenario. Rows and passes: all that was not done yet when the short requests came."""

    short_first_s: float  # first token of the short requests after they came, the median
    short_last_s: float  # of the last of them
    stream_gap_s: float  # longest time between two tokens of the stream
    long_first_s: float
    long_alone_s: float  # the same prompt with nothing else to do
    short_rows: int  # tokens computed until all short requests had a token
    short_passes: int


class Timeline:
    """Plays arrivals against an engine and notes when each token came, and after how much work."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
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
                self._engine.submit(Ask(arrival.name, [("user", arrival.prompt_ids)], ENDLESS))
            named = [token.name for token in self._engine.step()]
            now = self._clock() - started
            self._done_at.append((now, self._engine.done))
            for name in named:
                self.tokens_s[name].append(now)
                if name in before:
                    self.work.setdefault(name, self._engine.done.since(before[name]))

    def _work_at(self, when_s: float) -> Work:
        """Return the work that was done by then, without a turn that was under way."""
        return max((at, work.passes, work) for at, work in self._done_at if at <= when_s)[-1]


def scenario(
    make: Callable[[], Engine], vocab: int, long: int, clock: Callable[[], float]
) -> Measured:
    """The whole scene, and the long prompt alone on a fresh engine."""
    alone = Timeline(make(), clock)
    prompts = {name: random_prompt(SHORT_PROMPT, vocab, i) for i, name in enumerate(SHORTS)}
    long_ids = random_prompt(long, vocab, 99)
    alone.play([Arrival(0.0, "long", long_ids)], until=lambda: bool(alone.tokens_s["long"]))

    engine = make()
    before = Timeline(engine, clock)
    stream = Arrival(0.0, "stream", random_prompt(STREAM_PROMPT, vocab, 98))
    before.play([stream], until=lambda: len(before.tokens_s["stream"]) >= STREAM_STARTED)

    line = Timeline(engine, clock)
    arrivals = [Arrival(0.0, "long", long_ids)]
    arrivals += [Arrival(SHORT_ARRIVES_S, name, ids) for name, ids in prompts.items()]

    def done() -> bool:
        """All have a token, and the stream has one after that: its gap is over."""
        firsts = [line.tokens_s[name] for name in ("long", *SHORTS)]
        return all(firsts) and line.tokens_s["stream"][-1:] > [max(f[0] for f in firsts)]

    line.play(arrivals, until=done)
    return _measured(line, alone.tokens_s["long"][0])


def _measured(line: Timeline, long_alone_s: float) -> Measured:
    firsts = [line.tokens_s[name][0] - SHORT_ARRIVES_S for name in SHORTS]
    stream = [0.0, *line.tokens_s["stream"]]
    works = [line.work[name] for name in SHORTS]
    return Measured(
        short_first_s=statistics.median(firsts),
        short_last_s=max(firsts),
        stream_gap_s=max(later - earlier for earlier, later in itertools.pairwise(stream)),
        long_first_s=line.tokens_s["long"][0],
        long_alone_s=long_alone_s,
        short_rows=max(work.rows for work in works),
        short_passes=max(work.passes for work in works),
    )


def run(
    *,
    long: int = 2048,
    small: bool = False,
    runs: int = 1,
    prefill_chunk: int | None = None,
    cpu_time: bool = False,
    peer: bool = True,
) -> Report:
    """`runs` scenarios of each side, alternating.

    Args:
        long: tokens of the long prompt.
        small: a model of 1M weights instead of 55M.
        runs: scenarios of each side.
        prefill_chunk: of mlxinfer; None: by time, as it is by default.
        cpu_time: time is what the process computed, not what passed, also for the sizes of steps:
            for a machine that others use.
        peer: also mlx-lm.
    """
    dense = SMALL if small else LAPTOP
    with TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "model", dense)
        makers = _makers(folder, prefill_chunk, peer=peer)
    for make in makers.values():
        _warm(make(), dense)
    clock = time.process_time if cpu_time else time.perf_counter
    found: dict[str, list[Measured]] = {name: [] for name in makers}
    with engine_clock(clock):
        for _ in range(runs):
            for name, make in makers.items():
                found[name].append(scenario(make, dense.vocab, long, clock))
    medians = {name: _median(each) for name, each in found.items()}
    data = {
        "prompt_tokens": long,
        "weights": dense.num_weights,
        "runs": {name: [asdict(m) for m in each] for name, each in found.items()},
        "median": {name: asdict(m) for name, m in medians.items()},
    }
    how = "by time" if prefill_chunk is None else f"{prefill_chunk} tokens a step"
    note = f"{dense.num_weights / 1e6:.0f}M float32 weights; mlxinfer prefills {how}."
    note += " Seconds of CPU time." if cpu_time else ""
    return Report("latency", [_table(note, long, medians)], data)


def _makers(
    folder: Path, prefill_chunk: int | None, *, peer: bool
) -> dict[str, Callable[[], Engine]]:
    model = load(folder)
    slice_s = PREFILL_SLICE_MS / 1000 if prefill_chunk is None else None
    makers: dict[str, Callable[[], Engine]] = {
        "mlxinfer": lambda: OurEngine(
            model, prefill_chunk=prefill_chunk or MOST_PREFILL, prefill_slice_s=slice_s
        )
    }
    if peer:
        peer_model = load_peer_model(folder)
        makers["mlx-lm"] = lambda: PeerEngine(peer_model)
    return makers


def _warm(engine: Engine, dense: Dense) -> None:
    """First calls load and allocate what later ones find."""
    line = Timeline(engine)
    line.play(
        [Arrival(0.0, "warm", random_prompt(STREAM_PROMPT, dense.vocab, 97))],
        until=lambda: len(line.tokens_s["warm"]) >= STREAM_STARTED,
    )


def _median(each: Sequence[Measured]) -> Measured:
    values = [asdict(measured) for measured in each]
    return Measured(**{key: statistics.median(value[key] for value in values) for key in values[0]})


def _table(note: str, long: int, medians: dict[str, Measured]) -> Table:
    seconds = {
        "short requests: first token, median (s)": lambda m: m.short_first_s,
        "short requests: first token, last (s)": lambda m: m.short_last_s,
        "running stream: longest gap (s)": lambda m: m.stream_gap_s,
        "long prompt: first token (s)": lambda m: m.long_first_s,
        "long prompt alone (s)": lambda m: m.long_alone_s,
        "long prompt: with others / alone": lambda m: m.long_first_s / m.long_alone_s,
    }
    counts = {
        "rows computed before the short ones had a token": lambda m: m.short_rows,
        "forward passes until then": lambda m: m.short_passes,
    }
    found = list(medians.values())
    rows = [[label, *sides([field(m) for m in found], ",.3f")] for label, field in seconds.items()]
    rows += [[label, *sides([field(m) for m in found])] for label, field in counts.items()]
    title = (
        f"A prompt of {long:,} tokens, and {SHORT_ARRIVES_S * 1e3:.0f} ms later three of "
        f"{SHORT_PROMPT}, beside a running stream"
    )
    return Table(title, ["", *SIDES], rows, note)
