"""fp8, nvfp4, mxfp4, mxfp8, gpt-oss and MLX folders: values and codes against plain definitions."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import check_values, dequantised
from convert_cases import opened as opened_module
from models.random_weights import tiny_tensors
from models.tiny import arrays_in, tiny_checkpoint, tiny_config
from oracles.checkpoints import bf16, f16, f32, from_bf16, write_folder
from oracles.floats import E2M1_VALUES, E4M3_VALUES, finite_e4m3, fp4_rows

from mlxinfer.convert.read import open_source
from mlxinfer.errors import CheckpointError, UnsupportedModelError

PATH = "model.layers.0.mlp.up_proj"
NAME = f"{PATH}.weight"
OUT, IN = 192, 320  # no multiples of 128
opened = partial(opened_module, path=PATH)
RNG = np.random.default_rng(0)


def spread(scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A scale for every element, from one for each block."""
    return np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)[:OUT, :IN]


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **more}


SCALES = {  # leaf, shape of the scales, size of a block, the description
    "deepseek": ("weight_scale_inv", (2, 3), (128, 128), "fp8 128x128"),
    "other blocks": ("weight_scale_inv", (3, 4), (64, 96), "fp8 64x96"),
    "per tensor": ("weight_scale", (), (OUT, IN), "fp8 per tensor"),
    "per row": ("weight_scale", (OUT, 1), (1, IN), "fp8 per row"),
    "per row, flat": ("weight_scale", (OUT,), (1, IN), "fp8 per row"),
    "deepseek v4": ("scale", (2, 3), (128, 128), "fp8 128x128"),
    "modelopt blocks": ("weight_scale", (2, 1, 3, 1), (128, 128), "fp8 128x128"),
}


