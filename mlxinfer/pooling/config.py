"""Pooling, prompts and scores of a checkpoint, read from its small files. No mlx.

The files are sentence-transformers' (modules.json, 1_Pooling/config.json,
sentence_bert_config.json, config_sentence_transformers.json; versions 2 to 6), and the class that
config.json names. Without these files the vectors of an encoder are means over tokens, as in
sentence-transformers, and the vectors of a decoder are of the last token, as in vLLM. Both are
normalised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError, shown, wrong_value
from ..models.jsonfields import Fields, read_json, read_list
from ..models.registry import is_encoder

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_LEGACY_MODES = {  # key of version 2 to 5 -> mode; in the order in which they are put together
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {  # torch's class -> ours
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_CLASSIFIES = "ForSequenceClassification"  # end of the names of transformers' classes
_IGNORED = ("Transformer", "Dropout")
_HEADS = ("pooler.", "classifier.", "pre_classifier.", "head.", "score.", "dense.")
_FRONTS = ("bert.", "roberta.", "xlm_roberta.", "distilbert.", "model.")


class Task(StrEnum):
    """The purpose of a model."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class Head(StrEnum):
    """The way from hidden states to a score."""

    CLASSIFIER = "classifier"  # a network of the checkpoint's own
    TOKENS = "tokens"  # logits of one or two tokens that follow the text


@dataclass(frozen=True, slots=True)
class Module:
    """A module of sentence-transformers behind pooling."""

    kind: str  # "Normalize", "LayerNorm" or "Dense"
    path: str = ""  # its folder, or the path of its weights in the model's own files
    in_dims: int = 0  # of LayerNorm and Dense
    out_dims: int = 0  # of Dense; so are the next
    bias: bool = False
    activation: str = "identity"  # as in `layers.mlp.PLAIN`, or "identity"


NORMALISE = Module("Normalize")  # to length 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The way from hidden states to a vector or a score, and the settings for reading texts."""

    task: Task
    # of `MODES`; the vectors of several modes stand side by side
    modes: tuple[str, ...] = ("mean",)
    modules: tuple[Module, ...] = ()  # modules behind pooling, in order
    pools_prompt: bool = True  # tokens of the prompt count
    # name -> text that stands before the model's input
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # name of the one that is used if nothing is said
    similarity: str = "cosine"  # between two vectors, of `SIMILARITIES`
    max_tokens: int | None = None  # of a text; None: the files do not say
    lowercase: bool = False  # texts are read in lower case
    matryoshka: tuple[int, ...] = ()  # lengths that vectors may be cut to; empty: any
    head: Head | None = None  # of a model that scores
    # of a `TOKENS` head: the first's logit counts, the second's is taken off
    token_ids: tuple[int, int | None] | None = None
    activation: str = "sigmoid"  # of the score, "sigmoid" or "identity"

    def prompt(self, name: str | None, param: str = "prompt_name") -> str:
        """The text of a prompt, of the default one for None; "" where there is none.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "it has none"
            raise InvalidRequestError(
                f"The model has no prompt {shown(name)}; its prompts: {known}.", param=param
            )
        return self.prompts[name]


def read_pooling(folder: Path, name: str = "", task: str = "auto") -> PoolingConfig | None:
    """How the model in a folder pools; None: it generates text.

    Args:
        name: the user's name for it. If no file states the task of a decoder, "rerank" or "embed"
            in the last part of the name does, as in
            `mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ`.
        task: a `Task`, which replaces that of the files; or "auto".

    Raises:
        InvalidRequestError: no such task.
        CheckpointError: a file is broken.
        UnsupportedModelError: a module or a head that is not known here, or none for the task.
    """
    if task not in ("auto", *Task):
        raise wrong_value("task", task, f"auto, {', '.join(Task)}")
    config = _fields(folder / "config.json")
    modules = _modules(folder)
    kind = _task(config, modules, (name, str(folder.resolve()))) if task == "auto" else Task(task)
    if kind is Task.GENERATE:
        return None
    if kind is Task.SCORE:
        return _read_score(folder, config, modules)
    return _read_embed(folder, config, modules)


def _task(config: Fields, modules: list[tuple[str, str]], names: Sequence[str]) -> Task:
    kinds = [kind for kind, _ in modules]
    if "LogitScore" in kinds or classifies(config):
        return Task.SCORE
    bidirectional = config.get("use_bidirectional_attention") is True
    if kinds or bidirectional or is_encoder(config):
        return Task.EMBED
    last = " ".join(_last_parts(names)).lower()
    if "rerank" in last:
        return Task.SCORE
    return Task.EMBED if "embed" in last else Task.GENERATE


def _last_parts(names: Sequence[str]) -> list[str]:
    """`org/model`, and a folder's or a cached repository's name, without what stands before."""
    parts = [name.rstrip("/").split("/")[-1] for name in names]
    cached = [part for name in names for part in name.split("/") if part.startswith("models--")]
    return parts + [part.split("--")[-1] for part in cached]


def head_name(name: str) -> str | None:
    """The name of a tensor of a head behind the model; None: it is of the model."""
    for front in _FRONTS:
        name = name.removeprefix(front)
    return name if name.startswith(_HEADS) else None


def classifies(config: Fields) -> bool:
    classes = config.items("architectures") or []
    return any(
        isinstance(architecture, str) and architecture.endswith(_CLASSIFIES)
        for architecture in classes
    )


def _read_embed(folder: Path, config: Fields, modules: list[tuple[str, str]]) -> PoolingConfig:
    fields = _fields(folder / "config_sentence_transformers.json")
    prompts = fields.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise CheckpointError(f"prompts in {fields.where} is no object of texts.")
    values: dict[str, Any] = {}
    if modules:
        values = _pooling_module(folder, modules)
        values["modules"] = tuple(
            made for kind, path in modules if (made := _module(folder, kind, path)) is not None
        )
    else:
        values["modes"] = ("mean",) if is_encoder(config) else ("lasttoken",)
        values["modules"] = (NORMALISE,)
    default = fields.text("default_prompt_name", default=None)
    lengths = config.items("matryoshka_dimensions") or []
    return PoolingConfig(
        task=Task.EMBED,
        prompts={str(key): text for key, text in prompts.items() if isinstance(text, str)},
        default_prompt=default if default in prompts else None,
        similarity=_similarity(fields),
        matryoshka=tuple(n for n in lengths if type(n) is int and n > 0),
        **values,
        **_reading(folder),
    )


def _read_score(folder: Path, config: Fields, modules: list[tuple[str, str]]) -> PoolingConfig:
    head, token_ids = Head.TOKENS, None
    if classifies(config):
        head = Head.CLASSIFIER
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.integer("num_labels", default=2)
        if count != 1:
            raise UnsupportedModelError(
                f"The model has {count} labels; scores need a model with one, such as "
                "BAAI/bge-reranker-v2-m3."
            )
    elif is_encoder(config):
        raise UnsupportedModelError(
            "The encoder has no classification head, so it cannot score pairs. With task='embed' "
            "it scores them by the similarity of their vectors."
        )
    for kind, path in modules:
        if kind == "LogitScore":
            stated = _fields(folder / path / "config.json")
            no = stated.integer("false_token_id", low=0, default=None)
            token_ids = (stated.integer("true_token_id", low=0), no)
    return PoolingConfig(
        task=Task.SCORE,
        modes=("lasttoken",),
        head=head,
        token_ids=token_ids,
        activation=_score_activation(config),
        **_reading(folder),
    )


def _score_activation(config: Fields) -> str:
    """Of scores, as sentence-transformers' CrossEncoder finds it: a sigmoid unless it is stated."""
    fields = config.fields("sentence_transformers")
    named = fields.text("activation_fn", default=None) if fields is not None else None
    named = named or config.text("sbert_ce_default_activation_function", default=None)
    return "sigmoid" if named is None else _activation(named, config.where)


