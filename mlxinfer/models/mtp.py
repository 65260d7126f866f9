"""The predictor that a checkpoint brings beside its layers: multi-token prediction (MTP).

One network is published under several names. DeepSeek V3, GLM 4.5 to 5.2, Ling 3.0 and Hy3 have
one more layer behind the last one; Qwen3-Next, Qwen 3.5, Mellum 2, EXAONE and MiMo have a module
`mtp`, and ERNIE 4.5 one of other names; Nemotron 3's has a layer for attention and one for experts.
It reads the model's hidden states behind its last norm, and a chain goes on from its own normed
output. Sources: transformers 5.24, `MtpModel`; vLLM, `qwen3_next_mtp.py`, `hy_v3_mtp.py`,
`bailing_moe_v3_mtp.py`, `mimo_v2_mtp.py`, `nemotron_h_mtp.py`; FastDeploy, `ernie4_5_mtp.py`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError
from ..layers.step import FINAL
from .config import SLIDING, ModelConfig
from .decoder import Model
from .experts import PACKED
from .family import Family, MTPForm
from .predictor import JoinedBlock, Predictor, PredictorBlock, StreamBlock, weights_beside
from .registry import family, language_name, layer_ahead, name_ahead

_LAYER = re.compile(r"^(?:mtp\.layers|mtp_block|model\.layers)\.\d+\.")


_PARTS = (  # of a predictor, as other families call them, and as DeepSeek does
    ("mtp.fc.", "eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.norm.", "shared_head.norm."),
    ("mtp_linear_proj.0.", "eh_proj."),
    ("mtp_emb_norm.0.", "enorm."),
    ("mtp_hidden_norm.0.", "hnorm."),
    ("final_layernorm.", "shared_head.norm."),
    ("transformer.shared_head.output.", "shared_head.head."),
    ("transformer.shared_head.", "shared_head."),
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("mtp.", ""),
)


def load_mtp(folder: Path, model: Model) -> Predictor:
    """The predictor of the checkpoint that a model was loaded from, evaluated and ready.

    Of several it is the first, from which a chain of proposals goes on.

    Raises:
        InvalidRequestError: the checkpoint has none, or one that is not read.
        CheckpointError: a tensor is missing, misshapen or left over.
    """
    index, kind = model.config.num_layers, family(model.config.model_type)
    names = _Names(index, max(len(kind.mtp_blocks(model.config)), 1), kind.renamed)
    weights = weights_beside(model, folder, names, model.config.quantization)
    if not names.found:
        raise InvalidRequestError(
            f"speculate is 'mtp', and {folder.name} has no weights that predict several tokens; "
            "conversions by other tools leave them out. Use 'auto', or convert the original "
            "checkpoint with `mlxinfer convert`.",
            param="speculate",
        )
    if kind.mtp is None:
        raise InvalidRequestError(
            f"speculate is 'mtp', and the head of {model.config.model_type} is not read here; use "
            "'auto'.",
            param="speculate",
        )
    sparse = f"model.layers.{index}.mlp.gate.weight" in weights
    config = _longer(model.config, kind.mtp_blocks(model.config), sparse=sparse)
    head = _head(kind(config, weights), kind.mtp, model)
    weights.finish()
    weights.evaluate(head.arrays())
    return head


class _Names:
    """Renames a predictor's tensors to those of further layers; None: not a predictor's."""

    def __init__(self, first: int, count: int, rename: Callable[[str], str | None]) -> None:
        self._first, self._count, self._rename = first, count, rename
        self.found = False

    def __call__(self, name: str) -> str | None:
        place = layer_ahead(name, self._first)
        if place is None or place >= self._count:
            return None
        inner = _LAYER.sub("", name_ahead(name) or language_name(name) or "")
        for theirs, part in _PARTS:
            if inner.startswith(theirs):
                inner = part + inner.removeprefix(theirs)
        self.found = True
        if inner.startswith("shared_head."):  # in the last of the head's layers, or in none
            place = 0
        renamed = self._rename(f"model.layers.{self._first + place}.{inner}")
        return f"{renamed}.weight" if renamed and renamed.endswith(PACKED) else renamed


def _longer(config: ModelConfig, blocks: Sequence[str], *, sparse: bool) -> ModelConfig:
    """The config with the layers of a predictor, which are like the last one that has attention.

    They are like the last one of its kind where `mtp_layer_types` states that.

    Args:
        blocks: what each of these layers is; none: there is one.
    """
    count = max(len(blocks), 1)
    states = config.states or (None,) * config.num_layers
    attending = [i for i, state in enumerate(states) if state is None]
    (kind, *_) = config.fields.items("mtp_layer_types") or (None,)
    alike = [i for i in attending if (config.windows[i] is not None) == (kind == SLIDING)]
    last = max(alike if kind and alike else attending)
    longer: dict[str, Any] = {
        name: (*values, *[values[last]] * count)
        for name in ("windows", "ropes", "query_heads", "heads", "states", "extra_specs")
        if (values := getattr(config, name))
    }
    whole = config.sparse_layers or (False,) * config.num_layers
    longer["sparse_layers"] = (*whole, *[sparse] * count)
    blocks = (*config.blocks, *blocks)
    return replace(config, num_layers=config.num_layers + count, blocks=blocks, **longer)


def _head(builder: Family, form: MTPForm, model: Model) -> Predictor:
    """The predictor as more layers; the tables are the model's own."""
    config, weights, first = builder.config, builder.weights, model.config.num_layers
    path = f"model.layers.{first}"
    for table in ("embed_tokens", "shared_head.head"):
        weights.drop_below([f"{path}.{table}."])
    weights.drop(f"{path}.shared_head.weight")
    if form.norm_offset is not None:
        builder.norm_offset = form.norm_offset
    norm = builder.mtp_norm(path)
    return Predictor(
        model,
        config,
        taps=(first - 1 if form.before_norm else FINAL,),
        block=_block(builder, first),
        norm=model.norm if norm is None else norm,
        chains_normed=not form.before_norm,
    )


def _block(builder: Family, first: int) -> PredictorBlock:
    """The network of the predictor, whose layers are those from `first` on."""
    hidden, linear = builder.config.hidden_size, builder.weights.linear
    path, streams = f"model.layers.{first}", builder.mtp_streams
    layers = [builder.layer(index) for index in range(first, builder.config.num_layers)]
    embedding_norm = builder.norm(f"{path}.enorm")
    hidden_norm = builder.norm(f"{path}.hnorm", streams * hidden)
    if streams == 1:
        proj = linear(f"{path}.eh_proj", hidden, 2 * hidden)
        return JoinedBlock(embedding_norm, hidden_norm, proj, layers)
    of_embedding = linear(f"{path}.fc_embedding", hidden, hidden)
    of_streams = linear(f"{path}.fc_hidden", hidden, hidden)
    (layer,) = layers
    return StreamBlock(embedding_norm, hidden_norm, of_embedding, of_streams, layer)
