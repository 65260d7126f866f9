"""Counts behind the benchmarks' speeds; they are the same on every machine."""

from tests.bench.bench_parts import VOCAB, two_layers
from tests.bench.checkpoints import random_prompt
from tests.bench.engines import ENDLESS, Ask, OurEngine, Work
from tests.bench.latency import SHORT_PROMPT, SHORTS, Arrival, Timeline

CHUNK = 256
LONG = 2048


def names(engine: OurEngine) -> list[str]:
    return [token.name for token in engine.step()]


def run_to_end(engine: OurEngine) -> list[str]:
    named = []
    while not engine.loop.idle:
        named += names(engine)
    return named


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    engine = OurEngine(two_layers(), prefill_chunk=CHUNK)
    engine.submit(Ask("stream", [("user", random_prompt(20, VOCAB, 0))], ENDLESS))
    while not engine.step():
        pass
    engine.submit(Ask("long", [("user", random_prompt(LONG, VOCAB, 1))], ENDLESS))
    engine.step()
    launched = engine.launched
    for seed, name in enumerate(SHORTS):
        engine.submit(Ask(name, [("user", random_prompt(SHORT_PROMPT, VOCAB, seed))], ENDLESS))
    waiting = set(SHORTS)
    while waiting:
        waiting -= set(names(engine))
    work = engine.done.since(launched)  # beside what was in flight when they came
    assert work.passes == 1
    assert work.rows <= CHUNK + 3 * SHORT_PROMPT


def test_a_stream_gets_a_token_from_every_pass_of_a_long_prompt() -> None:
    engine = OurEngine(two_layers(), prefill_chunk=CHUNK)
    engine.submit(Ask("stream", [("user", random_prompt(20, VOCAB, 0))], ENDLESS))
    while not engine.step():
        pass
    engine.submit(Ask("long", [("user", random_prompt(LONG, VOCAB, 1))], ENDLESS))
    named: list[str] = []
    before = engine.done
    while "long" not in named:
        named += names(engine)
    assert named.count("stream") == engine.done.since(before).passes
    assert named.count("stream") >= LONG // CHUNK


def test_a_long_prompt_takes_as_many_passes_as_it_has_chunks() -> None:
    engine = OurEngine(two_layers(), prefill_chunk=CHUNK)
    engine.submit(Ask.of("long", random_prompt(LONG, VOCAB, 1), 1))
    assert run_to_end(engine) == ["long"]
    assert engine.launched == Work(passes=LONG // CHUNK, rows=LONG)


def test_requests_share_passes_and_nothing_is_padded() -> None:
    engine = OurEngine(two_layers())
    lengths = [3, 17, 25, 8, 31]
    for index, length in enumerate(lengths):
        engine.submit(Ask.of(str(index), random_prompt(length, VOCAB, index), 20))
    assert len(run_to_end(engine)) == 20 * len(lengths)
    assert engine.launched == Work(passes=20, rows=sum(lengths) + 19 * len(lengths))


def test_work_behind_an_arrival_counts_the_pass_under_way() -> None:
    engine = OurEngine(two_layers(), prefill_chunk=64, launch_ahead=False)
    line = Timeline(engine, clock=lambda: float(engine.done.rows))  # time passes in rows
    arrivals = [
        Arrival(0.0, "long", random_prompt(128, VOCAB, 0)),
        Arrival(1.0, "short", random_prompt(5, VOCAB, 1)),  # while the first 64 are computed
    ]
    line.play(arrivals, until=lambda: {"long", "short"} <= line.tokens_s.keys())
    assert line.work["short"] == Work(passes=2, rows=64 + 16 + 5)  # 16: the long one's quarter
    assert line.tokens_s["short"][0] == line.work["short"].rows
    assert line.work["long"].rows >= 128
