import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_cases import VOCAB, logits, rows
from sampling_reference import Row, draw, greedy, kept_tokens
from sampling_reference import logprobs as reference_logprobs

from mlxinfer.core import SamplingParams, TokenLogprobs
from mlxinfer.sampling.draw import stream_of, uniforms
from mlxinfer.sampling.parts import EXCLUDING
from mlxinfer.sampling.sampler import LogprobArrays, Sampler, apply_bitmask, num_words
from mlxinfer.sampling.tokens import MIN_ROOM, TokenBuffer

Choice = tuple[int, TokenLogprobs | None]
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def choose(cases: list[Row], pending: bool = False, slots: list[int] | None = None) -> list[Choice]:
    """One step over these rows; with `pending`, their last tokens are known to the device only."""
    slots = slots or list(range(len(cases)))
    sampler = Sampler(VOCAB)
    hidden = -1 if pending else None
    for slot, row in zip(slots, cases, strict=True):
        known = row.output_ids[:hidden]
        sampler.add(slot, row.params, row.prompt_ids, known, row.stop_ids, row.breakers)
    newest = [row.output_ids[-1] if pending and row.output_ids else -1 for row in cases]
    logits = mx.array(np.stack([row.logits for row in cases]))
    counts = np.array([len(row.output_ids) for row in cases])
    sampled = sampler.sample(logits, slots, counts, mx.array(newest, mx.int32)[:, None])
    mx.eval(sampled.tokens)
    logprobs = {} if sampled.logprobs is None else sampled.logprobs.read()
    assert sampled.tokens.dtype == mx.int32
    return [(token, logprobs.get(row)) for row, token in enumerate(sampled.tokens.tolist())]


def uniform_of(row: Row) -> float:
    streams = np.array([stream_of(row.params.seed)], dtype=np.uint64)
    return float(uniforms(streams, np.array([len(row.output_ids)]))[0])


def excludes(row: Row) -> bool:
    """Whether XTC acts on the next token."""
    streams = np.array([stream_of(row.params.seed)], dtype=np.uint64) ^ EXCLUDING
    random = uniforms(streams, np.array([len(row.output_ids)]))[0]
    return bool(random < np.float32(row.params.xtc_probability))


@given(row=rows())
def test_chooses_as_the_reference(row: Row):
    ((token, _),) = choose([row])
    if row.params.greedy:
        assert token == greedy(row)
    else:
        kept = kept_tokens(row, excludes=excludes(row))
        assume(not kept.in_doubt)
        assert token in draw(kept.probabilities, uniform_of(row))


@given(cases=st.lists(rows(), min_size=2, max_size=5), shift=st.integers(0, 7))
def test_a_row_in_any_batch_and_slot_equals_the_row_alone(cases: list[Row], shift: int):
    slots = [(3 * place + shift) % 11 for place in range(len(cases))]
    assert choose(cases, slots=slots) == [choose([row])[0] for row in cases]


@given(cases=st.lists(rows(), min_size=1, max_size=5))
def test_a_token_not_yet_read_counts_as_one_that_was(cases: list[Row]):
    assert choose(cases, pending=True) == choose(cases)


@st.composite
def positions(draw: st.DrawFn) -> tuple[Row, int, list[np.ndarray]]:
    """A request, how many tokens of its answer are known, and logits after each of the others."""
    row = draw(rows())
    known = draw(st.integers(0, len(row.output_ids)))
    return row, known, [draw(logits()) for _ in range(len(row.output_ids) - known + 1)]


@given(cases=st.lists(positions(), min_size=1, max_size=4))
def test_rows_of_a_slot_choose_as_one_after_another(cases: list[tuple[Row, int, list[np.ndarray]]]):
    """Each row has its own history, index and bans: the proposals before it count as tokens."""
    sampler = Sampler(VOCAB)
    slots, collected, recent, counts = [], [], [], []
    for slot, (row, known, after) in enumerate(cases):
        known_ids = row.output_ids[:known]
        sampler.add(slot, row.params, row.prompt_ids, known_ids, row.stop_ids, row.breakers)
        for place, item in enumerate(after):
            slots.append(slot)
            collected.append(replace(row, logits=item, output_ids=row.output_ids[: known + place]))
            counts.append(known + place)
            recent.append([*row.output_ids[known : known + place], *[-1] * 6][:6])
    sampled = sampler.sample(
        mx.array(np.stack([row.logits for row in collected])),
        tuple(slots),
        np.array(counts),
        mx.array(recent, mx.int32),
    )
    mx.eval(sampled.tokens)
    logprobs = {} if sampled.logprobs is None else sampled.logprobs.read()
    together = [(token, logprobs.get(i)) for i, token in enumerate(sampled.tokens.tolist())]
    assert together == [choose([row])[0] for row in collected]


