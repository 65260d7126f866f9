"""The sampling kernel, executed on the CPU: against its twin, the sampler in use, and float64."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from sample_reference import kept_tokens, possible_tokens

from mlxinfer.core import SamplingParams
from mlxinfer.metal_kernels.bitmask import allowed
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.sample import (
    SAMPLE,
    SETTINGS,
    SMALL_VOCAB,
    TEMPERATURE,
    TOP_P,
    by_one_sort,
    random_bits,
    random_logits,
    repeated_settings,
    sample,
    sample_twin,
    settings_array,
)
from mlxinfer.sampling.draw import stream_of, uniforms
from mlxinfer.sampling.sampler import Sampler

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def settings(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    rows = np.zeros(num_rows, SETTINGS)
    rows["temperature"] = rng.choice([0, 1e-6, 0.3, 0.7, 1, 1, 1.5, 100], num_rows)
    rows["top_k"] = rng.choice([0, 0, 1, 2, 7, 40, vocab_size - 1, vocab_size], num_rows)
    rows["top_p"] = rng.choice([1, 1, 0.999, 0.9, 0.5, 0.01, 1e-9], num_rows)
    rows["min_p"] = rng.choice([0, 0, 0.02, 0.3, 1], num_rows)
    rows["stream"] = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    rows["count"] = rng.integers(0, 10_000, num_rows)
    return rows


def one(num_rows: int = 1, **values: float) -> np.ndarray:
    """Rows with these settings that differ in what they draw."""
    rows = np.zeros(num_rows, SETTINGS)
    rows["temperature"], rows["top_p"], rows["count"] = 1, 1, np.arange(num_rows)
    for name, value in values.items():
        rows[name] = value
    return rows


def logits_of(rng: np.random.Generator, kind: str, num_rows: int, vocab_size: int) -> np.ndarray:
    shape = (num_rows, vocab_size)
    if kind == "ties":  # on a coarse grid, some of them impossible
        x = rng.integers(-8, 9, shape).astype(np.float32) / 4
        x[rng.random(shape) < 0.3] = -np.inf
        return x
    return rng.normal(0, 3, shape).astype(np.float32)


def on_machine(machine: MetalCPU, logits: mx.array, rows: np.ndarray, mask: mx.array | None = None):
    with running_on(machine):
        return np.array(sample(logits, settings_array(rows), mask))


def test_random_numbers_are_the_samplers() -> None:
    streams = np.array([stream_of(seed) for seed in range(50)], np.uint64)
    counts = np.arange(50) * 91
    bits = random_bits(mx.array(streams), mx.array(counts.astype(np.uint32)))
    assert np.array_equal(np.array(bits) * 2.0**-24, uniforms(streams, counts))


def params_of(row: np.void) -> SamplingParams:
    top_k, top_p = int(row["top_k"]), float(row["top_p"])
    return SamplingParams(
        temperature=float(row["temperature"]),
        top_k=top_k if top_k < 300 else 0,
        top_p=top_p if top_p < 1 else 1.0,
        min_p=float(row["min_p"]),
    )


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_twin_and_the_sampler_in_use_choose_the_same(kind: str) -> None:
    rng = np.random.default_rng(3)
    rows = settings(rng, 200, 300)
    rows = rows[rows["temperature"] > 0]
    logits = logits_of(rng, kind, len(rows), 300)
    twin = np.array(sample_twin(mx.array(logits), settings_array(rows)))
    for place, row in enumerate(rows):
        sampler = Sampler(300)
        sampler.add(0, params_of(row), [], [], frozenset())
        sampler._slots[0].stream = int(row["stream"])
        counts = np.array([row["count"]], np.int64)
        plain = sampler.sample(mx.array(logits[place : place + 1]), (0,), counts).tokens.item()
        possible = possible_tokens(logits[place], row)
        assert {int(twin[place]), plain} <= possible
        assert twin[place] == plain or len(possible) > 1


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "num_rows", "vocab_size"),
    every(
        2,
        [
            ("normal", mx.float32, 9, 1_501),
            ("normal", mx.bfloat16, 7, 300),
            ("ties", mx.float32, 7, 300),
            ("ties", mx.float16, 12, 97),
        ],
    ),
)
def test_rows_of_mixed_settings_get_the_tokens_of_the_twin(
    kind: str, dtype: mx.Dtype, num_rows: int, vocab_size: int, masked: bool
) -> None:
    check_batch(kind, dtype, num_rows, vocab_size, masked=masked, seed=1)


def check_batch(
    kind: str, dtype: mx.Dtype, num_rows: int, vocab_size: int, *, masked: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = settings(rng, num_rows, vocab_size)
    logits = mx.array(logits_of(rng, kind, num_rows, vocab_size)).astype(dtype)
    seen = np.array(logits.astype(mx.float32))
    mask = None
    if masked:
        words = (num_rows, -(-vocab_size // 32))
        mask = mx.array(rng.integers(0, 2**32, words, dtype=np.uint32))
        seen = np.where(np.array(allowed(mask, vocab_size)), seen, -np.inf)
    machine = MetalCPU(seed=seed)
    tokens = on_machine(machine, logits, rows, mask)
    machine.assert_clean()
    assert machine.reports[0].threadgroup_bytes <= 16_384
    assert machine.reports[0].bank_ways <= 2, machine.reports[0].bank_place
    twin = np.array(sample_twin(logits, settings_array(rows), mask))
    for place, row in enumerate(rows):
        possible = possible_tokens(seen[place], row)
        assert {int(tokens[place]), int(twin[place])} <= possible, (place, row)
        assert tokens[place] == twin[place] or len(possible) > 1


@requires_compiler
@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 2}, {1, 2, 5}),  # three are the second largest or larger
        ({"top_k": 4}, {1, 2, 3, 4, 5}),
        ({"top_p": 0.3}, {1, 2, 5}),  # equals stay together
        ({"top_p": 0.8}, {1, 2, 3, 4, 5}),
        ({"min_p": 0.3}, {1, 2, 3, 4, 5}),
        ({"top_k": 4, "top_p": 0.7}, {1, 2, 5}),  # 0.8 of what top-k leaves; 0.69 of all
        ({"top_k": 6, "min_p": 0.9}, {1, 2, 5}),
    ],
)
def test_what_is_drawn_is_what_is_kept(values: dict[str, float], kept: set[int]) -> None:
    logits = np.full(40, -1.0, np.float32)
    logits[[1, 2, 5]], logits[[3, 4]] = 3, 2
    rows = one(120, **values)
    tokens = on_machine(MetalCPU(checked=False), mx.array(np.tile(logits, (120, 1))), rows)
    assert set(tokens.tolist()) == kept == kept_tokens(logits, rows[0])


@requires_compiler
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.745, {0, 1}), (0.755, {0, 1, 2, 3}), (0.495, {0}), (0.505, {0, 1})]
)
def test_top_p_on_either_side_of_a_mass(top_p: float, kept: set[int]) -> None:
    """Of 1/2, 1/4, 1/8, 1/8; on the mass itself, 0.75, the last bit of an exponential decides."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    logits[3] = logits[2]
    tokens = on_machine(
        MetalCPU(checked=False), mx.array(np.tile(logits, (150, 1))), one(150, top_p=top_p)
    )
    assert set(tokens.tolist()) == kept


