"""The changes that llama.cpp's converter makes to tensors, so that they can be undone.

Rows of Q and K of the llama architecture lie in the order of its own rotary embedding, where two
numbers that rotate together are neighbours; transformers has them half a head apart. Value heads of
a Gated DeltaNet that share a key head lie apart; transformers has them side by side. Convolutions
have lost a dimension of 1, decay rates are no logarithms, and some norms include the one that
layers add.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import CheckpointError
from ..stored import Array
from .names import DELTA_NETS

Order = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a stored tensor becomes that of transformers."""

    rows: Order | None = None  # of ours: where they are stored
    columns: Order | None = None
    change: Callable[[Array], Array] | None = None  # of float32 values
    shape: tuple[int, ...] | None = None  # None: as stored


PLAIN = TensorLayout()
HALVES = "gguf_rope_halves"  # in a config: the numbers of a pair are stored half of them apart
_PAIRED = (  # stored as neighbours instead
    "llama", "mistral3", "arcee", "granite", "granite_swa", "granitemoe", "muse-glimmer",
    "smollm3",
)  # fmt: skip
_MAMBA = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_KIMI_DELTAS = ("bailingmoe3", "glm5-next", "kimi-linear")
_LESS_ONE = {  # how the names of norms end that include the one which layers add
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding"), "norm.weight"),
    "muse-glimmer": "layernorm.weight",
    **dict.fromkeys(("minimax-m3", "nemotron", "step35"), "norm.weight"),
}


def layout_of(
    architecture: str, name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> TensorLayout:
    if architecture in _MAMBA:
        return _mamba(name, shape)
    if name.endswith(_LESS_ONE.get(architecture, "\n")):
        return TensorLayout(change=_less_one)
    if architecture in _PAIRED:
        return _llama(name, shape, config)
    if config.get(HALVES) and (".q_proj." in name or ".k_proj." in name):
        return _neighbours(shape, config)
    if architecture in _KIMI_DELTAS:
        return _kimi_delta(name, shape)
    if architecture in DELTA_NETS:
        return _delta_net(architecture, name, shape, config)
    if name.endswith(".conv.conv.weight") and len(shape) == 2:
        return TensorLayout(shape=(shape[0], 1, shape[1]))
    return PLAIN


def part_layout(
    architecture: str, name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> TensorLayout:
    """The layout of Q, K or V where one tensor holds all three; same arguments as `layout_of`."""
    keys = config["num_key_value_heads"] * config["head_dim"]
    ends = np.cumsum([0, shape[0] - 2 * keys, keys, keys]).tolist()
    index = next(i for i, part in enumerate("qkv") if f".{part}_proj." in name)
    begin, end = ends[index], ends[index + 1]
    if min(ends[1], keys) <= 0:
        raise CheckpointError(f"{name} is a part of {shape[0]} rows; expected {2 * keys} and more.")
    layout = layout_of(architecture, name, (end - begin, *shape[1:]), config)
    rows = np.arange(end - begin) if layout.rows is None else layout.rows
    return TensorLayout(rows=begin + rows, change=layout.change)


def _llama(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> TensorLayout:
    keys = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    heads = next((int(config[key]) for part, key in keys.items() if part in name), 0)
    if not heads:
        return PLAIN
    if shape[0] % (2 * heads):
        raise CheckpointError(f"{name} has {shape[0]} rows, which {heads} heads do not share.")
    halves = np.arange(shape[0]).reshape(heads, -1, 2)
    return TensorLayout(rows=halves.swapaxes(1, 2).reshape(-1))


def _mamba(name: str, shape: tuple[int, ...]) -> TensorLayout:
    """Rows of Q and K stay as they lie: there is no rope, or by halves as in transformers."""
    if name.endswith(".A_log"):
        return TensorLayout(change=_log_rate, shape=shape[:1])
    if name.endswith(".conv1d.weight"):
        return TensorLayout(shape=(shape[0], 1, shape[1]))
    if name.endswith(".D"):
        return TensorLayout(shape=shape[:1])
    flat = name.endswith(("mamba.norm.weight", "mixer.norm.weight"))
    return TensorLayout(shape=(prod(shape),)) if flat else PLAIN


def _kimi_delta(name: str, shape: tuple[int, ...]) -> TensorLayout:
    """Convolutions and decay rates have dimensions of 1 around them."""
    if name.endswith(".A_log"):
        return TensorLayout(change=_log_rate, shape=(prod(shape),))
    if name.endswith("_conv1d.weight"):
        return TensorLayout(shape=(prod(shape[:-1]), 1, shape[-1]))
    return PLAIN


def _neighbours(shape: tuple[int, ...], config: Mapping[str, Any]) -> TensorLayout:
    """Rows of heads whose rotated part lies in halves; transformers has pairs of neighbours."""
    dim = int(config["head_dim"])
    rotated = round(dim * config["partial_rotary_factor"])
    halves = np.arange(rotated).reshape(2, -1).T.reshape(-1)
    head = np.concatenate([halves, np.arange(rotated, dim)])
    return TensorLayout(rows=(np.arange(0, shape[0], dim)[:, None] + head).reshape(-1))


def _delta_net(
    architecture: str, name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> TensorLayout:
    part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
    if not part:
        if name.endswith(".ple.conv1d.weight"):
            return TensorLayout(shape=(shape[0], 1, shape[1]))
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            return TensorLayout(shape=(1, *shape))
        return TensorLayout(change=_less_one) if _is_norm(name) else PLAIN
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim = config["linear_value_head_dim"]
    if architecture == "qwen3next" and part in ("in_proj_b.weight", "in_proj_a.weight"):
        kinds = np.arange(shape[0]).reshape(keys, 2, -1)  # of each key head: b, then a
        return TensorLayout(rows=kinds[:, int(part[8] == "a")].reshape(-1))
    tiled = architecture != "qwen3next"
    behind = 2 * keys * config["linear_key_head_dim"]  # queries and keys, as they are
    by_head = _value_order(keys, values, 1, tiled)
    by_value = _value_order(keys, values, dim, tiled)
    behind_keys = np.concatenate([np.arange(behind), behind + by_value])
    layouts = {
        "in_proj_qkv.weight": TensorLayout(rows=behind_keys),
        "in_proj_z.weight": TensorLayout(rows=by_value),
        "in_proj_b.weight": TensorLayout(rows=by_head),
        "in_proj_a.weight": TensorLayout(rows=by_head),
        "dt_bias": TensorLayout(rows=by_head),
        "A_log": TensorLayout(rows=by_head, change=_log_rate),
        "conv1d.weight": TensorLayout(rows=behind_keys, shape=(shape[0], 1, shape[-1])),
        "out_proj.weight": TensorLayout(columns=by_value),
    }
    return layouts.get(part, PLAIN)


def _value_order(keys: int, values: int, dim: int, tiled: bool) -> Order:
    """Stored places of our value heads, which lie side by side where they share a key head.

    `tiled`: stored are the first of each key head, then the second ones, and so on.
    """
    stored = np.arange(values * dim)
    return stored.reshape(-1, keys, dim).swapaxes(0, 1).reshape(-1) if tiled else stored


def _is_norm(name: str) -> bool:
    """Whether layers add one to the weights; of a module that predicts further ahead too."""
    ends = ("", "_embedding", "_hidden", "_key", "_query", "_conv")
    return name.endswith(tuple(f"norm{end}.weight" for end in ends))


def _less_one(values: Array) -> Array:
    return values - np.float32(1.0)


def _log_rate(values: Array) -> Array:
    return np.log(np.abs(values))  # of most families they are negative