@pytest.mark.parametrize("case", SCALES)
def test_fp8_codes_are_multiplied_by_the_scales_of_their_blocks(tmp_path: Path, case: str) -> None:
    leaf, shape, block, described = SCALES[case]
    codes = finite_e4m3((OUT, IN), seed=1)
    scale = RNG.uniform(1e-4, 1e-3, shape).astype(np.float32)
    leaves = {"weight": ("F8_E4M3", codes), leaf: f32(scale)}
    source = opened(tmp_path, leaves, fp8(weight_block_size=list(block)))
    info = source.tensors[NAME]
    grid = scale.reshape(-(-OUT // block[0]), -(-IN // block[1]))
    expected = (E4M3_VALUES[codes].astype(np.float32) * spread(grid, *block)).astype(np.float32)
    assert (info.shape, info.dtype, info.stored) == ((OUT, IN), "float32", described)
    check_values(source, NAME, expected, codes=False)


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [
        ((2, 256), (1, 2), (128, 128)),  # as many rows as blocks in a row
        ((100, 12_800), (1, 100), (128, 128)),
        ((2, 256), (2, 1), (1, 256)),  # and the rows themselves
        ((2, 256), (1, 1, 2, 1), (128, 128)),
        ((3, 96), (3, 3), (1, 32)),
        ((256, 64), (2, 1), (128, 64)),
    ],
)
def test_fp8_grid_of_a_narrow_matrix(
    tmp_path: Path, shape: tuple[int, int], scale_shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    codes = RNG.integers(0, 0x7E, shape).astype(np.uint8)
    scale = RNG.uniform(1e-4, 1e-3, scale_shape).astype(np.float32)
    stated = [1, 32] if block == (1, 32) else [128, 128]
    leaves = {"weight": ("F8_E4M3", codes), "weight_scale_inv": f32(scale)}
    source = opened(tmp_path, leaves, fp8(weight_block_size=stated))
    grid = scale.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    item = np.repeat(np.repeat(grid, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]
    check_values(source, NAME, E4M3_VALUES[codes].astype(np.float32) * item, codes=False)


def test_fp8_of_which_every_code_is_read(tmp_path: Path) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
    source = opened(tmp_path, {"weight": ("F8_E4M3", codes)}, None)
    read = source.read(NAME)
    assert read.dtype == mx.bfloat16
    assert np.array_equal(
        np.array(read.astype(mx.float32)), E4M3_VALUES[codes].astype(np.float32), equal_nan=True
    )


def compressed(form: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, **more}


OCTETS = RNG.integers(0, 256, (OUT, IN // 2)).astype(np.uint8)
CODES, STEPS = finite_e4m3((OUT, IN), seed=3), finite_e4m3((OUT, IN // 16), seed=5) & 0x7F
BLOCKS, POWERS = (RNG.integers(110, 130, shape).astype(np.uint8) for shape in ((2, 3), (OUT, 10)))


def power(exponents: np.ndarray) -> np.ndarray:
    return np.exp2(exponents.astype(float) - 127)


EIGHT = E4M3_VALUES[CODES] * np.repeat(power(POWERS), 32, axis=1)
BLOCKED = E4M3_VALUES[CODES] * spread(power(BLOCKS), 128, 128)
FOUR = fp4_rows(OCTETS) * np.repeat(power(POWERS), 32, axis=1)
NV = fp4_rows(OCTETS) * np.repeat(E4M3_VALUES[STEPS], 16, axis=1)
LOSSLESS: dict[str, tuple[str, dict[str, Any], Any, Any, np.ndarray]] = {  # mode, config, arrays
    "fp8, powers as floats": (
        *("mxfp8", fp8(scale_fmt="ue8m0"), ("F8_E4M3", CODES), f32(power(BLOCKS)), BLOCKED),
    ),
    "fp8, powers": (
        *("mxfp8", fp8(scale_fmt="ue8m0"), ("F8_E4M3", CODES), ("F8_E8M0", BLOCKS), BLOCKED),
    ),
    "mxfp8": ("mxfp8", compressed("mxfp8-quantized"), ("F8_E4M3", CODES), ("U8", POWERS), EIGHT),
    "mxfp4": ("mxfp4", compressed("mxfp4-pack-quantized"), ("U8", OCTETS), ("U8", POWERS), FOUR),
    "mxfp4, powers": (
        *("mxfp4", compressed("mxfp4-pack-quantized"), ("U8", OCTETS), ("F8_E8M0", POWERS), FOUR),
    ),
    "mxfp4, signed": (*("mxfp4", fp8(), ("I8", OCTETS.view(np.int8)), ("F8_E8M0", POWERS), FOUR),),
    "nvfp4": (
        *("nvfp4", compressed("nvfp4-pack-quantized"), ("U8", OCTETS), ("F8_E4M3", STEPS), NV),
    ),
}


@pytest.mark.parametrize("case", LOSSLESS)
def test_formats_that_mlx_has(tmp_path: Path, case: str) -> None:
    mode, config, codes, scales, expected = LOSSLESS[case]
    names = {"U8": ("weight_packed", "weight_scale"), "I8": ("weight", "scale")}  # DeepSeek V4's
    leaves = dict(
        zip(names.get(codes[0], ("weight", "weight_scale")), (codes, scales), strict=True)
    )
    source = opened(tmp_path, leaves, config)
    assert source.tensors[NAME].lossless.mode == mode
    check_values(source, NAME, expected, codes=True)


def test_scales_that_only_claim_to_be_powers_of_two(tmp_path: Path) -> None:
    codes = finite_e4m3((OUT, IN), seed=2)
    leaves = {"weight": ("F8_E4M3", codes), "weight_scale_inv": f32(np.full((2, 3), 0.3))}
    source = opened(tmp_path, leaves, fp8(scale_fmt="ue8m0"))
    with pytest.raises(CheckpointError, match="powers of two"):
        source.read_packed(NAME)


def test_compressed_fp8_with_blocks(tmp_path: Path) -> None:
    codes = finite_e4m3((OUT, IN), seed=4)
    scale = RNG.uniform(0.1, 1, (3, 5)).astype(np.float32)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = compressed("float-quantized", config_groups=groups)
    leaves = {"weight": ("F8_E4M3", codes), "weight_scale": f32(scale)}
    expected = E4M3_VALUES[codes].astype(np.float32) * spread(scale, 64, 64)
    check_values(opened(tmp_path, leaves, method), NAME, expected, codes=False)


@pytest.mark.parametrize(
    ("byte", "code", "damaged"),
    [
        (255, 2, True),
        (254, 7, True),
        (254, 4, True),
        (253, 6, True),
        (254, 3, False),
        (252, 7, False),
    ],
)
def test_mxfp4_must_be_finite(tmp_path: Path, byte: int, code: int, damaged: bool) -> None:
    """One group of a matrix: E8M0's NaN, and powers of two that its codes carry beyond float32."""
    exponents = np.full((OUT, IN // 32), 120, np.uint8)
    exponents[7, 3] = byte
    octets = np.full((OUT, IN // 2), 0x11, np.uint8)
    octets[7, 3 * 16] = 0x10 | code
    leaves = {"weight_packed": ("U8", octets), "weight_scale": ("U8", exponents)}
    source = opened(tmp_path, leaves, compressed("mxfp4-pack-quantized"))
    if damaged:
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            source.read_packed(NAME)
    else:
        assert np.isfinite(dequantised(source.read_packed(NAME), source.tensors[NAME])).all()


@pytest.mark.parametrize("where", ["weight", "weight_scale"])
def test_mxfp8_that_is_not_finite_is_refused(tmp_path: Path, where: str) -> None:
    codes, exponents = finite_e4m3((OUT, IN), seed=3), np.full((OUT, IN // 32), 120, np.uint8)
    if where == "weight":
        codes[3, 5] = 0xFF
    else:
        exponents[3, 5] = 255
    leaves = {"weight": ("F8_E4M3", codes), "weight_scale": ("U8", exponents)}
    with pytest.raises(CheckpointError, match=r"NaN or infinity|no number"):
        opened(tmp_path, leaves, compressed("mxfp8-quantized")).read_packed(NAME)


@pytest.mark.parametrize("by", ["modelopt", "compressed-tensors"])
def test_nvfp4_with_a_global_scale(tmp_path: Path, by: str) -> None:
    octets = RNG.integers(0, 256, (OUT, IN // 2)).astype(np.uint8)
    blocks = finite_e4m3((OUT, IN // 16), seed=5) & 0x7F
    if by == "modelopt":
        third, factor = f32(0.0123), np.float32(0.0123)
        leaves = {"weight": ("U8", octets), "weight_scale": ("F8_E4M3", blocks)}
        leaves |= {"weight_scale_2": third, "input_scale": f32(1.0)}
        source = opened(tmp_path, leaves, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
        steps = E4M3_VALUES[blocks].astype(np.float32) * factor
    else:
        leaves = {"weight_packed": ("U8", octets), "weight_scale": ("F8_E4M3", blocks)}
        leaves |= {"weight_global_scale": f32([812.5]), "input_global_scale": f32([1.0])}
        source = opened(tmp_path, leaves, compressed("nvfp4-pack-quantized"))
        steps = E4M3_VALUES[blocks].astype(np.float32) / np.float32(812.5)
    assert source.tensors[NAME].shape == (OUT, IN)
    expected = fp4_rows(octets).astype(np.float32) * np.repeat(steps, 16, axis=1)
    check_values(source, NAME, expected, codes=False)


def test_modelopt_describes_itself_beside_the_config(tmp_path: Path) -> None:
    codes = finite_e4m3((OUT, IN), seed=6)
    tensors = {NAME: ("F8_E4M3", codes), f"{PATH}.weight_scale": f32(0.5)}
    write_folder(tmp_path, tensors)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    source = open_source(tmp_path)
    assert source.format == "ModelOpt"
    assert np.array_equal(np.array(source.read(NAME)), E4M3_VALUES[codes] * 0.5)


PLAIN = f16(np.ones((4, 4)))
SCALED = {"weight": PLAIN, "pre_quant_scale": f16(np.ones(4))}  # changes the inputs of a layer
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("leaves", "config", "said"),
    [
        (SCALED, {**FP8, "quant_algo": "NVFP4"}, "multiplies the inputs"),
        (SCALED, {**FP8, "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        *(({"weight": PLAIN}, {"quant_method": m}, m) for m in ("bitsandbytes", "hqq", "quark")),
        ({"weight": ("I32", np.zeros((4, 4), np.int32))}, FP8, "weight"),
        ({"weight": PLAIN, "weight_scale_inv": f32(np.ones((1, 1)))}, FP8, "weight"),
        ({"weight": ("U8", np.zeros((4, 4), np.uint8)), "weight_scale": f32(1.0)}, FP8, "weight"),
        (
            {"weight": ("F8_E4M3", CODES), "weight_scale": f32(np.ones((2, 5)))},
            fp8(),
            "neither",  # a shape that scales do not have
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    leaves: dict[str, Any], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        opened(tmp_path, leaves, config)


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.experts"
    blocks = {"gate_up": (4, 6, 2, 16), "down": (4, 64, 1, 16)}
    tensors: dict[str, Any] = {}
    for part, shape in blocks.items():
        exponents = RNG.integers(110, 130, shape[:3]).astype(np.uint8)
        tensors[f"{path}.{part}_proj_blocks"] = ("U8", RNG.integers(0, 256, shape).astype(np.uint8))
        tensors[f"{path}.{part}_proj_scales"] = ("U8", exponents)
        tensors[f"{path}.{part}_proj_bias"] = bf16(RNG.normal(0, 1, shape[:2]))
    source = open_source(
        write_folder(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type="gpt_oss")
    )
    assert source.format == "MXFP4"
    for part, stored, rows in (
        ("gate_proj", "gate_up_proj", slice(0, None, 2)),
        ("up_proj", "gate_up_proj", slice(1, None, 2)),
        ("down_proj", "down_proj", slice(None)),
    ):
        octets = tensors[f"{path}.{stored}_blocks"][1][:, rows]
        exponents = tensors[f"{path}.{stored}_scales"][1][:, rows].astype(float)
        digits = E2M1_VALUES[np.stack([octets & 15, octets >> 4], axis=-1)].reshape(
            *exponents.shape, 32
        )
        expected = (digits * np.exp2(exponents - 127)[..., None]).reshape(*exponents.shape[:2], -1)
        name = f"{path}.{part}.weight"
        assert source.tensors[name].shape == expected.shape
        check_values(source, name, expected, codes=True)
        bias = from_bf16(tensors[f"{path}.{stored}_bias"])[:, rows]
        read = source.read(f"{path}.{part}.bias")
        assert np.array_equal(np.array(read.astype(mx.float32)), bias)


def test_gpt_oss_in_plain_floats(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("gpt_oss"))
    source = open_source(tiny_checkpoint(tmp_path, "gpt_oss"))
    path = "model.layers.2.mlp.experts"
    both = tensors[f"{path}.gate_up_proj"].swapaxes(1, 2)
    for part, expected in (
        ("gate_proj", both[:, ::2]),
        ("up_proj", both[:, 1::2]),
        ("down_proj", tensors[f"{path}.down_proj"].swapaxes(1, 2)),
    ):
        check_values(source, f"{path}.{part}.weight", expected, codes=False)


FORMATS = [
    *({"bits": bits, "group_size": group} for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)),
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]


@pytest.mark.alike
@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_quantised_mlx_folders_are_read_without_loss(tmp_path: Path, how: dict[str, Any]) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3-v4", quantize=how)
    raw = arrays_in(folder)
    assert isinstance(raw, dict)
    source = open_source(folder)
    assert "quantization" not in source.config
    packed_names = [name for name, info in source.tensors.items() if info.lossless]
    assert len(packed_names) > 8
    for name in packed_names:
        path, info, packed = (
            name.removesuffix(".weight"),
            source.tensors[name],
            source.read_packed(name),
        )
        biases = raw.get(f"{path}.biases")
        expected = mx.dequantize(raw[name], raw[f"{path}.scales"], biases, **how)
        assert info.shape == expected.shape
        assert mx.array_equal(packed.weight, raw[name])
        assert mx.array_equal(packed.scales, raw[f"{path}.scales"])
        assert (packed.biases is None) == (biases is None)
        assert packed.biases is None or mx.array_equal(packed.biases, biases)
        error = mx.abs(source.read(name).astype(mx.float32) - expected.astype(mx.float32)).max()
        assert error.item() <= 1e-6  # MLX may add with one rounding less
        assert mx.array_equal(source.read(name, slice(3, 6)), source.read(name)[3:6])


def test_each_mlx_layer_has_its_own_format(tmp_path: Path) -> None:
    weight = mx.random.normal((64, 128), key=mx.random.key(0))
    four, eight = mx.quantize(weight, 64, 4), mx.quantize(weight, 32, 8)
    names = ("weight", "scales", "biases")
    arrays = {f"a.{n}": part for n, part in zip(names, four, strict=True)}
    arrays |= {f"b.{n}": part for n, part in zip(names, eight, strict=True)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    config = '{"model_type": "llama", "quantization": {"group_size": 64, "bits": 4, "b": %s}}'
    (tmp_path / "config.json").write_text(config % '{"group_size": 32, "bits": 8}')
    source = open_source(tmp_path)
    assert source.tensors["a.weight"].lossless.bits == 4
    assert source.tensors["b.weight"].lossless.bits == 8
    error = mx.abs(source.read("b.weight") - weight).max().item()
    assert error < 0.06 < mx.abs(source.read("a.weight") - weight).max().item()
    (tmp_path / "config.json").write_text(config % '{"group_size": 32, "bits": 4}')
    with pytest.raises(CheckpointError, match=r"b\.scales"):
        open_source(tmp_path)


def test_a_config_that_speaks_of_floats_that_are_not_there(tmp_path: Path) -> None:
    dense = {"weight": f16(np.ones((OUT, IN)))}
    source = opened(tmp_path, dense, {"quant_method": "fbgemm_fp8"})
    assert source.notes == ("config.json says that weights are fp8; all of them are plain floats.",)