def extreme_rows() -> tuple[np.ndarray, np.ndarray, list[set[int]]]:
    """(R, 70) logits, their settings, and what may come out."""
    low = np.full(70, -np.inf, np.float32)
    many = np.full(70, 2.5, np.float32)
    single, bad, huge, outlier, tiny = (low.copy() for _ in range(5))
    single[69] = -5
    bad[[3, 9]] = np.nan, -1e30
    huge[[4, 8]] = np.inf, 3e38
    outlier[:] = np.linspace(0, 1, 70)
    outlier[7] = -1e9
    tiny[:] = np.arange(70) * 1e-42 - 3e-41  # denormal differences
    given = [
        (low, one(), {0}), (low, one(temperature=0), {0}), (many, one(temperature=0), {0}),
        (many, one(top_k=1), set(range(70))), (single, one(top_k=7, top_p=0.1, min_p=1), {69}),
        (bad, one(top_p=0.5), {9}), (huge, one(top_p=0.9), {4}),
        (outlier, one(top_k=3), {67, 68, 69}), (outlier, one(temperature=1e-30, top_p=0.9), {69}),
        (outlier, one(temperature=1e30, top_k=69), set(range(70)) - {7}),
        (tiny, one(top_p=0.99), set(range(70))), (many, one(top_p=1e-30), set(range(70))),
    ]  # fmt: skip
    logits, rows, expected = zip(*given, strict=True)
    return np.stack(logits), np.concatenate(rows), list(expected)


