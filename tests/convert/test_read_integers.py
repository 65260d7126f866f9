"""AWQ, GPTQ and compressed-tensors' integers: values and MLX codes against plain packings."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import check_values
from convert_cases import opened as opened_module
from oracles.checkpoints import bf16, f16, from_bf16, i32, write_folder
from oracles.integers import (
    awq_gemm,
    awq_gemv,
    awq_values,
    gptq,
    gptq_values,
    pack_columns,
    pack_padded,
)

from mlxinfer.convert.arrange import ArrangedSource, OutputTensor
from mlxinfer.convert.files import ShardFile
from mlxinfer.convert.plan import MemoryBudget, PlannedTensor
from mlxinfer.convert.read import SourceModel, open_source
from mlxinfer.convert.verify import ShardReader
from mlxinfer.convert.write import TensorWriter
from mlxinfer.errors import CheckpointError, UnsupportedModelError

PATH = "model.layers.0.self_attn.q_proj"
NAME = f"{PATH}.weight"
IN, OUT = 256, 64
opened = partial(opened_module, path=PATH)


def numbers(bits: int, group_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (in, out), zeros and scales (groups, out)."""
    rng = np.random.default_rng(seed)
    groups = IN // group_size
    codes = rng.integers(0, 1 << bits, (IN, OUT))
    zeros = rng.integers(0, 1 << bits, (groups, OUT))
    return codes, zeros, rng.normal(0.01, 0.003, (groups, OUT)).astype(np.float16)


def awq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, **more}


@pytest.mark.parametrize(
    ("stated", "layout"),
    [
        ({"version": "gemm"}, awq_gemm),
        ({"version": "gemv"}, awq_gemv),
        ({"format": "gemv"}, awq_gemv),
    ],
)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_awq_equals_its_kernel(tmp_path: Path, stated: Any, layout: Any, group_size: int) -> None:
    codes, zeros, scales = numbers(4, group_size)
    config = awq_config(**stated, group_size=group_size)
    source = opened(tmp_path, layout(codes, zeros, scales), config)
    expected = awq_values(codes, zeros, scales)
    info = source.tensors[NAME]
    assert (info.shape, info.stored) == ((OUT, IN), f"AWQ int4 g{group_size}")
    check_values(source, NAME, expected, codes=True)


