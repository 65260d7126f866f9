"""The metadata of one architecture: each field is read, known to be without effect, or refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from ..stored import Array
from .names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

_MAX_LAYERS = 2000


# Fields that change nothing, whatever they say.
_NO_FACT = frozenset(
    [
        "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scale_linear",
        "rope.scaling.original_context_length", "rope.scaling.factor",
        "expert_shared_feed_forward_length", "full_attention_interval", "feed_forward_length",
        "expert_feed_forward_length",  # sizes are those of the tensors
    ]
)  # fmt: skip
_OF_TOWERS = ("vision.", "audio.")  # of a part that is not read, which a warning says
# Fields that change nothing where they say one of these.
_WITHOUT_EFFECT: dict[str, tuple[float | str, ...]] = {
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "nextn_predict_layers": (0,),
    "embedding_length_per_layer_input": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
}


class ArchitectureFields:
    """The metadata of one architecture, read key by key."""

    def __init__(self, metadata: Mapping[str, Any], label: str) -> None:
        self.all = Fields(metadata, label)
        self.architecture = self.all.text("general.architecture")
        self._read: set[str] = set()

    def read(self, *keys: str) -> None:
        """Count fields as read, which change nothing in this architecture."""
        self._read.update(keys)

    def name(self, key: str) -> str:
        """The whole name of a field, which counts as read from here on."""
        self._read.add(key)
        return f"{self.architecture}.{key}"

    @property
    def num_layers(self) -> int:
        """Of the decoder: blocks that predict further ahead lie behind them."""
        name = self.name("block_count")
        count = self.all.integer(name, high=_MAX_LAYERS) - self.count("nextn_predict_layers")
        if count < 1:
            raise CheckpointError(f"{name} in {self.all.where} leaves no layer.")
        return count

    def integer(self, key: str, default: int | None = None) -> int:
        name = self.name(key)
        value = self.all.get(name)
        if isinstance(value, np.ndarray):
            different = np.unique(value).tolist() if value.dtype.kind in "iu" else []
            if len(different) != 1:
                raise UnsupportedModelError(
                    f"{name} in {self.all.where} differs between layers; not supported."
                )
            return Fields({name: different[0]}, self.all.where).integer(name)
        return (
            self.all.integer(name) if default is None else self.all.integer(name, default=default)
        )

    def number(self, key: str, default: float | None = None) -> float | None:
        name = self.name(key)
        return self.all.number(name, above=0.0, default=default)

    def count(self, key: str) -> int:
        return self.all.integer(self.name(key), low=0, default=0)

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        name = self.name(key)
        value = self.all.get(name)
        if not isinstance(value, np.ndarray):
            return [self.all.integer(name, low=0)] * num_layers
        if value.dtype.kind not in "biu" or len(value) < num_layers or value.min() < 0:
            raise CheckpointError(f"{name} in {self.all.where} is not one number for each layer.")
        return [int(number) for number in value[:num_layers]]

    def by_layer_or_none(self, key: str, num_layers: int) -> list[int] | None:
        """An integer for each layer; None where the file has no list of them."""
        is_list = isinstance(self.all.get(f"{self.architecture}.{key}"), np.ndarray)
        return self.by_layer(key, num_layers) if is_list else None

    def numbers(self, key: str, num_layers: int) -> list[float]:
        """A number for each layer, infinite ones too."""
        name = self.name(key)
        values = self.all.get(name)
        if not isinstance(values, np.ndarray) or values.shape != (num_layers,):
            raise CheckpointError(f"{name} in {self.all.where} is not one number for each layer.")
        return [float(value) for value in values]

    def flag(self, key: str, *, default: bool = False) -> bool:
        return self.all.boolean(self.name(key), default=default)

    def has(self, key: str) -> bool:
        """Whether the key is there. It does not count as read."""
        return self.all.get(f"{self.architecture}.{key}") is not None

    def expect(self, key: str, *values: float | str) -> None:
        """Raise UnsupportedModelError where a field is stated and has none of these values."""
        value = self.all.get(self.name(key))
        if value is not None and value not in values:
            raise UnsupportedModelError(
                f"{self.architecture}.{key} in {self.all.where} is {str(value)[:40]}; "
                f"supported: {', '.join(map(str, values))}."
            )

    def check_default(self, key: str, *values: float | str) -> None:
        if key not in self._read:
            self.expect(key, *values)

    def refuse_unread(self, aside: tuple[str, ...] = _OF_TOWERS) -> None:
        """Raise UnsupportedModelError where the architecture has fields that nothing has read.

        Args:
            aside: how fields of parts begin that are not read.
        """
        for key, values in _WITHOUT_EFFECT.items():
            self.check_default(key, *values)
        prefix = f"{self.architecture}."
        unread = sorted(
            name
            for name, value in self.all.values.items()
            if name.startswith(prefix)
            and value is not None
            and not name.removeprefix(prefix).startswith(aside)
            and name.removeprefix(prefix) not in self._read | _NO_FACT
        )
        if unread:
            raise UnsupportedModelError(
                f"{self.all.where} has {', '.join(unread)[:400]}, which the {self.architecture} "
                "architecture is not known to have; not supported."
            )


def check_rope_dims(facts: ArchitectureFields, head_dim: int) -> None:
    dims = facts.integer("rope.dimension_count", head_dim)
    if dims != head_dim:
        raise UnsupportedModelError(
            f"The rope of {facts.all.where} rotates {dims} of {head_dim} dimensions; expected all."
        )


def rope_scaling(
    facts: ArchitectureFields, factors: Mapping[str, Array], head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; `factors` are tensors that stand for it."""
    if (long := factors.get(LONG_FACTORS)) is not None:
        short = factors.get(SHORT_FACTORS, long)
        return {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
        }
    if (divisors := factors.get(ROPE_FACTORS)) is not None:
        return _llama3_scaling(facts, divisors, head_dim)
    # As llama.cpp: linear where no type is stated, with a factor under its older name perhaps.
    kind = facts.all.text(facts.name("rope.scaling.type"), default="linear")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"rope.scaling.type in {facts.all.where} is {kind[:40]!r}; expected linear or yarn."
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        stated = facts.integer("context_length")
        context = facts.integer("rope.scaling.original_context_length", stated)
        scaling["original_max_position_embeddings"] = context
        scaling["beta_fast"] = facts.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = facts.number("rope.scaling.yarn_beta_slow", 1.0)
        if (whole := facts.number("rope.scaling.yarn_attn_factor")) is not None:
            scaling["attention_factor"] = whole
        if (tenth := facts.number("rope.scaling.yarn_log_multiplier")) is not None:
            # A tenth of mscale_all_dim. What divides it, mscale, is the same in published models.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))
    return scaling


def _llama3_scaling(
    facts: ArchitectureFields, factors: Array, head_dim: int
) -> dict[str, Any] | None:
    """Find the settings that give these divisors of the frequencies. Files do not state them.

    Llama 3 (github.com/meta-llama/llama-models, apply_scaling) leaves short waves as they are,
    divides the frequency of long ones by `factor`, and blends in between.
    """
    theta = facts.number("rope.freq_base", 10_000.0)
    assert theta is not None
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or factors.min() < 1.0:
        raise CheckpointError(f"rope_freqs.weight of {facts.all.where} is not as expected.")
    if (factors == 1.0).all():
        return None
    factor = round(float(factors.max()), 4)
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for context in (2**power for power in range(1, 24)):
        smooth = np.clip((context / waves - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise UnsupportedModelError(
        f"rope_freqs.weight of {facts.all.where} is not Llama 3's scaling of any context length."
    )
