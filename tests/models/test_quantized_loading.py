"""Quantised checkpoints give the logits of the weights they stand for, in every layout."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import logits
from models.expert_layouts import stacked
from models.tiny import arrays_of, quantized, tiny_config, write

from mlxinfer.errors import CheckpointError
from mlxinfer.layers.linear import Joined
from mlxinfer.models import load
from mlxinfer.models.quantization import QuantFormat, format_of_shapes

FOUR_BITS = {"group_size": 32, "bits": 4}
FORMS = [{"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)] + [
    {"group_size": 64, "bits": 4},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


def dequantized(arrays: dict[str, mx.array], forms) -> dict[str, mx.array]:
    """What a quantised checkpoint stands for; `forms` maps a path to its format."""
    result = {n: a for n, a in arrays.items() if not n.endswith((".scales", ".biases"))}
    for name in [name for name in arrays if name.endswith(".scales")]:
        path = name.removesuffix(".scales")
        parts = [arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases")]
        parts[1:] = [widened(part) for part in parts[1:]]
        result[f"{path}.weight"] = mx.dequantize(*parts, **forms(path), dtype=mx.float32)
    return result


def widened(array: mx.array | None) -> mx.array | None:
    """Half precision made float32, so that a product is not rounded; bytes and None as they are."""
    half = array is not None and array.dtype in (mx.float16, mx.bfloat16)
    return array.astype(mx.float32) if half else array


def assert_same(folder: Path, config: dict, arrays: dict[str, mx.array], stated, forms) -> None:
    packed = load(write(folder / "q", config | {"quantization": stated}, arrays))
    plain = load(write(folder / "d", config, dequantized(arrays, forms)))
    np.testing.assert_allclose(logits(packed), logits(plain), atol=2e-3)
    assert packed.num_bytes < 0.6 * plain.num_bytes


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "form"),
    [  # each format in one of the models, in all of them in the slow run
        pytest.param(
            case,
            form,
            id="-".join(map(str, (case, *form.values()))),
            marks=() if i % 3 == j else pytest.mark.slow,
        )
        for i, form in enumerate(FORMS)
        for j, case in enumerate(["qwen3-v4", "llama-v5", "qwen3_moe-v5"])
    ],
)
def test_models_of_every_format_load_as_their_dequantised_weights(tmp_path, case, form):
    config = tiny_config(case) | {"intermediate_size": 128, "moe_intermediate_size": 64}
    arrays = quantized(arrays_of(config), form)
    assert_same(tmp_path, config, arrays, form, lambda path: form)


def test_layers_load_with_the_bits_of_their_path(tmp_path):
    """As mixed recipes write it: v_proj at 8 bits, so Q, K and V cannot be one matrix."""
    config = tiny_config("qwen3_moe-v4") | {"intermediate_size": 128, "moe_intermediate_size": 64}
    low, high = FOUR_BITS, {"group_size": 64, "bits": 8}
    arrays = arrays_of(config)
    raised = [n for n in arrays if n.endswith(("v_proj.weight", "mlp.gate.weight"))]
    kept = ["lm_head.weight"]
    packed = quantized({n: a for n, a in arrays.items() if n not in (*raised, *kept)}, low)
    packed |= quantized({n: arrays[n] for n in raised}, high) | {n: arrays[n] for n in kept}
    paths = {name.removesuffix(".weight"): high for name in raised}
    stated = low | paths | {"lm_head": False}
    assert_same(tmp_path, config, packed, stated, lambda path: paths.get(path, low))
    model = load(tmp_path / "q")
    assert isinstance(model.layers[0].mixer.args.qkv_proj, Joined)


def test_stacked_experts_of_mlx_checkpoints(tmp_path):
    config = tiny_config("qwen3_moe-v5") | {"moe_intermediate_size": 64}
    arrays = arrays_of(config)
    stacks = stacked(arrays)
    by_name = logits(load(write(tmp_path / "hub", config, arrays)))
    assert (logits(load(write(tmp_path / "mlx", config, stacks))) == by_name).all()
    packed = quantized(stacks, FOUR_BITS)
    for name in [name for name in packed if "switch_mlp" in name]:
        path = name.removesuffix(".weight")
        parts = mx.quantize(packed[name], **FOUR_BITS)
        packed |= dict(zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True))
    assert_same(tmp_path, config, packed, FOUR_BITS, lambda path: FOUR_BITS)


# gpt-oss: three layouts of the same experts.

OSS = tiny_config("gpt_oss") | {"intermediate_size": 64}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


def oss_layouts() -> dict[str, tuple[dict, dict[str, mx.array]]]:
    """The same MXFP4 numbers as the hub has them, as MLX has them, and dequantised."""
    arrays = arrays_of(OSS)
    hub = {name: array for name, array in arrays.items() if ".experts." not in name}
    mlx, dense = dict(hub), dict(hub)
    for layer in range(OSS["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            bias = arrays[f"{path}.{name}_bias"]
            weight, scales = mx.quantize(arrays[f"{path}.{name}"].swapaxes(1, 2), **MXFP4)
            hub[f"{path}.{name}_blocks"] = weight.view(mx.uint8).reshape(*scales.shape, 16)
            hub[f"{path}.{name}_scales"] = scales
            plain = mx.dequantize(weight, scales, **MXFP4, dtype=mx.float32)
            dense[f"{path}.{name}"] = plain.swapaxes(1, 2)
            hub[f"{path}.{name}_bias"] = dense[f"{path}.{name}_bias"] = bias
            rows = {"down_proj": slice(None)}
            if name == "gate_up_proj":
                rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
            for ours, which in rows.items():
                mlx[f"{path}.{ours}.weight"] = weight[:, which]
                mlx[f"{path}.{ours}.scales"] = scales[:, which]
                mlx[f"{path}.{ours}.bias"] = bias[:, which]
    return {
        "hub": (OSS | {"quantization_config": {"quant_method": "mxfp4"}}, hub),
        "mlx": (OSS | {"quantization": MXFP4}, mlx),
        "dense": (OSS, dense),
    }


def test_layouts_of_gpt_oss(tmp_path):
    results = {
        name: logits(load(write(tmp_path / name, config, arrays)))
        for name, (config, arrays) in oss_layouts().items()
    }
    assert (results["hub"] == results["mlx"]).all()
    np.testing.assert_allclose(results["hub"], results["dense"], atol=2e-3)


@pytest.mark.parametrize(
    ("matrix", "stated_mode"),
    [
        ("router", {"mode": "affine"}),
        ("embed_tokens", {}),  # affine, whatever the others are: so mlx-lm writes gpt-oss
    ],
)
def test_a_matrix_at_8_bits_beside_mxfp4_experts(tmp_path, matrix, stated_mode):
    config, arrays = oss_layouts()["mlx"]
    form = {"group_size": 64, "bits": 8, **stated_mode}
    raised = {name: arrays[name] for name in arrays if name.endswith(f"{matrix}.weight")}
    stated = MXFP4 | {name.removesuffix(".weight"): form for name in raised}
    folder = write(tmp_path, config | {"quantization": stated}, arrays | quantized(raised, form))
    exact = logits(load(write(tmp_path / "exact", config, arrays)))
    assert np.abs(logits(load(folder)) - exact).mean() < 0.05


# What does not fit together.


@pytest.mark.parametrize("stated", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 8}])
def test_stated_format_must_fit_the_tensors(tmp_path, stated):
    """What the config says of a layer must be so; what it says of all may have exceptions."""
    config, arrays = tiny_config("qwen3"), quantized(arrays_of(tiny_config("qwen3")), FOUR_BITS)

    def loaded(quantization):
        return load(write(tmp_path, config | {"quantization": quantization}, arrays))

    assert (logits(loaded(stated)) == logits(loaded(FOUR_BITS))).all()
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*shape"):
        loaded(FOUR_BITS | {"model.layers.1.mlp.up_proj": stated})
    with pytest.raises(CheckpointError, match=r"scales.*no quantization"):
        load(write(tmp_path, config, arrays))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight", lambda array: array[:, :5], r"weight.*shape"),
        ("scales", lambda array: array[:, [0, 1, 1]], r"scales.*shape"),
        ("scales", lambda array: array[:, :0], r"scales.*shape"),
        ("weight", lambda array: array.view(mx.int32), r"weight.*uint32"),
    ],
)
def test_arrays_that_no_format_has_are_refused(tmp_path, part, change, said):
    config = tiny_config("qwen3")
    arrays = quantized(arrays_of(config), FOUR_BITS)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    folder = write(
        tmp_path, config | {"quantization": FOUR_BITS}, arrays | {name: change(arrays[name])}
    )
    with pytest.raises(CheckpointError, match=rf"q_proj\.{said}"):
        load(folder)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_format_is_inferred_from_shapes(form):
    weight, scales, *_ = mx.quantize(mx.random.normal((3, 128)), **form)
    integer = scales.dtype == mx.uint8
    result = format_of_shapes(128, weight.shape[1], scales.shape[1], integer_scales=integer)
    assert result == QuantFormat(**form)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_scales_load_exactly(tmp_path, dtype):
    """mlx-community's scales are half precision; on the CPU they become float32."""
    config = tiny_config("qwen3")
    halves = {name: array.astype(getattr(mx, dtype)) for name, array in arrays_of(config).items()}
    assert_same(tmp_path, config, quantized(halves, FOUR_BITS), FOUR_BITS, lambda path: FOUR_BITS)


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
WIDE = {"intermediate_size": 128, "moe_intermediate_size": 64}


