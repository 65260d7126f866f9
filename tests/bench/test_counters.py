"""What the benchmarks' speed rests on, as counts: they come out the same on every machine."""

from mlxinfer.core import SamplingParams
from tests.bench.bench_models import VOCAB, two_layers
from tests.bench.checkpoints import random_prompt
from tests.bench.driver import OurDriver, Work
from tests.bench.latency import ANSWER, SHORT_PROMPT, SHORTS, Arrival, Timeline

CHUNK = 256
LONG = 2048


def run_to_end(driver: OurDriver) -> list[str]:
    named = []
    while not driver.loop.idle:
        named += driver.step()
    return named


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    driver = OurDriver(two_layers(), prefill_chunk=CHUNK)
    driver.add("stream", random_prompt(20, VOCAB, 0), ANSWER)
    while not driver.step():
        pass
    driver.add("long", random_prompt(LONG, VOCAB, 1), ANSWER)
    driver.step()
    launched = driver.launched
    for seed, name in enumerate(SHORTS):
        driver.add(name, random_prompt(SHORT_PROMPT, VOCAB, seed), ANSWER)
    waiting = set(SHORTS)
    while waiting:
        waiting -= set(driver.step())
    work = driver.done.since(launched)  # beside what was in flight when they came
    assert work.passes == 1
    assert work.rows <= CHUNK + 3 * SHORT_PROMPT


def test_a_stream_gets_a_token_from_every_pass_of_a_long_prompt() -> None:
    driver = OurDriver(two_layers(), prefill_chunk=CHUNK)
    driver.add("stream", random_prompt(20, VOCAB, 0), ANSWER)
    while not driver.step():
        pass
    driver.add("long", random_prompt(LONG, VOCAB, 1), ANSWER)
    named: list[str] = []
    before = driver.done
    while "long" not in named:
        named += driver.step()
    assert named.count("stream") == driver.done.since(before).passes
    assert named.count("stream") >= LONG // CHUNK


def test_a_long_prompt_takes_as_many_passes_as_it_has_chunks() -> None:
    driver = OurDriver(two_layers(), prefill_chunk=CHUNK)
    driver.add("long", random_prompt(LONG, VOCAB, 1), SamplingParams(max_tokens=1))
    assert run_to_end(driver) == ["long"]
    assert driver.launched == Work(passes=LONG // CHUNK, rows=LONG)


def test_requests_share_passes_and_nothing_is_padded() -> None:
    driver = OurDriver(two_layers())
    lengths = [3, 17, 25, 8, 31]
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        driver.add(str(index), random_prompt(length, VOCAB, index), params)
    assert len(run_to_end(driver)) == 20 * len(lengths)
    assert driver.launched == Work(passes=20, rows=sum(lengths) + 19 * len(lengths))


def test_work_behind_an_arrival_counts_the_pass_under_way() -> None:
    driver = OurDriver(two_layers(), prefill_chunk=64, launch_ahead=False)
    line = Timeline(driver, clock=lambda: float(driver.done.rows))  # time passes in rows
    arrivals = [
        Arrival(0.0, "long", random_prompt(128, VOCAB, 0)),
        Arrival(1.0, "short", random_prompt(5, VOCAB, 1)),  # while the first 64 are computed
    ]
    line.play(arrivals, until=lambda: {"long", "short"} <= line.tokens_s.keys())
    assert line.work["short"] == Work(passes=2, rows=64 + 16 + 5)  # 16: the long one's quarter
    assert line.tokens_s["short"][0] == line.work["short"].rows
    assert line.work["long"].rows >= 128
