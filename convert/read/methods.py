"""Finds the quantisation schemes of a safetensors checkpoint, and a reader for each tensor.

config.json (or quantize_config.json, quant_config.json, hf_quant_config.json) names the schemes.
Arrays are grouped by module, and each scheme claims the arrays that it reads; what is left is dense
or an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ...models.jsonfields import Fields
from ...models.quantization import read_quantization
from .schemes.experts import GPT_OSS, StackedExperts
from .schemes.floats import BLOCK, FP8, fp4_modules, read_block
from .schemes.gptq import AWQ, GPTQ
from .schemes.integers import Integers, groups_of
from .schemes.mimo import ShardedHeads
from .schemes.mlx import MLXModules
from .source import Claim, Leaves, SourceTensor, TensorReader
from .stored import FLOATS, PLAIN, StoredArray, to_mlx

_ACTIVATIONS = frozenset(
    {
        "input_scale", "input_global_scale", "input_zero_point", "output_scale",
        "k_scale", "v_scale", "q_scale", "prob_scale", "activation_scale",
    }
)  # fmt: skip
_IMPLIED = frozenset({"inv_freq", "position_ids"})  # buffers that follow from the config
_COMPANIONS = frozenset(
    {
        "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
        "weight_zero_point", "weight_shape", "weight_packed", "weight_g_idx",
        "qweight", "qzeros", "g_idx",
    }
)  # fmt: skip
_REFUSED = {
    "pre_quant_scale": "multiplies the inputs of its layer",
    "svdquant_lora_a": "adds a low-rank product to its layer",
    "SCB": "belongs to bitsandbytes",
    "qscheme": "belongs to a format that is not known",
}

ACTIVATIONS_NOTE = "Scales of activations and of the KV cache are left out: they are not weights."


def readers_of(
    arrays: Mapping[str, StoredArray], claims: Sequence[Claim]
) -> tuple[dict[str, TensorReader], tuple[str, ...]]:
    """A reader for each tensor, and notes for the user."""
    readers: dict[str, TensorReader] = {}
    notes: dict[str, None] = {}
    for path, leaves in _by_module(arrays).items():
        _refuse(leaves)
        tensor_readers = [reader for claim in claims for reader in claim(path, leaves)]
        for leaf, array in leaves.items():
            if leaf in _ACTIVATIONS:
                notes[ACTIVATIONS_NOTE] = None
            elif leaf in _COMPANIONS:
                raise array.fail("belongs to a quantised matrix that is incomplete")
            elif leaf not in _IMPLIED:
                tensor_readers.append(_plain(array))
        for reader in tensor_readers:
            if reader.info.name in readers:
                raise CheckpointError(f"{reader.info.name!r} is there twice, in two formats.")
            readers[reader.info.name] = reader
    return dict(sorted(readers.items(), key=lambda item: _place(item[1]))), tuple(notes)


def _by_module(arrays: Mapping[str, StoredArray]) -> dict[str, Leaves]:
    modules: dict[str, Leaves] = {}
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        modules.setdefault(path, {})[leaf] = array
    return modules


def _refuse(leaves: Leaves) -> None:
    for leaf, what in _REFUSED.items():
        if leaf in leaves:
            raise UnsupportedModelError(
                f"{leaves[leaf].name!r} {what}, which this conversion does not do; use another "
                "version of the model."
            )


def _plain(array: StoredArray) -> TensorReader:
    if array.dtype not in PLAIN:
        raise array.fail(
            f"is {array.dtype}, but config.json states no quantisation of that kind; expected "
            f"{' or '.join(FLOATS)}"
        )
    dtype, kind = PLAIN[array.dtype], array.dtype.lower()
    info = SourceTensor(array.name, array.shape, dtype, kind, array.num_bytes)
    return TensorReader(info, (array,), lambda rows: to_mlx(array.view(rows), array.dtype))


def _place(reader: TensorReader) -> tuple[str, int]:
    return reader.parts[0].path.name, reader.parts[0].offset


_KEYS = ("quantization", "quantization_config", "compression_config")
_MODELOPT = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8",
    "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageScheme:
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


_STACKS = {  # model_type of the language model -> what MLX calls `experts`, and their order
    "gemma4": ("experts.switch_glu", False),
    "gemma4_text": ("experts.switch_glu", False),
    "llama4_text": ("experts", True),
    "mistral4": ("switch_mlp", False),
    "qwen3_5_moe": ("switch_mlp", False),
    "qwen3_5_moe_text": ("switch_mlp", False),
    "qwen3_vl_moe": ("switch_mlp", True),
    "qwen3_vl_moe_text": ("switch_mlp", True),
}


def _laid_out(text: Mapping[str, Any], block: tuple[int, int]) -> tuple[Claim, ...]:
    name = str(text.get("model_type"))
    if name == "mimo_v2":
        return (ShardedHeads.of(text, block),)
    if name == "gpt_oss":
        return (GPT_OSS,)
    if name not in _STACKS:
        return ()
    switch, inputs_first = _STACKS[name]
    inner = text.get("moe_intermediate_size", text.get("intermediate_size"))
    sizes = [size if type(size) is int else 0 for size in (text.get("hidden_size"), inner)]
    return (StackedExperts(switch, (sizes[0], sizes[1]), inputs_first),)


def choose_method(
    config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]
) -> StorageScheme:
    """The schemes for a checkpoint.

    Args:
        beside: contents of quantize_config.json, quant_config.json and hf_quant_config.json where
            they are; old GPTQ, AWQ and ModelOpt checkpoints describe themselves there.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) and "model_type" in inner else config
    stated = _stated(config, beside)
    block = BLOCK if stated is None else read_block(stated, "weight_block_size")
    experts = _laid_out(text, block)
    if stated is None:
        return StorageScheme("safetensors", (*experts, FP8()))
    name = stated.text("quant_method", default="mlx")
    method = _mlx(stated) if name == "mlx" else _named(name, stated)
    return StorageScheme(method.label, (*experts, *method.claims), method.dtype)


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


