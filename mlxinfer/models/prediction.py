"""Multi-token prediction: the head that a checkpoint brings beside its layers.

Two layouts are published. Qwen3-Next and Qwen 3.5 have a module `mtp` of a few layers: its norm
weights are stored less one, also in MLX checkpoints; DeepSeek V3 and GLM 4.5 to 4.7 have one more
layer behind the last one. Sources: vLLM, `qwen3_next_mtp.py` and `deepseek_mtp.py`; both pass on
the model's hidden states behind its last norm.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError, UnsupportedModelError
from ..layers.step import FINAL
from .config import ModelConfig
from .decoder import Model
from .family import PACKED, Family
from .heads import DraftHead, JoinedBlock
from .multimodal import language_name
from .registry import family
from .weights.source import Checkpoint
from .weights.tensors import FLOATS, load_tensors
from .weights.weights import Weights

_MODULE = re.compile(r"^(?:.*\.)?mtp\.(.+)$")


def load_prediction_head(folder: Path, model: Model) -> DraftHead:
    """The head of the checkpoint that a model was loaded from, evaluated and ready.

    Raises:
        InvalidRequestError: the checkpoint has none.
        UnsupportedModelError: it has more than one layer.
        CheckpointError: a tensor is missing, misshapen or left over.
    """
    index = model.config.num_layers
    names = _Names(index)
    weights = Weights(
        Checkpoint(load_tensors(folder), names),
        quantization=model.config.quantization,
        dtype=FLOATS[model.activation_dtype],
    )
    if not names.found:
        raise InvalidRequestError(
            f"speculate is 'mtp', and {folder.name} has no weights that predict several tokens; "
            "conversions by other tools leave them out. Use 'auto', or convert the original "
            "checkpoint with `mlxinfer convert`.",
            param="speculate",
        )
    config = _longer(model.config, sparse=f"model.layers.{index}.mlp.gate.weight" in weights)
    builder: Family = family(config.model_type)(config, weights)
    head = _module(builder, model) if names.in_module else _last_layer(builder, model)
    weights.finish()
    weights.evaluate(head.arrays())
    return head


class _Names:
    """The checkpoint's names of a head as of one more layer; None: another tensor.

    Args:
        index: of that layer.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.found = False
        self.in_module = False

    def __call__(self, name: str) -> str | None:
        layer = f"model.layers.{self._index}."
        module = _MODULE.match(name)
        ours = language_name(name)
        if module is not None:
            ours = f"mtp.{module[1]}"
            self.in_module = True
            if ours.startswith("mtp.layers.") and not ours.startswith("mtp.layers.0."):
                raise UnsupportedModelError(
                    "This checkpoint's `mtp` has several layers; one is supported."
                )
            ours = ours.replace("mtp.layers.0.", layer, 1)
        elif ours is None or not ours.startswith(layer):
            return None
        self.found = True
        return ours + ".weight" if ours.endswith(PACKED) else ours


def _longer(config: ModelConfig, *, sparse: bool) -> ModelConfig:
    """The config with one more layer, which is like the last one that has attention.

    Args:
        config: of the model.
        sparse: whether that layer has experts.
    """
    states = config.states or (None,) * config.num_layers
    last = max(i for i, state in enumerate(states) if state is None)
    more: dict[str, Any] = {
        name: (*values, values[last])
        for name in ("windows", "ropes", "heads", "states")
        if (values := getattr(config, name))
    }
    more["sparse_layers"] = (*(config.sparse_layers or (False,) * config.num_layers), sparse)
    return replace(config, num_layers=config.num_layers + 1, **more)


def _module(builder: Family, model: Model) -> DraftHead:
    """Qwen's module. The norms of its layer are stored less one whatever the model's are."""
    config, hidden = builder.config, builder.config.hidden_size
    builder.norm_offset = 1.0
    block = JoinedBlock(
        builder.norm("mtp.pre_fc_norm_embedding"),
        builder.norm("mtp.pre_fc_norm_hidden"),
        builder.weights.linear("mtp.fc", hidden, 2 * hidden),
        builder.layer(config.num_layers - 1),
    )
    return DraftHead(
        model,
        config,
        taps=(FINAL,),
        block=block,
        norm=builder.norm("mtp.norm"),
    )


def _last_layer(builder: Family, model: Model) -> DraftHead:
    """DeepSeek's layer, with the norm before its logits; the tables are the model's own."""
    config, weights, hidden = builder.config, builder.weights, builder.config.hidden_size
    path = f"model.layers.{config.num_layers - 1}"
    for table in ("embed_tokens", "shared_head.head"):
        weights.drop_below([f"{path}.{table}."])
    block = JoinedBlock(
        builder.norm(f"{path}.enorm"),
        builder.norm(f"{path}.hnorm"),
        weights.linear(f"{path}.eh_proj", hidden, 2 * hidden),
        builder.layer(config.num_layers - 1),
    )
    return DraftHead(
        model,
        config,
        taps=(FINAL,),
        block=block,
        norm=builder.norm(f"{path}.shared_head.norm"),
        chains_normed=False,
    )
