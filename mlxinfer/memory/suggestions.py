"""Models to begin with, from a small table: their sizes, and which fit a machine. No mlx."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import hub

TABLE = Path(__file__).parent.parent / "assets" / "suggestions.json"
BITS = 4.5  # a parameter of a 4-bit model, scales included
KV_BYTES = 2  # of a number in the KV cache
TASKS = ("chat", "code", "reasoning", "tools", "vision")
SLOW_BYTES = 6e9  # that a token reads: 20 tokens a second at the 120 GB/s of a basic chip
BEGINNING_CONTEXT = 8192  # tokens that fit beside the weights of a model to begin with
BALANCED_CONTEXT = 16384  # tokens
BALANCED_SHARE = 0.8  # of the memory for models; other programs run beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A model of the table."""

    name: str
    source: str
    parameters: float  # all of them
    active: float  # those that a token is computed with
    layers: int  # those whose KV cache grows with the context
    kv_numbers: int  # keys and values of one token in one layer
    context: int  # tokens, of the model
    tasks: list[str]
    weights_bytes: float | None = None

    @property
    def bytes(self) -> int:
        return int(self.parameters * BITS / 8 if self.weights_bytes is None else self.weights_bytes)

    @property
    def read_bytes(self) -> int:
        return int(self.bytes * self.active / self.parameters)

    @property
    def worth(self) -> float:
        """How large a dense model would be as good, by a rule of thumb for mixtures."""
        return float(self.parameters**0.6 * self.active**0.4)

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_numbers * KV_BYTES

    def bytes_at(self, context: int) -> int:
        return self.bytes + min(context, self.context) * self.token_bytes

    def longest_context(self, limit_bytes: int) -> int:
        return max(0, min((limit_bytes - self.bytes) // self.token_bytes, self.context))

    def as_dict(self, limit_bytes: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "parameters": int(self.parameters),
            "active_parameters": int(self.active),
            "weights_bytes": self.bytes,
            "longest_context": self.longest_context(limit_bytes),
            "max_context": self.context,
            "tasks": self.tasks,
            "source": self.source,
            "get": f"mlxinfer pull {self.name}",
        }


def suggestions() -> list[Suggestion]:
    """The models of the table; those on this disk have the size of their files."""
    models = json.loads(TABLE.read_text(encoding="utf-8"))["models"]
    here = {m.name: {"weights_bytes": m.size_bytes} for m in hub.list_models() if m.complete}
    return [Suggestion(**{**model, **here.get(model["name"], {})}) for model in models]


def fitting(limit_bytes: int, context: int, task: str | None = None) -> list[Suggestion]:
    """Models that fit with `context` tokens, the largest first; `task`: good at it."""
    for_task = [s for s in suggestions() if task is None or task in s.tasks]
    return sorted(
        (s for s in for_task if s.bytes_at(context) <= limit_bytes), key=lambda s: -s.bytes
    )


def to_begin_with(limit_bytes: int) -> list[Suggestion]:
    return by_balance(fitting(limit_bytes, BEGINNING_CONTEXT), limit_bytes)


def by_balance(
    suggestions: Sequence[Suggestion], limit_bytes: int, task: str = "chat"
) -> list[Suggestion]:
    """The same models, the best balance first.

    First come those that leave room for 16,384 tokens and for other programs, the best first, but
    large dense ones, which are slow, after the others; then those that leave no room, the smallest
    first. Those that are not good at `task` come after.
    """

    def order(suggestion: Suggestion) -> tuple[bool, bool, bool, float]:
        tight = suggestion.bytes_at(BALANCED_CONTEXT) > BALANCED_SHARE * limit_bytes
        slow = suggestion.read_bytes > SLOW_BYTES
        best = suggestion.bytes if tight else -suggestion.worth
        return task not in suggestion.tasks, tight, slow, best

    return sorted(suggestions, key=order)
