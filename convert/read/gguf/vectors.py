"""Models that give vectors: encoders' config.json, and sentence-transformers' modules of any model.

A file states how it pools; llama.cpp brings each vector to length 1.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import save

from ....errors import UnsupportedModelError
from ..source import TensorReader
from .fields import ArchitectureFields
from .parts import Config, Shapes, make_family
from .readers import Entry, GGUFTensor, constant, reader_of

_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type; 0: none
_RANK = 4
VERDICT = "score.weight"
_SCORERS = {  # the last matrix of a head -> the one before it
    VERDICT: None,
    "classifier.out_proj.weight": "classifier.dense.weight",
    "classifier.weight": "head.dense.weight",
}
_DENSE = ("dense_2", "dense_3")  # of EmbeddingGemma, without a bias or an activation
_ST = "sentence_transformers.models"


def is_dense(name: str) -> bool:
    return name.removesuffix(".weight") in _DENSE


def pooling_files(facts: ArchitectureFields, entries: Mapping[str, Entry]) -> dict[str, bytes]:
    """modules.json and the files that it names; empty for a model that generates text."""
    mode = _MODES.get(facts.count("pooling_type"))
    if mode is None:
        return {}
    files = {"1_Pooling/config.json": _dump({"pooling_mode": mode})}
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for entry, array in (entries[f"{n}.weight"] for n in _DENSE if f"{n}.weight" in entries):
        path = f"{len(kinds)}_Dense"
        kinds.append((path, "Dense"))
        sizes = {"in_features": entry.shape[1], "out_features": entry.shape[0], "bias": False}
        activation = "torch.nn.modules.linear.Identity"
        files[f"{path}/config.json"] = _dump({**sizes, "activation_function": activation})
        place = GGUFTensor("linear.weight", array, entry.shape, entry.type)
        values = reader_of(place).values(slice(0, entry.shape[0])).astype(mx.float32)
        files[f"{path}/model.safetensors"] = save({"linear.weight": np.array(values)})
    kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_ST}.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    return {**files, "modules.json": _dump(modules)}


def scoring(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """The fields of config.json for a reranker's classification head; empty without one."""
    kind, labels = facts.count("pooling_type"), facts.name("classifier.output_labels")
    head = next((name for name in _SCORERS if name in shapes), None)
    if kind and kind not in (*_MODES, _RANK):
        raise UnsupportedModelError(
            f"{facts.name('pooling_type')} in {facts.all.where} is {kind}; expected 0 to 4."
        )
    if head is None and kind != _RANK:
        return {}
    before = "" if head is None else _SCORERS[head]
    if before is not None and before not in shapes:
        missing = "cls.weight" if before else "cls.output.weight"
        raise UnsupportedModelError(
            f"{facts.all.where} scores pairs and has no {missing}: llama.cpp's converter leaves "
            "out what some models compute before their scores. Convert the model's folder instead."
        )
    count = 1 if head == VERDICT else shapes[str(head)][0]
    named = facts.all.get(labels)
    known = named if isinstance(named, list) and len(named) == count else ["LABEL_0"] * count
    architecture = re.sub(r"(Model|ForCausalLM)$", "", config["architectures"][0])
    return {
        "architectures": [f"{architecture}ForSequenceClassification"],
        "id2label": {str(index): label for index, label in enumerate(known)},
    }


def verdict(place: GGUFTensor) -> TensorReader:
    """Qwen3-Reranker's rows of "yes" and "no" as one: what the first is more likely by."""
    if place.shape[0] != 2:
        raise place.array.fail(f"has {place.shape[0]} rows; expected those of yes and no")
    rows = reader_of(place).values(slice(0, 2)).astype(mx.float32)
    return constant(place.name, np.array(rows[:1] - rows[1:]))


def _dump(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


# -- config.json ----------------------------------------------------------------------------------


def _types(facts: ArchitectureFields, shapes: Shapes, config: Config) -> int:
    facts.read("token_type_count")
    facts.expect("attention.causal", False)
    return shapes.get("model.token_type_embeddings.weight", (0,))[0]


BERT = make_family("bert", "BertModel", hidden_act="gelu", type_vocab_size=_types)
NOMIC_BERT = make_family("nomic_bert", "NomicBertModel", type_vocab_size=_types)


def modern_bert(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Every few layers, from the first, see all."""
    facts.expect("attention.causal", False)
    facts.expect("hidden_activation", "gelu")
    mode = _MODES.get(facts.count("classifier.pooling_type"), "cls")
    window = facts.integer("attention.sliding_window")
    return make_family("modernbert", "ModernBertModel")(facts, shapes, config) | {
        "hidden_activation": "gelu",
        "classifier_pooling": mode,
        "norm_eps": config.get("layer_norm_eps", config["rms_norm_eps"]),
        "local_attention": window,
        "global_attn_every_n_layers": facts.integer("attention.sliding_window_pattern", 3),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": facts.number("rope.freq_base_swa", 10_000.0),
    }
