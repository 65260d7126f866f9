"""Codes, scales and their search: MLX reads what we pack, and no choice is worse than MLX's."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.convert.affine import CUTS, by_extremes, error_of, extremes, search
from mlxinfer.convert.arrays import narrow, pack, rounded, widen
from mlxinfer.convert.quantise import QuantisationMethod, compare, quantise, unpacked
from mlxinfer.convert.recipes import BITS, FLOATS, GROUPS, affine, name_of, parse_format

FORMATS = [affine(bits, group) for bits in BITS for group in GROUPS] + list(FLOATS.values())


def matrix(rows: int = 24, columns: int = 256, seed: int = 0) -> np.ndarray:
    """Heavy tails, as weights have; representable in bfloat16."""
    noise = np.random.default_rng(seed).standard_t(5, (rows, columns)).astype(np.float32)
    return rounded(noise * np.float32(0.02), "bfloat16")


def by_mlx(values: np.ndarray, form) -> np.ndarray:
    how = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    parts = [p.astype(mx.float32) if p.dtype == mx.bfloat16 else p
             for p in mx.quantize(mx.array(values).astype(mx.bfloat16), **how)]  # fmt: skip
    return np.array(mx.dequantize(*parts, **how, dtype=mx.float32))


@pytest.mark.parametrize("bits", BITS)
def test_mlx_reads_packed_codes(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 128)).astype(np.uint8)
    ones, zeros = mx.ones((5, 4)), mx.zeros((5, 4))
    actual = mx.dequantize(mx.array(pack(codes, bits)), ones, zeros, 32, bits)
    assert np.array_equal(np.array(actual), codes)


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_error_is_what_mlx_reads_back_and_less_than_mlx_makes(form) -> None:
    values = matrix()
    method = QuantisationMethod(form, "bfloat16")
    rows, error = quantise(values, method)
    errors = compare(np.array(unpacked(rows, method)), values)
    assert errors.squares == pytest.approx(error.squares, rel=1e-4)
    theirs = compare(by_mlx(values, form), values)
    assert error.squares <= theirs.squares * (1 + 1e-6)
    if form.mode == "affine":
        assert error.squares < 0.97 * theirs.squares


GAINED = {  # squared error of searched scales, as a share of that of the extremes
    "2bit-g64": 0.67,
    "3bit-g64": 0.76,
    "4bit-g64": 0.845,
    "5bit-g64": 0.87,
    "6bit-g64": 0.88,
    "8bit-g64": 0.93,
    "mxfp4": 0.87,
    "nvfp4": 0.85,
}


@pytest.mark.parametrize("name", GAINED)
def test_searching_lowers_the_error_by_a_known_share(name: str) -> None:
    values, form = matrix(256, 512), parse_format(name)
    assert form is not None
    searched, plain = (
        quantise(values, QuantisationMethod(form, "bfloat16", how))[1] for how in (True, False)
    )
    assert searched.squares < GAINED[name] * plain.squares


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_minmax_is_what_mlx_does(form) -> None:
    values = matrix()
    method = QuantisationMethod(form, "bfloat16", searched=False)
    ours = compare(np.array(unpacked(quantise(values, method)[0], method)), values)
    theirs = compare(by_mlx(values, form), values)
    assert ours.squares <= theirs.squares * 1.005


def test_importance_moves_the_error_to_where_it_does_not_matter() -> None:
    values = matrix()
    importance = np.ones(256, np.float32)
    importance[::4] = 20.0
    importance /= importance.mean()
    form = affine(3, 64)
    _, plain = quantise(values, QuantisationMethod(form, "bfloat16"))
    rows, weighted = quantise(values, QuantisationMethod(form, "bfloat16", importance=importance))
    actual = np.array(unpacked(rows, QuantisationMethod(form, "bfloat16")))
    without = np.array(unpacked(quantise(values, QuantisationMethod(form, "bfloat16"))[0],
                                QuantisationMethod(form, "bfloat16")))  # fmt: skip
    assert (
        compare(actual, values, importance).weighted
        < 0.95 * compare(without, values, importance).weighted
    )
    assert weighted.squares > plain.squares


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_constant_rows_come_back_nearly_as_they_were(form) -> None:
    method = QuantisationMethod(form, "bfloat16")
    for value in (0.0, 1.0, -3e-5, 3e4):
        values = np.full((2, 128), value, np.float32)
        rows, error = quantise(values, method)
        actual = np.array(unpacked(rows, method))
        assert np.isfinite(actual).all(), value
        if form.mode == "affine":
            assert np.abs(actual - rounded(values, "bfloat16")).max() <= abs(value) / 128
        off = np.abs(actual - values).max()
        assert error.largest == pytest.approx(off, rel=1e-5, abs=1e-12), value


@given(
    st.lists(st.floats(-65504, 65504, width=32), min_size=32, max_size=32), st.sampled_from(BITS)
)
def test_any_group_is_within_a_step(values: list[float], bits: int) -> None:
    row = rounded(np.array([values], np.float32), "bfloat16")
    method = QuantisationMethod(affine(bits, 32), "bfloat16", searched=False)
    actual = np.array(unpacked(quantise(row, method)[0], method))
    step = max((row.max() - row.min()) / (2**bits - 1), 1e-7)
    slack = np.abs(row).max() / 64  # scale and bias have eight bits
    assert np.abs(actual - row).max() <= 1.01 * step + slack


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_rounds_as_mlx(value: float) -> None:
    if abs(value) > 3.38e38:
        return
    numbers = np.array([value], np.float32)
    theirs = mx.array(numbers).astype(mx.bfloat16).astype(mx.float32)
    assert widen(narrow(numbers, "bfloat16"), "bfloat16")[0] == theirs.item()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", CUTS)
def test_each_refinement_of_the_search_lowers_the_error(bits: int, weighted: bool) -> None:
    groups = matrix(64, 512, seed=bits).reshape(64, -1, 64)
    importance = np.random.default_rng(7).lognormal(0, 1, (8, 64)).astype(np.float32)
    weights = importance if weighted else None
    match = [search(groups, bits, "float32", weights, rounds) for rounds in range(4)]
    errors = [error_of(groups, *item, bits, weights) for item in match]
    for before, after in pairwise(errors):
        assert (after <= before * (1 + 1e-3)).all()
    assert errors[2].sum() < 0.99 * errors[0].sum()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_groups_far_from_zero_are_no_worse_than_by_extremes(bits: int, dtype: str) -> None:
    """There a rounded bias moves a whole group by many steps."""
    noise = np.random.default_rng(bits).standard_normal((64, 8, 64)).astype(np.float32)
    for offset in (0.0, 0.5, 40.0, -3000.0):
        groups = rounded(noise + np.float32(offset), dtype)
        errors = [
            error_of(groups, *scales, bits, None)
            for scales in (search(groups, bits, dtype, None), by_extremes(groups, bits, dtype))
        ]
        assert errors[0].sum() <= errors[1].sum(), offset
        if offset == -3000.0 and dtype == "bfloat16":
            assert (errors[0] <= errors[1] * 1.001).all()


@given(st.data())
def test_extremes_are_minimum_and_maximum(data: st.DataObject) -> None:
    """Of any signs, zeros of both signs among them."""
    numbers = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(-65504, 65504, width=32))
    sign = data.draw(st.sampled_from([1, -1, None]))
    values = data.draw(st.lists(numbers, min_size=64, max_size=64))
    if sign is not None:
        values = [sign * abs(value) for value in values]
    groups = np.array(values, np.float32).reshape(1, 2, 32)
    low, high = extremes(groups)
    np.testing.assert_array_equal(low, groups.min(axis=-1, keepdims=True))
    np.testing.assert_array_equal(high, groups.max(axis=-1, keepdims=True))
