"""Error feedback: what it does to outputs, on what it does not depend, and where there is none."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, contents, convert, write_source
from numpy.typing import NDArray

from mlxinfer.convert.calibration.feedback import FEW_TOKENS, Moments, Statistics
from mlxinfer.convert.files import ShardFile
from mlxinfer.convert.plan import MAX_BLOCK
from mlxinfer.convert.quantise import (
    ErrorFeedback,
    QuantisationMethod,
    make_feedback,
    quantise,
    rows_at_once,
    unpacked,
)
from mlxinfer.convert.read import MLXFormat
from mlxinfer.convert.recipes import FLOATS, ConversionOptions, affine
from mlxinfer.errors import ConversionError

RNG = np.random.default_rng(5)
Floats = NDArray[np.float32]


def inputs(count: int, dims: int) -> Floats:
    """Correlated, with channels of different size, as a model's are."""
    mixed = RNG.standard_normal((count, dims)) @ RNG.standard_normal((dims, dims)) / dims**0.5
    return np.asarray(mixed * np.exp(RNG.standard_normal(dims) / 2), np.float32)


def values(rows: int, dims: int) -> Floats:
    return RNG.standard_normal((rows, dims)).astype(np.float32)


def found(matrix: Floats, form: MLXFormat, feedback: ErrorFeedback | None) -> Floats:
    method = QuantisationMethod(form, "float32", True, None, feedback)
    return np.array(unpacked(quantise(matrix, method)[0], method))