def _mlx(stated: Fields) -> StorageScheme:
    quantization = read_quantization(Fields({"quantization": stated.values}, "config.json"))
    assert quantization is not None
    return StorageScheme("MLX", (MLXModules(quantization),))


def _named(name: str, stated: Fields) -> StorageScheme:
    if name == "awq":
        return StorageScheme("AWQ", (AWQ(stated),), "float16")
    if name == "gptq":
        return StorageScheme("GPTQ", (GPTQ(stated),), "float16")
    if name in ("fp8", "fbgemm_fp8"):
        block = read_block(stated, "weight_block_size")
        powers = stated.get("scale_fmt") == "ue8m0"
        return StorageScheme("FP8", (fp4_modules, FP8(block, powers=powers)))
    if name == "compressed-tensors":
        claims = (Integers(stated), fp4_modules, FP8(_block_structure(stated)))
        return StorageScheme("compressed-tensors", claims)
    if name == "modelopt":
        return _modelopt(stated)
    if name == "mxfp4":
        return StorageScheme("MXFP4", ())
    raise UnsupportedModelError(
        f"quant_method in {stated.where} is {name[:40]!r}; expected awq, gptq, fp8, "
        "compressed-tensors, modelopt or mxfp4."
    )


def _block_structure(stated: Fields) -> tuple[int, int]:
    every = [weights for group in groups_of(stated) if (weights := group.fields("weights"))]
    blocks = [block for block in every if block.get("block_structure") is not None]
    return read_block(blocks[0], "block_structure") if blocks else BLOCK


def _modelopt(stated: Fields) -> StorageScheme:
    algorithm = stated.text("quant_algo", default="MIXED_PRECISION")
    if algorithm not in _MODELOPT:
        raise UnsupportedModelError(
            f"quant_algo in {stated.where} is {algorithm[:40]!r}; expected one of "
            f"{', '.join(_MODELOPT)}."
        )
    return StorageScheme("ModelOpt", (fp4_modules, FP8()))