def test_a_run_launched_ahead_and_one_resumed_in_the_middle_give_the_same_tokens():
    rng = np.random.default_rng(0)
    steps = mx.array((rng.normal(size=(12, 2, VOCAB)) * 2).astype(np.float32))
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.5, seed=3),
        SamplingParams(temperature=1.1, repetition_penalty=1.4, min_tokens=4, seed=4),
    ]
    prompts, stops = [[1, 2], [3]], frozenset(range(0, VOCAB, 2))

    def run(sampler: Sampler, steps: range) -> list[list[int]]:
        said, pending = [], None
        for step in steps:
            recent = None if pending is None else pending[:, None]
            sampled = sampler.sample(logits[step], (0, 1), np.array([step, step]), recent)
            if pending is not None:
                said.append(pending.tolist())
                sampler.observe([0, 1], said[-1])
            pending = sampled.tokens
        return [*said, pending.tolist()]

    logits = steps
    undisturbed = Sampler(VOCAB)
    for slot in (0, 1):
        undisturbed.add(slot, params[slot], prompts[slot], [], stops)
    whole = run(undisturbed, range(12))
    resumed = Sampler(VOCAB)
    for slot in (0, 1):
        output = [tokens[slot] for tokens in whole[:7]]
        resumed.add(slot, params[slot], prompts[slot], output, stops)
    assert run(resumed, range(7, 12)) == whole[7:]
    assert all(tokens[1] not in stops for tokens in whole[:4])
    assert any(tokens[1] in stops for tokens in whole[4:])


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
def test_a_bias_against_all_but_one_leaves_that_one(cut: dict[str, float]):
    bias = {token: -1e9 for token in range(VOCAB) if token != 77}
    logits = np.random.default_rng(0).normal(size=VOCAB) * 30
    cases = [
        Row(SamplingParams(temperature=temperature, logit_bias=bias, **cut), logits)
        for temperature in (0.0, 1e-300, 1e-6, 1.0, 100.0)
    ]
    assert [token for token, _ in choose(cases)] == [77] * len(cases)


def test_a_row_where_nothing_is_allowed_breaks_no_other():
    nothing = Row(SamplingParams(temperature=1.0, top_p=0.5), np.full(VOCAB, -np.inf, np.float32))
    some = Row(SamplingParams(temperature=1.0, top_p=0.5, seed=1), np.arange(VOCAB) / 10)
    (token, _), beside = choose([nothing, some])
    assert 0 <= token < VOCAB
    assert beside == choose([some])[0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3)])
def test_a_mask_comes_before_all_else(params: SamplingParams):
    sampler = Sampler(VOCAB)
    sampler.add(0, params, [], [], frozenset())
    sampler.add(1, params, [], [], frozenset())
    logits = mx.array(np.tile(np.arange(VOCAB, dtype=np.float32), (2, 1)))
    mask = np.zeros((2, 10), np.uint32)
    mask[0, 1] = 1 << 4  # token 36 only
    mask[1] = 0xFFFFFFFF
    tokens = sampler.sample(logits, (0, 1), np.zeros(2, np.int64), None, mx.array(mask)).tokens
    assert tokens[0].item() == 36
    assert tokens[1].item() >= VOCAB - 3


def test_logprobs_are_those_of_the_raw_logits():
    bias = {5: 50.0}
    params = SamplingParams(logit_bias=bias, logprobs=1, repetition_penalty=2.0)
    logits = np.zeros(VOCAB, np.float32)
    logits[9] = 3.0
    ((token, result),) = choose([Row(params, logits, prompt_ids=[9])])
    total = np.log(VOCAB - 1 + np.exp(3))
    assert token == 5
    assert result.logprob == pytest.approx(-total, abs=1e-5)
    assert result.top[0] == (9, pytest.approx(3 - total, abs=1e-5))


@pytest.mark.parametrize("vocab", [1000, 1024, 262_144])
def test_logprobs_of_a_large_vocabulary_are_as_exact_as_of_a_small_one(vocab: int) -> None:
    logits = 2 * mx.random.normal((3, vocab), key=mx.random.key(1))
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    actual = LogprobArrays.of(logits, tokens, {0: 2, 2: 2}).read()
    for row in (0, 2):
        exact = reference_logprobs(np.array(logits[row]))
        assert actual[row].logprob == pytest.approx(exact.max(), abs=5e-6)


def test_logprobs_do_not_know_of_the_mask():
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(logprobs=0), [], [], frozenset())
    mask = mx.array([[1 << 3, *[0] * 9]], mx.uint32)
    sampled = sampler.sample(mx.zeros((1, VOCAB)), (0,), np.zeros(1, np.int64), None, mask)
    assert sampled.tokens.tolist() == [3]
    assert sampled.logprobs.read()[0].logprob == pytest.approx(-np.log(VOCAB))


def test_low_precision_logits_are_taken():
    for params in (SamplingParams(), SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)):
        sampler = Sampler(VOCAB)
        sampler.add(0, params, [], [], frozenset())
        logits = mx.zeros((1, VOCAB), mx.bfloat16)
        logits[0, 4] = 30
        sampled = sampler.sample(logits, (0,), np.zeros(1, np.int64))
        assert sampled.tokens.tolist() == [4]


