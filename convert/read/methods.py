"""Which schemes a safetensors checkpoint uses, told by its config files. Knows no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedModelError
from ...models.jsonfields import Fields
from ...models.quantization import read_quantization
from .modules import Claim
from .schemes.awq import AWQ
from .schemes.fp4 import fp4_modules
from .schemes.fp8 import BLOCK, FP8, read_block
from .schemes.gpt_oss import gpt_oss_experts
from .schemes.gptq import GPTQ
from .schemes.integers import Integers
from .schemes.mlx import MLXModules
from .widths import widths_of

_KEYS = ("quantization", "quantization_config", "compression_config")
_MODELOPT = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
)


@dataclass(frozen=True, slots=True)
class Method:
    """How a checkpoint's matrices are stored."""

    label: str  # for people
    claims: tuple[Claim, ...]
    dtype: str = "bfloat16"  # of activations, where the config is silent


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model, had it never been quantised."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    text = plain.get("text_config")
    if isinstance(text, dict):
        plain["text_config"] = without_quantization(text)
    return plain


def choose_method(
    config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]], *, is_here: bool
) -> Method:
    """The schemes for a checkpoint.

    Args:
        config: config.json.
        beside: contents of quantize_config.json, quant_config.json and hf_quant_config.json where
            they are; old GPTQ, AWQ and ModelOpt checkpoints describe themselves there.
        is_here: whether the tensors are on this disk.

    Raises:
        CheckpointError: a description that makes no sense.
        UnsupportedModelError: a method that is not known.
    """
    model_type = config.get("model_type")
    experts: tuple[Claim, ...] = (gpt_oss_experts,) if model_type == "gpt_oss" else ()
    stated = _stated(config, beside)
    if stated is None:
        return Method("safetensors", (*experts, FP8()))
    name = stated.text("quant_method", default="mlx")
    method = _mlx(stated, config) if name == "mlx" else _named(name, stated, is_here=is_here)
    return Method(method.label, (*experts, *method.claims), method.dtype)


def _stated(config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]) -> Fields | None:
    """The description, with quant_method in it unless MLX wrote it."""
    whole = Fields(config, "config.json")
    stated = whole.fields(*_KEYS)
    text = whole.fields("text_config")
    if stated is None and text is not None:
        stated = text.fields(*_KEYS)
    if stated is not None:
        return stated
    for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if file in beside:
            return Fields({"quant_method": method, **beside[file]}, file)
    modelopt = Fields(beside.get("hf_quant_config.json", {}), "hf_quant_config.json")
    inner = modelopt.fields("quantization")
    return Fields({"quant_method": "modelopt", **inner.values}, inner.where) if inner else None


def _mlx(stated: Fields, config: Mapping[str, Any]) -> Method:
    quantization = read_quantization(Fields({"quantization": stated.values}, "config.json"))
    assert quantization is not None
    return Method("MLX", (MLXModules(quantization, widths_of(without_quantization(config))),))


def _named(name: str, stated: Fields, *, is_here: bool) -> Method:
    if name == "awq":
        return Method("AWQ", (AWQ(stated),), "float16")
    if name == "gptq":
        return Method("GPTQ", (GPTQ(stated, is_here=is_here),), "float16")
    if name in ("fp8", "fbgemm_fp8"):
        block = read_block(stated, "weight_block_size")
        return Method("FP8", (FP8(block, powers=stated.get("scale_fmt") == "ue8m0"),))
    if name == "compressed-tensors":
        claims = (Integers(stated), fp4_modules, FP8(_block_structure(stated)))
        return Method("compressed-tensors", claims)
    if name == "modelopt":
        return _modelopt(stated)
    if name == "mxfp4":
        return Method("MXFP4", ())
    raise UnsupportedModelError(
        f"quant_method in {stated.where} is {name[:40]!r}; expected awq, gptq, fp8, "
        "compressed-tensors, modelopt or mxfp4."
    )


def _block_structure(stated: Fields) -> tuple[int, int]:
    groups = stated.fields("config_groups")
    for name in groups.values if groups else ():
        group = groups.fields(name) if groups else None
        weights = group.fields("weights") if group else None
        if weights is not None and weights.get("block_structure") is not None:
            return read_block(weights, "block_structure")
    return BLOCK


def _modelopt(stated: Fields) -> Method:
    algorithm = stated.text("quant_algo", default="MIXED_PRECISION")
    if algorithm not in _MODELOPT:
        raise UnsupportedModelError(
            f"quant_algo in {stated.where} is {algorithm[:40]!r}; expected one of "
            f"{', '.join(_MODELOPT)}."
        )
    return Method("ModelOpt", (fp4_modules, FP8()))
