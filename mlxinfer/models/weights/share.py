"""The part of a model that a rank has: its share of heads and columns.

The config of a rank counts what this rank has. Everything else follows: layers ask for tensors in
the sizes of their config, and `RankTensors` cuts these from the stored ones. Pure Python.
"""

from dataclasses import dataclass, field
from typing import Any

from ...errors import UnsupportedModelError
from ..jsonfields import Fields

# Keys of config.json, as families read them. Heads of these must divide evenly:
HEADS = (
    "num_attention_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_n_heads",
    "mamba_n_groups",
)
KV_HEADS = "num_key_value_heads"  # where there are fewer than ranks, several have the same one
COLUMNS = (  # these are cut between groups of quantised weights
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "intermediate_size_mlp",
)
# Of which a rank's tokens are tested to be those of the whole model.
SPLITTABLE = frozenset(
    (
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
        "gpt_oss", "phi3", "mixtral", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v2",
        "deepseek_v3", "kimi_k2", "smollm3", "cohere2", "seed_oss", "ernie4_5", "granite",
        "hunyuan_v1_dense", "ministral3", "mistral4", "exaone4", "nemotron_h", "llama4_text",
        "granite_swa", "granitemoe_swa", "youtu", "youtu_llm", "sarvam_mla", "sarvam_moe",
        "mellum", "dots1", "hy_v3", "afmoe", "exaone_moe", "solar_open", "ernie4_5_moe", "glm",
        "arcee", "cwm", "ministral", "starcoder2", "hunyuan_v1_moe", "cohere2_moe",
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    )
)  # fmt: skip


@dataclass(slots=True)
class Share:
    """Rank `rank` of `size`.

    Attributes:
        counts: into how many equal units something of the model is divided, where it is: a rank
            has consecutive units.
    """

    rank: int
    size: int
    counts: set[int] = field(default_factory=set)

    def span(self, num_units: int) -> tuple[int, int]:
        return num_units * self.rank // self.size, num_units * (self.rank + 1) // self.size

    def cut(self, stored: int, wanted: int) -> int | None:
        """Return where this rank's `wanted` of `stored` numbers begin; None: nowhere."""
        if stored == wanted:
            return 0
        for count in sorted(self.counts):
            first, stop = self.span(count)
            if stored % count == 0 and (stop - first) * (stored // count) == wanted:
                return first * (stored // count)
        copies = stored // wanted if wanted and stored % wanted == 0 else 0
        if copies in self.counts and self.size % copies == 0:  # several ranks have the same
            return self.rank * copies // self.size * wanted
        return None

    def wholes(self, wanted: int) -> list[int]:
        """Return how many numbers all ranks may have, where this rank has `wanted`; 0: impossible.

        In this order: as each of `counts` is divided, then as what several ranks have alike, and
        by themselves.
        """
        counts = []
        for count in sorted(self.counts):
            first, stop = self.span(count)
            fits = stop > first and wanted % (stop - first) == 0
            counts.append(wanted // (stop - first) * count if fits else 0)
        alike = [wanted * n if self.size % n == 0 else 0 for n in sorted(self.counts)]
        return [*counts, *alike, wanted]

    def fields(self, fields: Fields, model_type: str, unit: int) -> Fields:
        """Return the fields of this rank's config.

        Args:
            unit: columns that stay together: the largest group of quantised weights.
        """
        if model_type not in SPLITTABLE:
            raise UnsupportedModelError(
                f"Layers of models of type {model_type!r} cannot be spread over ranks: divide "
                "this one by layers (pipeline), or run it with ranks=1."
            )
        values = dict(fields.values)
        for key in HEADS:
            if type(values.get(key)) is int:
                values[key] = self._heads(key, values[key])
        stated = values.get(KV_HEADS) or fields.values.get("num_attention_heads")
        if type(stated) is int:
            values[KV_HEADS] = self._kv_heads(stated)
        for key in COLUMNS:
            if type(values.get(key)) is int and values[key]:
                values[key] = self._columns(key, values[key], unit)
        return Fields(values, fields.where)

    def _heads(self, key: str, count: int) -> int:
        if count % self.size:
            raise self._indivisible(key, count)
        self.counts.add(count)
        return count // self.size

    def _kv_heads(self, count: int) -> int:
        if count % self.size and self.size % count:
            raise self._indivisible(KV_HEADS, count)
        self.counts.add(count)
        return max(count // self.size, 1)

    def _columns(self, key: str, count: int, unit: int) -> int:
        num_units = count // unit if count % unit == 0 else 0
        if num_units < self.size:
            raise self._indivisible(key, count)
        self.counts.add(num_units)
        first, stop = self.span(num_units)
        return (stop - first) * unit

    def _indivisible(self, key: str, count: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{key} is {count}, which {self.size} ranks cannot share; use a number of ranks that "
            "divides it, or divide the model by layers (pipeline)."
        )


def largest_group(quantization: Any) -> int:
    """Return the largest group of columns that share a scale; 1: nothing is quantised."""
    if quantization is None:
        return 1
    return max(f.group_size for f in (quantization.default, *quantization.by_path.values()))