def test_a_slot_used_again_keeps_nothing_of_the_request_before():
    sampler = Sampler(VOCAB)
    first = SamplingParams(temperature=1.0, logit_bias={7: 50.0}, presence_penalty=9.0, logprobs=1)
    sampler.add(0, first, [1], [2], frozenset())
    logits = mx.zeros((1, VOCAB))
    assert sampler.sample(logits, (0,), np.array([1])).tokens.tolist() == [7]
    sampler.add(0, SamplingParams(), [1], [0], frozenset())
    sampled = sampler.sample(logits, (0,), np.array([1]))
    assert sampled.tokens.tolist() == [0]
    assert sampled.logprobs is None


@pytest.mark.parametrize("size", [0, 1, 5, 80, 1000])
def test_a_buffer_holds_the_last_tokens(size: int) -> None:
    for num_before in (0, 3, 100):
        ids = list(range(num_before + 500))
        tokens, whole = TokenBuffer(ids[:num_before], last=size), TokenBuffer(ids[:num_before])
        for count, token_id in enumerate(ids[num_before:], start=num_before + 1):
            tokens.append(token_id)
            whole.append(token_id)
            assert tokens.ids.tolist() == ids[max(count - size, 0) : count]
        assert whole.ids.tolist() == ids
        assert len(tokens._room) <= 2 * max(size + 1, MIN_ROOM)


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, logit_bias={5: 1.0}, min_tokens=10, logprobs=2),
]


def calls_of_a_step(num_rows: int, params: list[SamplingParams]) -> int:
    """How many functions one step calls once the batch has settled, evaluation aside."""
    sampler, slots = Sampler(VOCAB), tuple(range(num_rows))
    for slot in slots:
        sampler.add(slot, params[slot % len(params)], [1, 2, 3], [], frozenset({2}))
    logits, counts = mx.zeros((num_rows, VOCAB)), np.zeros(num_rows, np.int64)
    pending = sampler.sample(logits, slots, counts).tokens
    tokens = pending.tolist()
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        sampler.sample(logits, slots, counts + 1, pending[:, None])
        sampler.observe(slots, tokens)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("params", [[SamplingParams()], MIXED], ids=["greedy", "mixed"])
def test_a_step_without_penalties_takes_no_python_per_row(params: list[SamplingParams]):
    assert calls_of_a_step(250, params) == calls_of_a_step(10, params)


def test_nothing_of_a_step_is_held_after_it():
    sampler = Sampler(5000)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=2)
    sampler.add(0, params, [1, 2], [], frozenset())

    def step(count: int) -> None:
        sampled = sampler.sample(mx.random.normal((1, 5000)), (0,), np.array([count]))
        mx.eval(sampled.tokens)
        sampler.observe([0], sampled.tokens.tolist())

    step(0)
    mx.synchronize()
    before = mx.get_active_memory()
    for count in range(1, 6):
        step(count)
    mx.synchronize()
    assert mx.get_active_memory() - before < 5000


def test_each_row_gets_as_many_logprobs_as_it_asks_for():
    logits = (np.random.default_rng(0).normal(size=(4, 3000)) * 3).astype(np.float32)
    tokens = [5, 6, 7, 8]
    asked = {3: 2, 0: 20, 2: 0}
    actual = LogprobArrays.of(mx.array(logits), mx.array(tokens, mx.int32), asked).read()
    assert set(actual) == {0, 2, 3}
    for row, num in zip((3, 0, 2), (2, 20, 0), strict=True):
        expected = reference_logprobs(logits[row])
        assert actual[row].logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        best = np.argsort(-expected)[:num]
        assert [token for token, _ in actual[row].top] == best.tolist()
        assert [value for _, value in actual[row].top] == pytest.approx(expected[best], abs=1e-5)


def test_a_vocabulary_smaller_than_asked_for_and_tokens_that_cannot_be():
    logits = mx.array([[0.0, -np.inf, 0.0]])
    arrays = LogprobArrays.of(logits, mx.array([0], mx.int32), {0: 20})
    actual = arrays.read()[0]
    assert [token for token, _ in actual.top] == [0, 2, 1]
    assert actual.top[2][1] == -np.inf


def pack(allowed: np.ndarray) -> mx.array:
    """(R, V) bool -> (R, words) uint32, bit by bit."""
    words = np.zeros((len(allowed), num_words(allowed.shape[1])), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return mx.array(words)


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 31, 32, 33, 100]),
    dtype=st.sampled_from(DTYPES),
)
def test_only_allowed_tokens_keep_their_logits(seed: int, vocab_size: int, dtype: mx.Dtype):
    rng = np.random.default_rng(seed)
    x = mx.array(rng.normal(size=(3, vocab_size))).astype(dtype)
    allowed = rng.random((3, vocab_size)) < 0.5
    got = apply_bitmask(x, pack(allowed))
    assert got.dtype == dtype
    expected = np.where(allowed, np.array(x.astype(mx.float32)), -np.inf)
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), expected)
