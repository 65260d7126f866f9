"""A checkpoint folder to what a pooling loop runs: a decoder or an encoder, and its pooler.

A pooler makes one vector or score for each row of the hidden states of a pass. Source:
sentence-transformers 6 (its modules Pooling, Dense, LayerNorm, Normalize, LogitScore), and the
heads of transformers' BertForSequenceClassification and its kin. N = rows, d = numbers of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedModelError
from ..layers.linear import Projection
from ..layers.mlp import PLAIN, Activation
from ..layers.norm import LayerNorm
from ..models.config import ModelConfig, load_config
from ..models.decoder import Model
from ..models.jsonfields import read_json
from ..models.language import arrays
from ..models.registry import FAMILIES, SUPPORTED, family
from ..models.weights.source import Checkpoint
from ..models.weights.tensors import FLOATS, load_tensors
from ..models.weights.weights import Weights
from .config import Head, Module, PoolingConfig, head_name
from .segments import RowGroup

Vectors = Callable[[mx.array], mx.array]  # (N, d) -> (N, e)

ACTIVATIONS: dict[str, Activation] = {**PLAIN, "identity": lambda x: x, "sigmoid": mx.sigmoid}
TINY = 1e-12  # least length that a vector is divided by


class Pooler:
    """Pools, then applies what comes behind.

    Args:
        modes: of `config.MODES`; their vectors stand side by side.
        behind: applied one after the other.
    """

    def __init__(self, modes: Sequence[str], behind: Sequence[Vectors]) -> None:
        self._modes = [_MODES[mode] for mode in modes]
        self.behind = list(behind)

    def __call__(
        self, hidden: mx.array, groups: Sequence[RowGroup], num_prompt: Sequence[int]
    ) -> mx.array:
        """hidden (T, hidden_size) of a pass -> (N, d) float32 in the order of its rows.

        Args:
            hidden: behind the last norm.
            num_prompt: (N,) tokens at the beginning of each row that do not count.
        """
        pooled, row = [], 0
        for group in groups:
            states = group.of(hidden).astype(mx.float32)
            skipped = num_prompt[row : row + group.count]
            row += group.count
            pooled.append(self._of_group(states, skipped))
        vectors = mx.concatenate(pooled)
        for module in self.behind:
            vectors = module(vectors)
        return vectors

    def _of_group(self, states: mx.array, skipped: Sequence[int]) -> mx.array:
        """(n, L, hidden) -> (n, modes * hidden)."""
        if len(set(skipped)) > 1:
            count = range(len(skipped))
            pooled = [self._of_group(states[i : i + 1], skipped[i : i + 1]) for i in count]
            return mx.concatenate(pooled)
        vectors = [mode(states, min(skipped[0], states.shape[1] - 1)) for mode in self._modes]
        return mx.concatenate(vectors, axis=-1)


def _scaled_sum(states: mx.array, skipped: int) -> mx.array:
    kept = states[:, skipped:]
    return kept.sum(axis=1) / kept.shape[1] ** 0.5


def _weighted_mean(states: mx.array, skipped: int) -> mx.array:
    weights = mx.arange(skipped + 1, states.shape[1] + 1, dtype=mx.float32)[:, None]
    return (states[:, skipped:] * weights).sum(axis=1) / weights.sum()


_MODES: dict[str, Callable[[mx.array, int], mx.array]] = {
    "cls": lambda states, skipped: states[:, skipped],
    "lasttoken": lambda states, skipped: states[:, -1],
    "max": lambda states, skipped: states[:, skipped:].max(axis=1),
    "mean": lambda states, skipped: states[:, skipped:].mean(axis=1),
    "mean_sqrt_len_tokens": _scaled_sum,
    "weightedmean": _weighted_mean,
}


def normalised(vectors: mx.array) -> mx.array:
    """(N, d) to length 1."""
    lengths = mx.sqrt(mx.square(vectors).sum(axis=-1, keepdims=True))
    return vectors / mx.maximum(lengths, TINY)


class DenseHead:
    """A projection and an activation: (N, d) -> (N, e)."""

    __slots__ = ("activation", "dtype", "projection")

    def __init__(self, projection: Projection, activation: str, dtype: mx.Dtype) -> None:
        self.projection = projection
        self.activation = ACTIVATIONS[activation]
        self.dtype = dtype  # of the projection's weights

    def __call__(self, vectors: mx.array) -> mx.array:
        """(N, d) -> (N, e) float32."""
        return self.activation(self.projection(vectors.astype(self.dtype)).astype(mx.float32))


def token_scores(logits: Vectors, yes: int, no: int | None, dtype: mx.Dtype) -> Vectors:
    """Scores of rows by the logits of tokens that would come next: (N, hidden) -> (N, 1) float32.

    Args:
        logits: (N, hidden) -> (N, vocab).
        yes: token with the logit that counts.
        no: token with the logit that is taken off; None: none is.
    """

    def scores(vectors: mx.array) -> mx.array:
        values = logits(vectors.astype(dtype))
        score = values[:, yes : yes + 1]
        score = score if no is None else score - values[:, no : no + 1]
        return score.astype(mx.float32)

    return scores


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PoolingModel:
    """A model that is ready, and what makes vectors or scores of its hidden states."""

    model: Model
    pooler: Pooler
    config: PoolingConfig
    dim: int  # numbers of a row's vector; 1 of scores

    @property
    def num_bytes(self) -> int:
        behind = [module for module in self.pooler.behind if isinstance(module, DenseHead)]
        return self.model.num_bytes + sum(array.nbytes for array in arrays(behind))


def load_pooling(
    folder: Path,
    pooling: PoolingConfig,
    *,
    dtype: str = "auto",
    watch: Callable[[int, int], None] | None = None,
) -> PoolingModel:
    """The model in a folder, evaluated and ready.

    Args:
        folder: config.json and safetensors, and the folders of sentence-transformers' modules.
        pooling: as `read_pooling` gives it.
        dtype, watch: see `models.load`.

    Raises:
        UnsupportedModelError: no native family builds the model.
        CheckpointError: a file is broken or disagrees with the config.
    """
    config = _config(folder, pooling)
    builder = family(config.model_type)
    tensors = load_tensors(folder)

    def inner_name(name: str) -> str | None:
        if head_name(name) is not None:
            return None
        renamed: str | None = builder.tensor_name(name)
        return renamed

    weights = Weights(
        Checkpoint(tensors, inner_name),
        quantization=config.quantization,
        dtype=dtype,
        fits_float16=builder.fits_float16,
        watch=watch,
    )
    head = Weights(
        Checkpoint(tensors, head_name),
        quantization=config.quantization,
        dtype=FLOATS[weights.dtype],
    )
    del tensors
    model: Model = builder.build(config, weights)
    if pooling.head is None:
        behind, dim = _modules(folder, pooling, model.config, head)
        pooler = Pooler(pooling.modes, behind)
    else:
        pooler, dim = _scorer(pooling, model, head), 1
    mx.eval(list(arrays([module for module in pooler.behind if isinstance(module, DenseHead)])))
    return PoolingModel(model, pooler, pooling, dim)


def _config(folder: Path, pooling: PoolingConfig) -> ModelConfig:
    """The model's config, without an output projection unless scores need it."""
    model_type = read_json(folder / "config.json", infinite=True).get("model_type")
    if isinstance(model_type, str) and model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"The architecture {model_type[:60]!r} gives no embeddings and scores here; those that "
            f"do: {', '.join(FAMILIES)}."
        )
    config = load_config(folder)
    return config if pooling.head is Head.TOKENS else replace(config, without_lm_head=True)


