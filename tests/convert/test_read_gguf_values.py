"""Values and codes of every GGUF type, against the `gguf` package and mx.dequantize."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from convert_cases import dequantised
from gguf import GGMLQuantizationType as Kind
from oracles.gguf_files import finish, random_blocks

from mlxinfer.convert.read import SourceModel, open_source
from mlxinfer.errors import UnsupportedModelError
from tests.tables import words

LOSSLESS = {  # the format of MLX, and whether float16 holds the scales
    Kind.Q4_0: ("affine", 4, True),
    Kind.Q4_1: ("affine", 4, True),
    Kind.Q5_0: ("affine", 5, True),
    Kind.Q5_1: ("affine", 5, True),
    Kind.Q8_0: ("affine", 8, True),
    Kind.Q4_K: ("affine", 4, False),
    Kind.Q5_K: ("affine", 5, False),
    Kind.MXFP4: ("mxfp4", 4, True),
}
VALUES_ONLY = words("""
    Q2_K Q3_K Q6_K IQ4_NL IQ4_XS IQ1_S IQ1_M IQ2_S IQ2_XS IQ2_XXS IQ3_S IQ3_XXS TQ1_0 TQ2_0 NVFP4
""")
BYTES = {kind: size for kind, (_, size) in gguf.GGML_QUANT_SIZES.items()}
NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = (48, 512)
PLAIN = {Kind.F32: mx.float32, Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}


def one_tensor(
    folder: Path,
    kind: Kind,
    data: np.ndarray,
    arch: str = "qwen3",
    more: Mapping[str, list[float]] | None = None,
) -> SourceModel:
    """A GGUF file with an embedding and one matrix."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(48)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((32, 512), np.float16))
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    for name, numbers in (more or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    finish(writer)
    return open_source(path)


@pytest.mark.parametrize(
    "kind", [*LOSSLESS, *map(Kind.__getitem__, VALUES_ONLY)], ids=lambda kind: kind.name
)
def test_values_are_bit_exact(tmp_path: Path, kind: Kind) -> None:
    blocks = random_blocks(kind, *SHAPE, seed=int(kind))
    source = one_tensor(tmp_path, kind, blocks)
    info = source.tensors[NAME]
    assert (info.shape, info.stored, info.stored_bytes) == (SHAPE, kind.name, blocks.nbytes)
    expected = gguf.dequantize(blocks, kind)
    assert source.read(NAME).dtype == mx.float32
    for rows in (slice(None), slice(5, 17)):
        assert np.array_equal(np.array(source.read(NAME, rows)), expected[rows])


@pytest.mark.parametrize("kind", LOSSLESS, ids=lambda kind: kind.name)
def test_codes_mean_the_same_in_mlx(tmp_path: Path, kind: Kind) -> None:
    mode, bits, exact = LOSSLESS[kind]
    blocks = random_blocks(kind, *SHAPE, seed=int(kind))
    if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0):  # as large as scales of weights are
        scales = np.random.default_rng(0).normal(0, 0.02, blocks.size // BYTES[kind])
        blocks.reshape(-1, BYTES[kind])[:, :2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    source = one_tensor(tmp_path, kind, blocks)
    form = source.tensors[NAME].lossless
    assert (form.mode, form.bits, form.group_size) == (mode, bits, 32)
    packed = source.read_packed(NAME)
    if mode == "affine":
        assert packed.scales.dtype == (mx.float16 if exact else mx.float32)
    values = dequantised(packed, source.tensors[NAME])
    expected = gguf.dequantize(blocks, kind)
    # MLX adds with one rounding more or less than llama.cpp where float32 does not hold the sum.
    bound = 0.0 if exact else 1e-6 * np.abs(expected).max()
    assert np.abs(values - expected).max() <= bound


def test_scales_that_float16_cannot_hold_stay_float32(tmp_path: Path) -> None:
    """-128 times a scale above 511 overflows float16."""
    blocks = random_blocks(Kind.Q8_0, *SHAPE, seed=1)
    blocks[0, :2] = np.array([1000.0], np.float16).view(np.uint8)
    packed = one_tensor(tmp_path, Kind.Q8_0, blocks).read_packed(NAME)
    assert packed.scales.dtype == packed.biases.dtype == mx.float32
    assert packed.biases[0, 0].item() == -128000.0


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_floats_of_gguf_are_read_as_stored(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    stored = gguf.quantize(values, kind)
    read = one_tensor(tmp_path, kind, stored).read(NAME, slice(3, 9))
    assert read.dtype == PLAIN[kind]
    assert np.array_equal(np.array(read.astype(mx.float32)), gguf.dequantize(stored, kind)[3:9])


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    for kind in (Kind.Q8_K, Kind.Q1_0, Kind.I32):
        values, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((48, 512 // values * size), np.uint8)
        with pytest.raises(UnsupportedModelError, match=f"is {kind.name}, which is not read"):
            one_tensor(tmp_path, kind, blocks)


def test_a_scale_beside_a_matrix_in_nvfp4_counts(tmp_path: Path) -> None:
    data = random_blocks(Kind.NVFP4, *SHAPE, seed=3)
    plain = one_tensor(tmp_path, Kind.NVFP4, data)
    expected = 0.25 * np.array(plain.read(NAME))
    more = {"blk.0.ffn_up.scale": [0.25], "blk.0.ffn_up.input_scale": [3.0]}
    scaled = one_tensor(tmp_path, Kind.NVFP4, data, more=more)
    assert set(scaled.tensors) == set(plain.tensors)
    assert np.array_equal(np.array(scaled.read(NAME)), expected)