@pytest.mark.parametrize("form", [affine(2, 32), affine(4), affine(6, 128), *FLOATS.values()])
def test_outputs_on_other_tokens_are_closer_than_by_rounding(form: MLXFormat) -> None:
    x, matrix = inputs(3000, 128), values(40, 128)
    seen, unseen = x[:2000], x[2000:]
    feedback = make_feedback([seen.T @ seen], len(seen))
    errors = [
        np.square(unseen @ (found(matrix, form, fed) - matrix).T).sum() for fed in (None, feedback)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_codes_are_those_of_the_definition() -> None:
    """Column by column, the best change of all columns that are left, each time solved anew."""
    x, matrix, form = inputs(500, 32), values(6, 32), affine(4, 32)
    feedback = make_feedback([x.T @ x], len(x))
    rows, _ = quantise(matrix, QuantisationMethod(form, "float32", True, None, feedback))
    scale, bias = (np.asarray(a, np.float64) for a in (rows.scales, rows.biases))
    moments = (x.T @ x).astype(np.float64)
    moments += np.eye(32) * 0.1 * np.trace(moments) / 32
    left = matrix.astype(np.float64)
    for column in range(32):
        code = np.clip(np.rint((left[:, column] - bias[:, 0]) / scale[:, 0]), 0, 15)
        error = left[:, column] - (code * scale[:, 0] + bias[:, 0])
        left[:, column] -= error
        rest = slice(column + 1, None)
        spread = np.linalg.solve(moments[rest, rest], moments[rest, column]) if column < 31 else 0
        left[:, rest] += error[:, None] * spread
    method = QuantisationMethod(form, "float32", True, None, feedback)
    np.testing.assert_allclose(np.array(unpacked(rows, method)), left, atol=1e-5)


def test_rows_do_not_depend_on_each_other() -> None:
    """Blocks are cut by memory; the bytes are to be the same."""
    x, matrix = inputs(400, 256), values(700, 256)
    feedback = make_feedback([x.T @ x], len(x))
    method = QuantisationMethod(affine(3), "bfloat16", True, None, feedback)
    whole, _ = quantise(matrix, method)
    cuts = [0, 1, 70, 333, 700]
    parts = [quantise(matrix[a:b], method)[0] for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(whole.weight, np.concatenate([p.weight for p in parts]))
    np.testing.assert_array_equal(whole.scales, np.concatenate([p.scales for p in parts]))


@pytest.mark.parametrize("in_dims", [32, 640, 2048, 4096, 14336, 53248])
@pytest.mark.parametrize("rows", [1, 63, 256, 640, 1000, 1638, 262_144])
def test_few_rows_are_filled_up(rows: int, in_dims: int) -> None:
    """A matrix is hardly more work than its numbers; blocks of it are no larger than the usual."""
    item = rows_at_once(rows, in_dims)
    filled = -(-rows // item) * item
    assert filled - rows < 64 * (filled // item)
    assert item <= 2112
    assert item * in_dims <= MAX_BLOCK or item <= 128


def test_blocks_of_inputs_are_matrices_of_their_own() -> None:
    x, matrix, form = inputs(400, 320), values(9, 320), affine(4)
    starts = [slice(0, 128), slice(128, 256), slice(256, 320)]
    moments = [x[:, s].T @ x[:, s] for s in starts]
    together = found(matrix, form, make_feedback(moments, len(x)))
    for part, block in zip(starts, moments, strict=True):
        alone = found(np.ascontiguousarray(matrix[:, part]), form, make_feedback([block], len(x)))
        np.testing.assert_array_equal(together[:, part], alone)


def test_few_tokens_do_not_mislead() -> None:
    """With an eighth of a token for each input, outputs on others are hardly worse than nearest."""
    x, matrix = inputs(1000, 256), values(30, 256)
    feedback = make_feedback([x[:32].T @ x[:32]], 32)
    errors = [
        np.square(x[32:] @ (found(matrix, affine(4), fed) - matrix).T).sum()
        for fed in (None, feedback)
    ]
    assert errors[1] < 1.02 * errors[0]


def test_inputs_that_are_always_zero_give_no_feedback() -> None:
    assert make_feedback([np.zeros((32, 32), np.float32)], 500) is None
    x = inputs(300, 64)
    x[:, 7] = 0
    assert np.isfinite(found(values(4, 64), affine(4), make_feedback([x.T @ x], 300))).all()


def test_each_expert_has_the_moments_of_its_own_tokens() -> None:
    seen, x = Moments(16), inputs(400, 32)
    experts = RNG.integers(0, 3, (400, 2))
    experts[:, 1] = np.where(np.arange(400) < FEW_TOKENS - 1, 3, experts[:, 1])
    experts[experts[:, 0] == experts[:, 1], 1] = 4
    seen.see(["gate", "up"], mx.array(x)[:, None, None], mx.array(experts))
    for expert in range(3):
        token_inputs = x[(experts == expert).any(axis=1)]
        expected = make_feedback(
            [
                token_inputs[:, :16].T @ token_inputs[:, :16],
                token_inputs[:, 16:].T @ token_inputs[:, 16:],
            ],
            len(token_inputs),
        )
        made = seen.statistics("up", 4).feedbacks[expert]
        assert made is seen.statistics("gate", 4).feedbacks[expert]
        for one, other in zip(made.factors, expected.factors, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert seen.statistics("up", 4).feedbacks[3] is None
    assert seen.statistics("down", 1) == Statistics()


def stops(after: int) -> Iterator[None]:
    yield from [None] * after
    while True:
        raise KeyboardInterrupt


@pytest.mark.alike
@pytest.mark.parametrize("case", ["llama-v4", "qwen3_moe-v4"])
def test_an_interrupted_conversion_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    source = write_source(tmp_path / "source", case)
    options: dict[str, Any] = {"calibration": TEXT, "shard_bytes": 16_000}
    convert(source, tmp_path / "undisturbed", "3bit-g32", **options)
    with monkeypatch.context() as patch:
        patch.setattr(ConversionOptions, "feeds_back", False)
        convert(source, tmp_path / "nearest", "3bit-g32", **options)
    assert contents(tmp_path / "nearest") != contents(tmp_path / "undisturbed")
    written, stop = ShardFile.finish, stops(2)

    def finish(file: ShardFile) -> None:
        next(stop)
        written(file)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", "3bit-g32", **options)
    refused = r"rounding: . sequences, error feedback over 4096 inputs, now"
    with monkeypatch.context() as patch:
        patch.setattr(ConversionOptions, "feeds_back", False)
        with pytest.raises(ConversionError, match=refused):
            convert(source, tmp_path / "out", "3bit-g32", run={"resume": True}, **options)
    convert(source, tmp_path / "out", "3bit-g32", run={"resume": True}, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_experts_that_the_text_hardly_reaches_are_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    report = convert(source, tmp_path / "out", calibration=TEXT[:240])
    assert any("saw too few tokens" in note for note in report.notes)