def _modules(
    folder: Path, pooling: PoolingConfig, config: ModelConfig, head: Weights
) -> tuple[list[Vectors], int]:
    """sentence-transformers' modules behind pooling, and the length of what comes out."""
    dim = config.hidden_size * len(pooling.modes)
    behind: list[Vectors] = []
    modules = list(pooling.modules)
    if not any(module.kind == "Dense" for module in modules):
        modules = [*_inner_dense(head, dim), *modules]  # as mlx-embeddings stores them
    for module in modules:
        if module.kind == "Normalize":
            behind.append(normalised)
        elif module.kind == "LayerNorm":
            stored_weights = _own_weights(folder / module.path, head)
            shape = (module.in_dims,)
            weight, bias = (
                stored_weights.take("norm.weight", shape),
                stored_weights.take("norm.bias", shape),
            )
            behind.append(partial(mx.fast.layer_norm, weight=weight, bias=bias, eps=1e-5))
        else:
            stored = (folder / module.path).is_dir()
            stored_weights = _own_weights(folder / module.path, head) if stored else head
            path = "linear" if stored else module.path
            if module.in_dims != dim:
                raise CheckpointError(
                    f"{module.path} expects {module.in_dims} numbers, but gets {dim}."
                )
            projection = stored_weights.linear(
                path, module.out_dims, module.in_dims, bias=module.bias
            )
            behind.append(DenseHead(projection, module.activation, stored_weights.dtype))
            dim = module.out_dims
    return behind, dim


