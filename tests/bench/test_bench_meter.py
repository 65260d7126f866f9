import mlx.core as mx
import pytest

from mlxinfer.engine.kernels import choose_none
from mlxinfer.metal_kernels.launch import running_on
from tests.bench.bench_parts import VOCAB, two_layers
from tests.bench.engines import (
    DISPATCH,
    FORWARD,
    Meter,
    OurEngine,
    Token,
    counted_operations,
    metered_evaluation,
)
from tests.bench.host import (
    BLOCK,
    MIXED,
    OneOperation,
    fill,
    measure,
    measure_block,
    only_sampling,
    pages_for,
    slope,
)


def decoding(count: int) -> OurEngine:
    engine = OurEngine(two_layers(), max_batch=count, num_pages=pages_for(count, 20, 2))
    fill(engine, count, 20, VOCAB)
    return engine


def test_time_goes_to_the_account_it_was_spent_in() -> None:
    meter = Meter()
    work = meter.timed("work", lambda n: sum(range(n)))
    assert work(100_000) == sum(range(100_000))
    first = meter.seconds["work"]
    assert first > 0
    work(200_000)
    assert meter.seconds["work"] > 2 * first
    assert set(meter.seconds) == {"work"}


def test_mlx_is_as_before_after_it_was_metered() -> None:
    originals = mx.eval, mx.async_eval
    meter = Meter()
    with metered_evaluation(meter):
        mx.eval(mx.ones((4,)) + 1)
    with pytest.raises(ZeroDivisionError), metered_evaluation(meter):
        mx.eval(1 / 0)
    assert (mx.eval, mx.async_eval) == originals
    assert meter.seconds[DISPATCH] > 0


def test_parts_of_a_step_add_up_to_less_than_the_whole() -> None:
    cost = measure_block(decoding(3), BLOCK)
    assert min(cost.forward, cost.plan, cost.dispatch) > 0
    assert cost.outside > cost.plan
    assert cost.total == pytest.approx(cost.outside + cost.forward + cost.dispatch)


def test_a_stored_model_costs_nothing_and_decoding_goes_on() -> None:
    engine = decoding(5)
    engine.store_model()
    engine.step()
    engine.step()
    before = engine.meter.seconds[FORWARD]
    assert sorted(token.name for token in engine.step()) == ["0", "1", "2", "3", "4"]
    assert engine.meter.seconds[FORWARD] == before


def test_sides_are_measured_in_turns() -> None:
    class Side:
        def __init__(self, name: str) -> None:
            self.meter, self.name = Meter(), name

        def step(self) -> list[Token]:
            turns.append(self.name)
            return []

    turns: list[str] = []
    costs = measure([Side("a"), Side("b")], blocks=2, block_steps=3)
    assert turns == (["a"] * 3 + ["b"] * 3) * 4  # two blocks to warm up
    assert len(costs) == 2


def test_requests_ask_for_different_things() -> None:
    assert len({(p.greedy, p.top_k, p.top_p, p.min_p, p.seed) for p in MIXED}) == 4
    assert any(p.repetition_penalty != 1 for p in MIXED)


def test_slope_is_of_a_line_through_all_points() -> None:
    assert slope([(1, 103.0), (8, 124.0), (64, 292.0)]) == pytest.approx(3.0)


def test_where_a_kernel_samples_a_step_has_few_operations() -> None:
    counts = []
    for kernels in (choose_none, only_sampling):
        with running_on(OneOperation()):
            engine = OurEngine(two_layers(), max_batch=8, num_pages=200, kernels=kernels)
            fill(engine, 8, 20, VOCAB)
            engine.store_model()
            engine.step()
            with counted_operations() as found:
                engine.step()
            counts.append(max(found))
    plain, in_kernel = counts
    assert in_kernel < plain / 3