@requires_compiler
def test_extreme_logits_give_a_possible_token() -> None:
    logits, rows, expected = extreme_rows()
    machine = MetalCPU(seed=2)
    tokens = on_machine(machine, mx.array(logits), rows)
    machine.assert_clean()
    twin = np.array(sample_twin(mx.array(logits), settings_array(rows)))
    for place, possible in enumerate(expected):
        assert {int(tokens[place]), int(twin[place])} <= possible, place


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 33, 1_025])
def test_every_width_draws_every_token(vocab_size: int) -> None:
    """Equal logits: the token is the uniform's place among V equal shares."""
    rows = one(40)
    tokens = on_machine(MetalCPU(checked=False), mx.zeros((40, vocab_size)), rows)
    random = uniforms(rows["stream"], rows["count"].astype(np.int64))
    assert tokens.tolist() == np.floor(random * vocab_size).astype(int).tolist()


@requires_compiler
def test_a_row_alone_and_in_any_order_of_threads() -> None:
    rng = np.random.default_rng(5)
    rows, logits = settings(rng, 9, 200), mx.array(logits_of(rng, "normal", 9, 200))
    together = on_machine(MetalCPU(checked=False), logits, rows)
    for place in range(9):
        alone = on_machine(
            MetalCPU(seed=place, checked=False), logits[place : place + 1], rows[place : place + 1]
        )
        assert alone.tolist() == [together[place]]


@requires_compiler
def test_a_large_vocabulary_is_read_three_times() -> None:
    """Temperature, top-k, top-p and min-p at V = 151,936: the bytes of logits, eight at a time."""
    logits = mx.array(logits_of(np.random.default_rng(1), "normal", 1, 151_936)).astype(mx.float16)
    machine = MetalCPU()
    on_machine(machine, logits, one(top_k=40, top_p=0.9, min_p=0.05))
    machine.assert_clean()
    traffic = machine.reports[0].buffers["logits"]
    assert traffic.requested_bytes <= 3.2 * logits.nbytes
    assert traffic.num_loads * 8 == traffic.requested_bytes


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(old + word < old ? 1u : 0u)", "0u"),  # sums of 32 bits only
        ("(float(range) + 2.0f)", "(float(range) + 0.5f)"),  # half of the range is not looked at
        ("mass.probability(x[i]) >= min_p;", "true;"),
        ("min(k, total) - 1", "min(k, total) / 3"),
        ("if (mass.probability(x) < asked.min_p) weight = 0;", ""),
        ("number_above(all, x) >= asked.top_k", "number_above(all, x) + 1 >= asked.top_k"),
        ("target = asked.top_k - 1;", "target = asked.top_k / 2;"),
        ("asked.top_k > 0 ? sum : total", "sum"),
        ("all.ids[i] < mine", "all.ids[i] <= mine"),
        ("simd_broadcast_first(first) + before;", "simd_broadcast_first(first) + before / 2;"),
        ("simd_sum(uint(x >> 44));", "0u;"),
    ],
)
@pytest.mark.ci
def test_mistakes_are_noticed(right: str, wrong: str) -> None:
    case = SAMPLE.case(SAMPLE.samples[0])
    with running_on(MetalCPU(checked=False, replace={right: wrong})):
        (tokens,) = case.kernel()
    assert not mx.array_equal(tokens, case.twin()[0])


def test_the_self_check_does_not_hang_on_rounding() -> None:
    """A GPU's exponentials differ in the last bit; the tokens of the self-check must not."""
    rows = repeated_settings()
    logits = random_logits(len(rows), SMALL_VOCAB)
    for dtype in DTYPES:
        rounded = np.array(logits.astype(dtype).astype(mx.float32))
        for place, row in enumerate(rows):
            assert len(possible_tokens(rounded[place], row)) == 1, (dtype, place)


def test_what_sampling_is_timed_against_draws_what_the_twin_draws() -> None:
    rows = one(60, temperature=TEMPERATURE, top_p=TOP_P)
    rows["count"] = np.arange(60)
    logits = random_logits(60, 300)
    numbers = mx.array(uniforms(rows["stream"], rows["count"].astype(np.int64)))[:, None]
    actual = np.array(by_one_sort(logits, numbers, None))
    twin = np.array(sample_twin(logits, settings_array(rows)))
    assert (actual == twin).mean() > 0.95, "they differ next to where rounding decides alone"


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_mixed_batches_sample_as_the_twin_does(kind: str, dtype: mx.Dtype, seed: int) -> None:
    for num_rows, vocab_size in ((24, 33), (24, 300), (12, 2_777), (2, 32_000)):
        check_batch(kind, dtype, num_rows, vocab_size, masked=seed % 2 == 0, seed=seed + 10)
