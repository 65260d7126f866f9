"""How a server's memory is divided among its models: weights first, KV caches from the rest.

Knows bytes; no models, no requests. The rules, so that people can do the sum themselves:

- The limit is of weights and KV caches together. By default it is seven tenths of the
  machine's memory; what a step computes with comes on top, for a moment.
- A model with a KV budget of its own gets that.
- If the weights of all models fit together and leave enough, the others share the rest equally, and
  nothing is ever unloaded for want of memory.
- Otherwise models take turns. Each then gets the same share of what the pinned models and the
  largest of the others leave, so that a few of them are there at once.

Budgets depend on the settings alone, never on what was loaded first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidRequestError
from ...memory import KV_SHARE, human_bytes

ENOUGH_SHARE = 1 / 16  # of what a model could have alone: to have less is worse than turns
MIN_KV_BYTES = 8 * 10**6


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one model needs."""

    name: str
    weights_bytes: int
    kv_bytes: int | None = None  # its own budget; None: a share
    pinned: bool = False


def kv_budgets(needs: Sequence[Need], limit_bytes: int) -> dict[str, int]:
    """Bytes of KV cache for each model, by name.

    Raises:
        InvalidRequestError: a model does not fit beside the pinned ones.
    """
    share = _common_share(needs, limit_bytes)
    budgets = {n.name: share if n.kv_bytes is None else n.kv_bytes for n in needs}
    for need in needs:
        taken = sum(n.weights_bytes + budgets[n.name] for n in _beside(needs, need))
        if taken > limit_bytes or (need.kv_bytes is None and share < MIN_KV_BYTES):
            raise _too_large(need, needs, limit_bytes)
    return budgets


def _common_share(needs: Sequence[Need], limit_bytes: int) -> int:
    """Bytes of KV cache for each model without a budget of its own."""
    together = _share(needs, limit_bytes)
    crowds = [_beside(needs, need) for need in needs]
    shares = [_share(c, limit_bytes) for c in crowds if any(n.kv_bytes is None for n in c)]
    alone = min(shares, default=0)
    enough = max(alone * ENOUGH_SHARE, MIN_KV_BYTES)
    return together if together >= enough else int(alone * KV_SHARE)


def _beside(needs: Sequence[Need], one: Need) -> list[Need]:
    """The pinned models and this one, which have to fit into memory together."""
    return [need for need in needs if need.pinned or need is one]


def _share(needs: Sequence[Need], limit_bytes: int) -> int:
    """An equal share of the memory that these models leave; at least 0."""
    sharing = sum(need.kv_bytes is None for need in needs)
    left = limit_bytes - sum(need.weights_bytes + (need.kv_bytes or 0) for need in needs)
    return max(left // max(sharing, 1), 0)


def _too_large(one: Need, needs: Sequence[Need], limit_bytes: int) -> InvalidRequestError:
    others = [need for need in needs if need.pinned and need is not one]
    beside = f" beside the pinned {', '.join(n.name for n in others)}" if others else ""
    taken = sum(need.weights_bytes + (need.kv_bytes or 0) for need in [one, *others])
    return InvalidRequestError(
        f"The model {one.name} does not fit{beside}: weights and KV caches need "
        f"more than {human_bytes(taken)}, and the limit is {human_bytes(limit_bytes)}; raise it "
        "with --max-memory, or take smaller weights.",
        param="max_memory",
    )
