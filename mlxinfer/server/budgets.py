"""How the memory of a server is divided among its models.

The rules, so that people can do the sum themselves. Budgets depend on the settings alone, never
on which model was loaded first.

- The limit is of weights and KV caches together. By default it is seven tenths of the machine's
  memory; the arrays of a step come on top, for a moment.
- A model with a KV budget of its own gets that.
- If the weights of all models fit together and leave enough, the others share the rest equally,
  and nothing is ever unloaded for want of memory.
- Otherwise models take turns. Each then gets the same share of what the pinned models and the
  largest of the others leave, so that a few of them are loaded at once.
"""

from collections.abc import Sequence

from ..errors import InvalidRequestError
from ..memory import KV_SHARE, human_bytes
from .slots import ModelSlot

ENOUGH_SHARE = 1 / 16  # of what a model could have alone: to have less is worse than turns
MIN_KV_BYTES = 8 * 10**6


def kv_budgets(slots: Sequence[ModelSlot], limit_bytes: int) -> dict[str, int]:
    """Bytes of KV cache for each model, by name.

    Raises:
        InvalidRequestError: a model does not fit beside the pinned ones.
    """
    share = _common_share(slots, limit_bytes)
    budgets = {n.entry.name: share if n.entry.kv_bytes is None else n.entry.kv_bytes for n in slots}
    for slot in slots:
        taken = sum(n.weights_bytes + budgets[n.entry.name] for n in _beside(slots, slot))
        if taken > limit_bytes or (slot.entry.kv_bytes is None and share < MIN_KV_BYTES):
            raise _does_not_fit(slot, slots, limit_bytes)
    return budgets


def _common_share(slots: Sequence[ModelSlot], limit_bytes: int) -> int:
    """Bytes of KV cache for each model without a budget of its own."""
    together = _share(slots, limit_bytes)
    crowds = [_beside(slots, slot) for slot in slots]
    shares = [_share(c, limit_bytes) for c in crowds if any(n.entry.kv_bytes is None for n in c)]
    alone = min(shares, default=0)
    enough = max(alone * ENOUGH_SHARE, MIN_KV_BYTES)
    return together if together >= enough else int(alone * KV_SHARE)


def _beside(slots: Sequence[ModelSlot], one: ModelSlot) -> list[ModelSlot]:
    """The pinned models and this one, which have to fit into memory together."""
    return [slot for slot in slots if slot.pinned or slot is one]


def _share(slots: Sequence[ModelSlot], limit_bytes: int) -> int:
    """An equal share of the memory that these models leave; at least 0."""
    sharing = sum(slot.entry.kv_bytes is None for slot in slots)
    left = limit_bytes - sum(slot.weights_bytes + (slot.entry.kv_bytes or 0) for slot in slots)
    return max(left // max(sharing, 1), 0)


def _does_not_fit(
    one: ModelSlot, slots: Sequence[ModelSlot], limit_bytes: int
) -> InvalidRequestError:
    others = [slot for slot in slots if slot.pinned and slot is not one]
    beside = f" beside the pinned {', '.join(n.entry.name for n in others)}" if others else ""
    taken = sum(slot.weights_bytes + (slot.entry.kv_bytes or 0) for slot in [one, *others])
    return InvalidRequestError(
        f"The model {one.entry.name} does not fit{beside}: weights and KV caches need "
        f"more than {human_bytes(taken)}, and the limit is {human_bytes(limit_bytes)}; raise it "
        "with --max-memory, or take smaller weights.",
        param="max_memory",
    )