@pytest.mark.parametrize(
    ("version", "name", "wrong", "words"),
    [
        ("gemm", "qzeros", i32(np.zeros((3, OUT // 8))), "expected"),
        ("gemm", "scales", f16(np.zeros((2, OUT + 1))), "expected"),
        ("gemm", "qweight", i32(np.zeros((IN + 1, OUT // 8))), "do not divide"),
        ("gemm", "qweight", f16(np.zeros((IN, OUT // 8))), "is F16"),
        ("gemv", "qzeros", i32(np.zeros((OUT, 0))), "room for"),
        ("gemv", "scales", f16(np.zeros((OUT, 4))), "expected"),
        ("gemv", "qweight", f16(np.zeros((OUT, IN // 8))), "is F16"),
        ("gemv", "qweight", i32(np.zeros((1, OUT, IN // 8))), r"expected \(out, in / 8\)"),
    ],
)
def test_awq_arrays_must_fit(
    tmp_path: Path, version: str, name: str, wrong: Any, words: str
) -> None:
    layout = awq_gemm if version == "gemm" else awq_gemv
    leaves = {**layout(*numbers(4, 128)), name: wrong}
    with pytest.raises(CheckpointError, match=words):
        opened(tmp_path, leaves, awq_config(version=version))


def gptq_config(bits: int, group_size: int, version: int = 1, **more: Any) -> dict[str, Any]:
    form = "gptq" if version == 1 else "gptq_v2"
    sizes = {"bits": bits, "group_size": group_size}
    return {"quant_method": "gptq", **sizes, "checkpoint_format": form, **more}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_in_order_keeps_its_codes(tmp_path: Path, bits: int, version: int) -> None:
    codes, zeros, scales = numbers(bits, 64)
    group_of = np.arange(IN) // 64
    leaves = gptq(codes, zeros, scales, group_of, bits, version)
    source = opened(tmp_path, leaves, gptq_config(bits, 64, version))
    expected = gptq_values(codes, zeros, scales, group_of)
    info = source.tensors[NAME]
    assert (info.shape, info.stored) == ((OUT, IN), f"GPTQ int{bits} g64")
    check_values(source, NAME, expected, codes=True)
    stored = leaves["qweight"][1].view(np.uint32).T
    assert np.array_equal(np.array(source.read_packed(NAME).weight), stored)


@pytest.mark.parametrize(("group_size", "ours"), [(-1, 128), (256, 128), (32, 32)])
def test_large_groups_become_several(tmp_path: Path, group_size: int, ours: int) -> None:
    codes, zeros, scales = numbers(4, IN if group_size == -1 else group_size)
    group_of = np.arange(IN) // (IN if group_size == -1 else group_size)
    leaves = gptq(codes, zeros, scales, group_of, 4, 1)
    source = opened(tmp_path, leaves, gptq_config(4, group_size))
    assert source.tensors[NAME].lossless.group_size == ours
    check_values(source, NAME, gptq_values(codes, zeros, scales, group_of), codes=True)


def test_symmetric_gptq_is_exact_in_float16(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4, 128)
    leaves = gptq(codes, np.full_like(zeros, 8), scales, np.arange(IN) // 128, 4, 1)
    source = opened(tmp_path, leaves, gptq_config(4, 128, sym=True))
    packed = source.read_packed(NAME)
    assert packed.scales.dtype == packed.biases.dtype == mx.float16
    assert np.array_equal(np.array(packed.biases), -8 * scales.T)


@pytest.mark.parametrize("bits", [3, 4])
def test_real_act_order_has_values_only(tmp_path: Path, bits: int) -> None:
    codes, zeros, scales = numbers(bits, 64)
    group_of = np.random.default_rng(1).permutation(np.arange(IN) // 64)
    leaves = gptq(codes, zeros, scales, group_of, bits, 1)
    source = opened(tmp_path, leaves, gptq_config(bits, 64, desc_act=True))
    assert "act-order" in source.tensors[NAME].stored
    check_values(source, NAME, gptq_values(codes, zeros, scales, group_of), codes=False)


@pytest.mark.parametrize(
    ("group_of", "stated", "words"),
    [
        (np.full(IN, 4), {}, "g_idx"),
        (np.arange(IN) // 64, {"sym": True}, "symmetric"),  # with other zeros
    ],
)
def test_codes_that_contradict_what_is_said_of_them_are_refused(
    tmp_path: Path, group_of: np.ndarray, stated: dict[str, Any], words: str
) -> None:
    leaves = gptq(*numbers(4, 64), group_of, 4, 1)
    source = opened(tmp_path, leaves, gptq_config(4, 64, **stated))
    with pytest.raises(CheckpointError, match=words):
        source.read(NAME)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4, 64)
    scales[1, 3] = np.nan
    source = opened(tmp_path, awq_gemm(codes, zeros, scales), awq_config(group_size=64))
    with pytest.raises(CheckpointError, match="infinite"):
        source.read(NAME)
    assert source.read(NAME, slice(4, 8)).shape == (4, IN)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored_as", [1, 2])
@pytest.mark.parametrize("said", [1, 2])
def test_a_symmetric_zero_is_the_middle_whatever_version_is_stated(
    tmp_path: Path, bits: int, stored_as: int, said: int
) -> None:
    codes, zeros, scales = numbers(bits, 64)
    zeros = np.full_like(zeros, 1 << (bits - 1))
    leaves = gptq(codes, zeros, scales, np.arange(IN) // 64, bits, stored_as)
    source = opened(tmp_path, leaves, gptq_config(bits, 64, said, sym=True))
    expected = gptq_values(codes, zeros, scales, np.arange(IN) // 64)
    assert np.array_equal(np.array(source.read(NAME)), expected)


@pytest.mark.parametrize(
    "stated", [{"format": "gptq_v2"}, {"format": "gptq_v2", "checkpoint_format": "gptq_v2"}]
)
def test_gptq_v2_is_recognised_wherever_stated(tmp_path: Path, stated: dict[str, str]) -> None:
    codes, zeros, scales = numbers(4, 64)
    group_of = np.arange(IN) // 64
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, **stated}
    source = opened(tmp_path, gptq(codes, zeros, scales, group_of, 4, 2), config)
    assert np.array_equal(np.array(source.read(NAME)), gptq_values(codes, zeros, scales, group_of))


def compressed(bits: int, group_size: int | None, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "group_size": group_size, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


DENSE = {"weight": f16(np.zeros((4, 32)))}
AWQ, GPTQ = (lambda: awq_gemm(*numbers(4, 128))), (lambda: gptq(*numbers(4, 64), GROUPS, 4, 1))
GROUPS = np.arange(IN) // 64


@pytest.mark.parametrize(
    ("leaves", "config", "said"),
    [
        (AWQ, awq_config(bits=8), "bits"),
        (AWQ, awq_config(zero_point=False), "zero_point"),
        (AWQ, awq_config(version="gemv_fast"), "version"),
        (lambda: {**AWQ(), "qzeros": None}, awq_config(), "qzeros"),
        (GPTQ, gptq_config(4, 64, 1, format="gptq_v2"), "gptq.*gptq_v2|gptq_v2.*gptq"),
        (GPTQ, gptq_config(5, 64), "bits"),
        (GPTQ, gptq_config(4, 64, checkpoint_format="marlin"), "checkpoint_format"),
        (GPTQ, gptq_config(4, 64, dynamic={"-:x": {}}), "dynamic"),
        (GPTQ, gptq_config(4, 96), "do not divide"),
        (lambda: DENSE, compressed(4, 64, format="marlin-24"), "marlin-24"),
        (lambda: DENSE, compressed(4, 64, sparsity_config={"format": "sparse-24"}), "zeros"),
    ],
)
def test_other_kinds_are_refused_by_name(
    leaves: Callable[[], dict[str, Any]], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    there = {name: stored for name, stored in leaves().items() if stored is not None}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        opened(tmp_path, there, config)


def test_old_gptq_describes_itself_beside_the_config(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4, 64)
    group_of = np.arange(IN) // 64
    leaves = gptq(codes, zeros, scales, group_of, 4, 1)
    write_folder(tmp_path, {f"{PATH}.{leaf}": stored for leaf, stored in leaves.items()})
    (tmp_path / "quantize_config.json").write_text(
        '{"bits": 4, "group_size": 64, "desc_act": false}'
    )
    source = open_source(tmp_path)
    assert source.format == "GPTQ"
    assert np.array_equal(np.array(source.read(NAME)), gptq_values(codes, zeros, scales, group_of))


@pytest.mark.parametrize(
    ("bits", "pack"),
    [
        *((bits, pack_columns) for bits in (2, 3, 4, 5, 6, 7, 8)),
        *((bits, pack_padded) for bits in (3, 5, 6, 7)),  # before words were dense
    ],
)
@pytest.mark.parametrize("zero_points", [False, True])
def test_pack_quantized_weights_are_codes_less_zero_points_times_scales(
    tmp_path: Path, bits: int, pack: Any, zero_points: bool
) -> None:
    codes, zeros, scales = numbers(bits, 64)
    stored = bf16(scales.T.astype(np.float32))
    leaves = {
        "weight_packed": i32(pack(codes.T, bits)),
        "weight_scale": stored,
        "weight_shape": ("I64", np.array([OUT, IN])),
    }
    if zero_points:
        leaves["weight_zero_point"] = i32(pack(zeros, bits).T)
    else:
        zeros = np.full_like(zeros, 1 << (bits - 1))
    source = opened(tmp_path, leaves, compressed(bits, 64, format="pack-quantized"))
    expected = (codes - np.repeat(zeros, 64, axis=0)).T * np.repeat(from_bf16(stored), 64, axis=1)
    check_values(source, NAME, expected, codes=bits != 7)
    if bits != 7:
        exact = mx.float16 if bits < 4 else mx.float32  # -zero * scale, of bfloat16 scales
        scales_dtype = source.read_packed(NAME).scales.dtype
        assert scales_dtype == (exact if zero_points else mx.bfloat16)


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
def test_asymmetric_integers_without_zero_points_are_refused(tmp_path: Path, kind: str) -> None:
    codes, _, scales = numbers(8, 64)
    config = compressed(8, 64, format=kind)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    if kind == "pack-quantized":
        leaves: dict[str, Any] = {"weight_packed": i32(pack_columns(codes.T, 8))}
    else:
        leaves = {"weight": ("I8", (codes.T - 128).astype(np.int8))}
    leaves["weight_scale"] = f16(scales.T)
    with pytest.raises(CheckpointError, match="weight_zero_point"):
        opened(tmp_path, leaves, config)


def packed_leaves(
    codes: np.ndarray, scales: np.ndarray, shape: tuple[int, int] = (OUT, IN)
) -> dict[str, Any]:
    """Of codes with 4 bits (in, out) and scales (groups, out)."""
    return {
        "weight_packed": i32(pack_columns(codes.T, 4)),
        "weight_scale": f16(scales.T),
        "weight_shape": ("I64", np.array(shape)),
    }


def test_pack_quantized_rows_and_act_order(tmp_path: Path) -> None:
    in_order = np.arange(IN) // 64
    anywhere = np.random.default_rng(2).permutation(in_order)
    for size, group_of in ((None, 0 * in_order), (64, anywhere), (64, in_order)):
        codes, _, scales = numbers(4, size or IN)
        leaves = packed_leaves(codes, scales)
        if size is not None:
            leaves["weight_g_idx"] = ("I32", group_of.astype(np.int32))
        source = opened(tmp_path, leaves, compressed(4, size, format="pack-quantized"))
        expected = (codes - 8).T * scales.T.astype(np.float32)[:, group_of]
        check_values(source, NAME, expected, codes=group_of is not anywhere)


def test_the_shape_must_be_what_the_words_hold(tmp_path: Path) -> None:
    codes, _, scales = numbers(4, 64)
    leaves = packed_leaves(codes, scales, (OUT, IN - 1))
    source = opened(tmp_path, leaves, compressed(4, 64, format="pack-quantized"))
    with pytest.raises(CheckpointError, match="weight_shape"):
        source.read(NAME)
    with pytest.raises(CheckpointError, match="fit"):
        opened(tmp_path, leaves, compressed(8, 64, format="pack-quantized"))


@pytest.mark.parametrize("shape", [(), (1,), (OUT, 1), (OUT, 4)])
@pytest.mark.parametrize("zero_points", [False, True])
def test_int_quantized_weights_are_codes_less_zero_points_times_scales(
    tmp_path: Path, shape: tuple[int, ...], zero_points: bool
) -> None:
    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(-128, 128, size).astype(np.int8) for size in ((OUT, IN), shape))
    scale = f16(rng.normal(0.01, 0.002, shape))
    leaves = {"weight": ("I8", codes), "weight_scale": scale, "input_scale": f16(1.0)}
    if zero_points:
        leaves["weight_zero_point"] = ("I8", zeros)
    source = opened(tmp_path, leaves, compressed(8, None, format="int-quantized"))
    groups = shape[1] if len(shape) == 2 else 1

    def each(values: Any) -> np.ndarray:
        grid = np.asarray(values, np.float32).reshape(-1, groups)
        return np.repeat(np.broadcast_to(grid, (OUT, groups)), IN // groups, axis=1)

    expected = (codes - each(zeros * zero_points)) * each(scale[1])
    check_values(source, NAME, expected, codes=True)
    assert zero_points or source.read_packed(NAME).scales.dtype == mx.float16
    assert "activations" in source.notes[0]


@pytest.mark.parametrize("location", ["input", "output", "weight_input", None])
def test_transforms_of_activations_are_refused(tmp_path: Path, location: str | None) -> None:
    leaves = {"weight": f16(np.zeros((4, 32)))}
    apply = [{"location": "weight_output"}, {"location": location}]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
    config = compressed(4, 64, transform_config=transforms)
    if location == "weight_input":
        opened(tmp_path, leaves, config)
        return
    with pytest.raises(UnsupportedModelError, match=f"R4.*{location}"):
        opened(tmp_path, leaves, config)


def asymmetric(folder: Path, scales: np.ndarray) -> SourceModel:
    """8-bit codes with zero points and bfloat16 scales, as the last matrix of a tiny model."""
    codes, zeros, _ = numbers(8, 64)
    leaves = {
        "weight_packed": i32(pack_columns(codes.T, 8)),
        "weight_scale": bf16(scales.T.astype(np.float32)),
        "weight_zero_point": i32(pack_columns(zeros, 8).T),
    }
    config = compressed(8, 64, format="pack-quantized")
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    return opened(folder, leaves, config)


def written(folder: Path, source: SourceModel) -> np.ndarray:
    """The matrix after it was copied to a file and read again, (OUT, IN)."""
    info = source.tensors[NAME]
    output = OutputTensor(NAME, (NAME,), info.shape, info.dtype, info.stored, info.stored_bytes,
                          info.lossless, info.scales_dtype)  # fmt: skip
    arranged = ArrangedSource(source, None, (output,))  # type: ignore[arg-type]
    tensor = PlannedTensor(output, info.lossless, info.scales_dtype, packed=True)
    writer = TensorWriter(arranged, MemoryBudget(0, 0, 1 << 7, 2, 0), False)  # in blocks
    try:
        pieces = {array.name: [array] for array in tensor.arrays}
        with closing(ShardFile(folder / "out.safetensors", pieces)) as file:
            writer.write(tensor, file)
            file.finish()
    finally:
        writer.close()
    rows = slice(0, OUT)
    return np.array(ShardReader(folder / "out.safetensors").values(tensor, rows))


def test_asymmetric_integers_with_bfloat16_scales_keep_their_zero_points(tmp_path: Path) -> None:
    """bfloat16 would round -zero * scale to 2.5e-3 of the values; float16 has 3e-4."""
    source = asymmetric(tmp_path, numbers(8, 64)[2])
    values = np.array(source.read(NAME))
    actual = written(tmp_path, source)
    assert np.sqrt(((actual - values) ** 2).mean() / (values**2).mean()) < 4e-4


@pytest.mark.parametrize("scale", [3e4, 1e-8])
def test_scales_that_float16_does_not_hold_are_refused(tmp_path: Path, scale: float) -> None:
    source = asymmetric(tmp_path, np.full((IN // 64, OUT), scale))
    with pytest.raises(CheckpointError, match=r"do not fit into float16.*--set"):
        written(tmp_path, source)