@pytest.mark.parametrize("form", [FORMS[2], FORMS[5], FORMS[7]], ids=str)
def test_quantised_latent_attention_loads_as_its_dequantised_weights(tmp_path, form):
    config = tiny_config("deepseek_v3-v4") | LATENT | WIDE
    arrays = quantized(arrays_of(config), form)
    assert "model.layers.0.self_attn.kv_b_proj.scales" in arrays
    assert_same(tmp_path, config, arrays, form, lambda path: form)


@pytest.mark.parametrize("form", [None, FORMS[5]], ids=str)
def test_latent_attention_as_mlx_lm_stores_it(tmp_path, form):
    """Keys and values of a head as two matrices, the one for keys transposed."""
    config = tiny_config("deepseek_v3-v4") | LATENT | WIDE
    arrays = arrays_of(config)
    heads, apart = config["num_attention_heads"], dict(arrays)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.self_attn"
        both = apart.pop(f"{path}.kv_b_proj.weight").reshape(heads, -1, LATENT["kv_lora_rank"])
        keys, values = mx.split(both, [LATENT["qk_nope_head_dim"]], axis=1)
        parts = {"embed_q": keys.swapaxes(1, 2), "unembed_out": values}
        for name, weight in parts.items():
            if form is None:
                apart[f"{path}.{name}.weight"] = mx.contiguous(weight)
                continue
            made = mx.quantize(mx.contiguous(weight), **form)
            for part, array in zip(("weight", "scales", "biases"), made, strict=True):
                apart[f"{path}.{name}.{part}"] = array
            plain = mx.dequantize(*made, **form)
            parts[name] = plain
        if form is not None:
            both = mx.concatenate([parts["embed_q"].swapaxes(1, 2), parts["unembed_out"]], axis=1)
            arrays[f"{path}.kv_b_proj.weight"] = both.flatten(0, 1)
    stated = {} if form is None else {"quantization": form}
    actual = load(write(tmp_path / "apart", config | stated, apart))
    expected = load(write(tmp_path / "joined", config, arrays))
    np.testing.assert_allclose(logits(actual), logits(expected), atol=2e-3)


def test_experts_of_gemma_4_as_mlx_lm_stores_them(tmp_path):
    config = tiny_config("gemma4_text-v4") | {"moe_intermediate_size": 64}
    arrays = arrays_of(config)
    apart = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.experts"
        gate, up = mx.split(arrays[f"{path}.gate_up_proj"], 2, axis=1)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": arrays[f"{path}.down_proj"]}
        apart |= {f"{path}.switch_glu.{name}.weight": part for name, part in parts.items()}
    actual, expected = (
        logits(load(write(tmp_path / name, config, tensors)))
        for name, tensors in (("apart", apart), ("joined", arrays))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)