def _activation(name: str, where: str) -> str:
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The activation in {where} is {name[:60]!r}; supported are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[kind]


def _pooling_module(folder: Path, modules: list[tuple[str, str]]) -> dict[str, Any]:
    places = [path for kind, path in modules if kind == "Pooling"]
    if len(places) != 1:
        raise UnsupportedModelError(
            f"{folder / 'modules.json'} has {len(places)} Pooling modules; supported is one."
        )
    stated = _fields(folder / places[0] / "config.json")
    given = stated.get("pooling_mode")
    modes = tuple(given) if isinstance(given, list) else (given,)
    if given is None:
        modes = tuple(mode for key, mode in _LEGACY_MODES.items() if stated.get(key) is True)
    for mode in modes:
        if mode not in MODES:
            raise UnsupportedModelError(
                f"pooling_mode in {stated.where} is {shown(mode)}; supported are "
                f"{', '.join(MODES)}."
            )
    pools_prompt = stated.boolean("include_prompt", default=True)
    return {"modes": modes or ("mean",), "pools_prompt": pools_prompt}


def _module(folder: Path, kind: str, path: str) -> Module | None:
    if kind == "Normalize":
        return NORMALISE
    if kind == "Dense":
        stated = _fields(folder / path / "config.json")
        if stated.get("use_residual"):
            raise UnsupportedModelError(f"use_residual in {stated.where} is not supported.")
        named = stated.text("activation_function", default="torch.nn.modules.activation.Tanh")
        return Module(
            kind,
            path,
            stated.integer("in_features", high=2**20),
            stated.integer("out_features", high=2**20),
            stated.boolean("bias", default=True),
            _activation(named, stated.where),
        )
    if kind == "LayerNorm":
        stated = _fields(folder / path / "config.json")
        return Module(kind, path, stated.integer("dimension", high=2**20))
    if kind == "Pooling" or kind in _IGNORED:
        return None
    raise UnsupportedModelError(
        f"{folder / 'modules.json'} has a module {kind!r}, which is not supported; supported are "
        "Transformer, Pooling, Dense, LayerNorm, Normalize, Dropout and LogitScore."
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(class, folder) of sentence-transformers' modules, in order; [] where there are none."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    modules = []
    for entry in read_list(path):
        module = Fields(entry if isinstance(entry, dict) else {}, str(path))
        place = module.text("path", default="")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise CheckpointError(f"path in {path} is {place[:60]!r}; expected a folder below it.")
        modules.append((module.text("type").rpartition(".")[2], place))
    return modules


def _reading(folder: Path) -> dict[str, Any]:
    stated = _fields(folder / "sentence_bert_config.json")
    tokenizer = _fields(folder / "tokenizer_config.json")
    limits = [
        stated.get("max_seq_length"),
        tokenizer.get("model_max_length"),  # of some 1e30: none
    ]
    known = [int(n) for n in limits if type(n) in (int, float) and 0 < n < 2**31]
    return {
        "max_tokens": known[0] if known else None,
        "lowercase": stated.boolean("do_lower_case", default=False),
    }


def _similarity(fields: Fields) -> str:
    named = fields.text("similarity_fn_name", default=None) or "cosine"
    if named not in SIMILARITIES:
        raise UnsupportedModelError(
            f"similarity_fn_name in {fields.where} is {named[:40]!r}; supported are "
            f"{', '.join(SIMILARITIES)}."
        )
    return named


def _fields(path: Path) -> Fields:
    return Fields(read_json(path, infinite=True) if path.is_file() else {}, str(path))