def _inner_dense(head: Weights, dim: int) -> list[Module]:
    """Projections among the model's own tensors: `dense.0.weight` and so on."""
    modules: list[Module] = []
    while (name := f"dense.{len(modules)}") and f"{name}.weight" in head:
        rows = head.shape(f"{name}.weight")[0]
        modules.append(Module("Dense", name, dim, rows, f"{name}.bias" in head, "identity"))
        dim = rows
    return modules


def _own_weights(folder: Path, like: Weights) -> Weights:
    return Weights(Checkpoint(load_tensors(folder)), dtype=FLOATS[like.dtype])


def _scorer(pooling: PoolingConfig, model: Model, head: Weights) -> Pooler:
    modes: tuple[str, ...] = pooling.modes
    if pooling.head is Head.TOKENS:
        assert pooling.token_ids is not None, "which tokens score is known by now"
        yes, no = pooling.token_ids
        steps: list[Vectors] = [token_scores(model.logits, yes, no, model.activation_dtype)]
    else:
        modes, steps = _classifier(model.config, head)
    return Pooler(modes, [*steps, ACTIVATIONS[pooling.activation]])


def _classifier(config: ModelConfig, head: Weights) -> tuple[tuple[str, ...], list[Vectors]]:
    """The classification head that is there, and what it pools by: transformers' four kinds."""
    hidden = config.hidden_size

    def linear(path: str, out_dims: int, activation: str = "identity") -> Vectors:
        bias = f"{path}.bias" in head
        return DenseHead(head.linear(path, out_dims, hidden, bias=bias), activation, head.dtype)

    if "score.weight" in head:  # decoders
        return ("lasttoken",), [linear("score", 1)]
    if "classifier.out_proj.weight" in head:  # RoBERTa
        return ("cls",), [
            linear("classifier.dense", hidden, "tanh"),
            linear("classifier.out_proj", 1),
        ]
    if "pre_classifier.weight" in head:  # DistilBERT
        return ("cls",), [linear("pre_classifier", hidden, "relu"), linear("classifier", 1)]
    if "head.dense.weight" in head:  # ModernBERT
        fields = config.fields
        mode = fields.text("classifier_pooling", default="cls")
        activation = fields.text("classifier_activation", default="gelu")
        if mode not in ("cls", "mean") or activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"The classifier of {fields.where} pools by {mode!r} and has the activation "
                f"{activation!r}; supported are cls or mean, and {', '.join(ACTIVATIONS)}."
            )
        norm = LayerNorm(head.take("head.norm.weight", (hidden,)), config.rms_norm_eps)
        if "head.norm.bias" in head:
            norm.bias = head.take("head.norm.bias", (hidden,))
        return (mode,), [linear("head.dense", hidden, activation), norm, linear("classifier", 1)]
    if "pooler.dense.weight" in head:  # BERT
        return ("cls",), [linear("pooler.dense", hidden, "tanh"), linear("classifier", 1)]
    raise CheckpointError(
        "The checkpoint has no classification head: expected score.weight, classifier.weight, or "
        "classifier.out_proj.weight."
    )
