"""Where the matrices of an adapter go: from modules of a checkpoint to projections of the model.

A projection may be several matrices side by side (Q, K and V), have its outputs in another order,
or hold a part of a matrix; and stacks of experts go by several names. `Placement` says it all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedModelError
from ..decoder import Model
from ..registry import family
from ..weights.files import is_expert
from .folder import AdapterFolder, AdapterModule

_ONE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")
_UNGATED = {"up_proj": "fc1", "down_proj": "fc2"}  # as stacks of experts without a gate have them
_HALVES = ("gate_proj", "up_proj")
_BOTH = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class Placement:
    """A module's matrices on one part of a projection."""

    module: AdapterModule  # that has the matrices
    target: int  # index of the projection among the model's
    part: int  # among the projection's sources
    total: int  # outputs of that part's matrix in the checkpoint
    taken: NDArray[np.int32] | None  # which outputs of the module; None: all
    # which outputs of the part's own matrix they are; None: all of them, in order
    put: NDArray[np.int32] | None
    expert: int | None  # the one expert that it is for; None: all, or there are none


@dataclass(frozen=True, slots=True)
class _Spot:
    target: int
    part: int
    total: int  # outputs of the checkpoint's matrix


class Targets:
    """The matrices of a model that adapters may change, by path."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._family = family(model.config.model_type)
        self._spots: dict[str, list[_Spot]] = {}
        for index, target in enumerate(model.adapter_targets):
            for part, source in enumerate(target.sources):
                spot = _Spot(index, part, source.total)
                self._spots.setdefault(source.path, []).append(spot)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._spots)

    def placements(self, adapter: AdapterFolder) -> list[Placement]:
        """Where all matrices of an adapter go, shapes checked."""
        placed: list[Placement] = []
        named: set[str] = set()
        for module in adapter.modules:
            for path, placement in self._of(module, adapter):
                self._check(placement, adapter)
                placed.append(placement)
                named.add(path)
        self._check_complete(adapter, named)
        return placed

    def _of(self, module: AdapterModule, adapter: AdapterFolder) -> Iterator[tuple[str, Placement]]:
        path, expert = self._ours(module.path), None
        one = _ONE_EXPERT.fullmatch(path)
        if one is not None and path not in self._spots:
            path, expert = f"{one[1]}.switch_mlp.{one[3]}", int(one[2])
        choices = self._aliases(path)
        if not choices:
            raise self._no_target(module, path, adapter)
        for name, taken, put in choices:
            for spot in self._spots[name]:
                yield (
                    name,
                    Placement(module, spot.target, spot.part, spot.total, taken, put, expert),
                )

    def _ours(self, path: str) -> str:
        for leaf in (".weight", ""):
            renamed = self._family.tensor_name(f"{path}{leaf}")
            if renamed is not None and renamed.removesuffix(".weight") in self._spots:
                return renamed.removesuffix(".weight")
        renamed = self._family.tensor_name(f"{path}.weight")
        return path if renamed is None else renamed.removesuffix(".weight")

    def _aliases(
        self, path: str
    ) -> list[tuple[str, NDArray[np.int32] | None, NDArray[np.int32] | None]]:
        if path in self._spots:
            return [(path, None, None)]
        block, _, name = path.rpartition(".")
        root = block.removesuffix(".experts").removesuffix(".switch_mlp")
        if root == block:
            return []
        for stack in (f"{root}.switch_mlp", f"{root}.experts"):
            for part in (name, _UNGATED.get(name)):
                if f"{stack}.{part}" in self._spots:
                    return [(f"{stack}.{part}", None, None)]
            if name == _BOTH and f"{stack}.{_HALVES[0]}" in self._spots:
                total = 2 * self._spots[f"{stack}.{_HALVES[0]}"][0].total
                return [(f"{stack}.{half}", self._half(half, total), None) for half in _HALVES]
            if name in _HALVES and f"{stack}.{_BOTH}" in self._spots:
                total = self._spots[f"{stack}.{_BOTH}"][0].total
                return [(f"{stack}.{_BOTH}", None, self._half(name, total))]
        return []

    def _half(self, name: str, total: int) -> NDArray[np.int32]:
        """The outputs of gate or up among those of both."""
        half = self._family.packed_experts.half(_HALVES.index(name), total)
        return np.arange(total, dtype=np.int32)[half]

    def _no_target(
        self, module: AdapterModule, path: str, adapter: AdapterFolder
    ) -> CheckpointError | UnsupportedModelError:
        config = self.model.config
        if path in ("lm_head", "model.embed_tokens"):
            tied = config.tie_word_embeddings
            why = (
                "is tied to the token table" if tied and path == "lm_head" else "is the token table"
            )
            return UnsupportedModelError(
                f"The adapter in {adapter.folder} changes {module.path!r}, which {why} of this "
                "model; that is not supported: leave it out of target_modules."
            )
        if path.endswith(self._family.folded):
            return UnsupportedModelError(
                f"The adapter in {adapter.folder} changes {module.path!r}, which is folded into "
                "attention when the model is loaded and takes no adapter; merge it instead "
                "(`mlxinfer fuse`)."
            )
        if self.model.expert_store is not None and is_expert(f"{path}."):
            return UnsupportedModelError(
                f"The adapter in {adapter.folder} changes {module.path[:200]!r}, and experts that "
                "are read from the disk (expert_memory) take no adapter; merge it instead "
                "(`mlxinfer fuse`)."
            )
        return CheckpointError(
            f"The adapter in {adapter.folder} changes {module.path[:200]!r}, and this model "
            f"({config.model_type}) has no such projection{_made_for(adapter)}."
        )

    def _check(self, placement: Placement, adapter: AdapterFolder) -> None:
        """Raise CheckpointError unless the shapes are those of the projection."""
        module, target = placement.module, self.model.adapter_targets[placement.target]
        outputs = placement.total if placement.put is None else len(placement.put)
        if placement.taken is not None:
            outputs = 2 * len(placement.taken)
        wanted = _shapes(module, target.all_inputs, outputs, target.num_experts, placement.expert)
        if not wanted[0]:
            kind = "a projection" if target.num_experts is None else f"{target.num_experts} experts"
            raise CheckpointError(
                f"{module.path[:200]!r} in {adapter.file} is {kind} in this model, and the "
                f"matrices for it have shapes {module.shapes[0]} and {module.shapes[1]}."
            )
        if module.shapes != wanted:
            raise CheckpointError(
                f"The matrices for {module.path[:200]!r} in {adapter.file} have shapes "
                f"{module.shapes[0]} and {module.shapes[1]}; this model needs {wanted[0]} and "
                f"{wanted[1]}{_made_for(adapter)}."
            )
        if placement.expert is not None and placement.expert >= (target.num_experts or 0):
            raise CheckpointError(
                f"{module.path[:200]!r} in {adapter.file} is for expert {placement.expert}, and "
                f"this model has {target.num_experts}{_made_for(adapter)}."
            )
        if module.magnitude is not None and target.num_experts is not None:
            raise UnsupportedModelError(
                f"The adapter in {adapter.folder} is DoRA on experts ({module.path[:200]!r}), "
                "which is not supported; merge it instead (`mlxinfer fuse`)."
            )

    def _check_complete(self, adapter: AdapterFolder, named: set[str]) -> None:
        """Raise CheckpointError where the adapter should change more of this model than it does."""
        count = self.model.config.num_layers
        for path in self.paths:
            if path not in named and adapter.wants(path, count):
                raise CheckpointError(
                    f"The adapter in {adapter.folder} has no matrices for {path!r}, though its "
                    f"config names it{_made_for(adapter)}."
                )


def _made_for(adapter: AdapterFolder) -> str:
    base = "" if adapter.base is None else f" ({adapter.base[:100]})"
    return f": it was made for another model{base}"


def _shapes(
    module: AdapterModule, in_dims: int, outputs: int, num_experts: int | None, expert: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those that A and B must have; empty ones: these are not matrices for such a projection."""
    r = module.rank
    if module.layout == "mlx" and num_experts is None:
        return (in_dims, r), (r, outputs)
    if module.layout == "stack" and num_experts is not None:
        return (num_experts, r, in_dims), (num_experts, outputs, r)
    if module.layout == "peft" and (num_experts is None) == (expert is None):
        return (r, in_dims), (outputs, r)
    if module.layout == "parameter" and num_experts is not None:
        plain = (num_experts * r, in_dims), (outputs, num_experts * r)
        turned = (num_experts * r, outputs), (in_dims, num_experts * r)
        return turned if module.shapes == turned else plain
    return (), ()


def by_target(placements: Sequence[Placement]) -> dict[int, list[Placement]]:
    by_target_index: dict[int, list[Placement]] = {}
    for placement in placements:
        by_target_index.setdefault(placement.target, []).append(placement)
    return dict(sorted(by_target_index.items()))
