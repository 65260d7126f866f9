"""Adapters in PEFT's layout: `adapter_model.safetensors` beside adapter_config.json.

Source: PEFT, `tuners/lora/config.py` (fields), `tuners/lora/layer.py` (scales, `ParamWrapper`),
`utils/save_and_load.py` (names), `tuners/tuners_utils.py` (which modules are meant).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..jsonfields import Fields
from ..weights.files import TensorInfo
from .folder import (
    CONFIG,
    AdapterFolder,
    AdapterModule,
    adapter_identity,
    check_rank,
    checked_headers,
    complete,
    in_layer,
)

_FRONT = "base_model.model."
_TENSOR = re.compile(
    r"(?P<path>.+)\.(?:lora_(?P<part>[AB])(?:\.default)?\.weight"
    r"|lora_(?P<magnitude>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_LAYER = r"(?:.*?\.)?{}\.(\d+)\."  # as PEFT's check_target_module_exists: the first that fits
_STACKS = ("gate_up_proj", "down_proj")  # parameters of experts in transformers, in their order
_MAX_STATED = 2**20  # rank; what matrices may have is `folder.MAX_RANK`
_MAX_PATTERN = 1000  # characters of a regular expression: it is the file's, and may be slow
# Fields that change what is computed, the values that leave it as it is here, and why others fail.
_MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none", None), "biases of the base would change; train with bias='none'"),
    "modules_to_save": ((None, []), "whole modules come with it; merge it with PEFT instead"),
    "lora_bias": ((False, None), "its matrices have biases"),
    "trainable_token_indices": ((None, [], {}), "rows of the token table come with it"),
    "layer_replication": ((None, []), "layers of the base are repeated"),
    "alora_invocation_tokens": ((None, []), "it begins in the middle of a text"),
    "use_qalora": ((False, None), "its inputs are pooled"),
    "arrow_config": ((None,), "it routes between adapters"),
    "megatron_config": ((None,), "it belongs to Megatron's layers"),
    "kasa_config": ((None,), "singular values of the base are left out"),
    "monteclora_config": ((None,), "its matrices are drawn at random"),
    "use_bdlora": ((None, False), "its matrices have blocks"),
    "fan_in_fan_out": ((False, None), "the base's matrices are transposed"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations


def read_peft(file: Path, config: Fields) -> AdapterFolder:
    """The adapter of a folder."""
    check_supported(config)
    headers = checked_headers(file)
    tensors: dict[str, dict[str, str]] = {}
    for name in headers:
        if name.startswith(_FRONT) and name.endswith(".base_layer.weight"):
            continue  # of the base as it is: PEFT saves an output matrix that is not tied with it
        place = _TENSOR.fullmatch(name)
        if place is None or not name.startswith(_FRONT):
            raise _unknown(name, file)
        part = "magnitude" if place["magnitude"] else place["part"].lower()
        path = place["path"].removeprefix(_FRONT)
        if part in tensors.setdefault(path, {}):
            raise CheckpointError(f"{file} has two tensors {part!r} for {path[:200]!r}.")
        tensors[path][part] = name
    modules = _Modules(file, config, headers, tensors)
    sizes = modules.sizes
    kinds = frozenset(map(in_layer, tensors))  # what it has in one layer, it has in all
    return AdapterFolder(
        folder=file.parent,
        file=file,
        kind="DoRA" if sizes.dora else "rsLoRA" if sizes.rooted else "LoRA",
        base=config.text("base_model_name_or_path", default=None),
        modules=modules.all(),
        wants=lambda path, _: modules.targets.include(path) and in_layer(path) in kinds,
        identity=adapter_identity(file),
    )


def check_supported(config: Fields) -> None:
    """Raise UnsupportedModelError for settings that would silently change the answers."""
    kind = str(config.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        raise UnsupportedModelError(
            f"peft_type in {config.where} is {kind[:40]!r}; supported is 'LORA', with DoRA and "
            "rsLoRA."
        )
    for name, (neutral, why) in _MUST_BE.items():
        value = config.get(name)
        if value not in neutral:
            raise UnsupportedModelError(
                f"{name} in {config.where} is {str(value)[:60]}, which is not supported: {why}."
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"init_lora_weights in {config.where} is {start[:40]!r}, which changes the base model; "
            "save the adapter with path_initial_model_for_weight_conversion, as PEFT explains."
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    rank: int
    alpha: float
    ranks: dict[str, Any]
    alphas: dict[str, Any]
    rooted: bool  # rsLoRA (arXiv 2312.03732): the scale is alpha / sqrt(r)
    dora: bool

    @classmethod
    def of(cls, config: Fields) -> "_Sizes":
        ranks, alphas = config.fields("rank_pattern"), config.fields("alpha_pattern")
        return cls(
            rank=config.integer("r", high=_MAX_STATED),
            alpha=config.number("lora_alpha", low=-1e6, high=1e6),
            ranks={} if ranks is None else dict(ranks.values),
            alphas={} if alphas is None else dict(alphas.values),
            rooted=config.boolean("use_rslora", default=False),
            dora=config.boolean("use_dora", default=False),
        )

    def rank_of(self, path: str) -> int:
        rank = _by_pattern(self.ranks, path, self.rank)
        if not 1 <= rank <= _MAX_STATED:
            raise CheckpointError(
                f"rank_pattern in {CONFIG} gives {path[:200]!r} the rank {rank:g}; expected 1 or "
                "more."
            )
        return int(rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = float(_by_pattern(self.alphas, path, self.alpha))
        return alpha / (math.sqrt(rank) if self.rooted else rank)


def _by_pattern(patterns: dict[str, Any], path: str, default: float) -> float:
    """The value of the first pattern that a path ends with, as PEFT's `get_pattern_key` has it."""
    for pattern, value in patterns.items():
        if _compiled(rf"(.*\.)?({pattern})$").match(path):
            if type(value) not in (int, float):
                raise CheckpointError(f"{CONFIG} has {str(value)[:40]!r} for {pattern[:60]!r}.")
            return float(value)
    return default


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        if len(pattern) > _MAX_PATTERN:
            raise re.error("it is too long")
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{CONFIG} has an expression {pattern[:60]!r} that cannot be read: {error}."
        ) from None


@dataclass(frozen=True, slots=True)
class _Targets:
    names: Callable[[str], bool]
    excluded: Callable[[str], bool]
    layers: frozenset[int] | None
    layer_number: tuple[re.Pattern[str], ...]  # where in a path it stands; the first that fits

    @classmethod
    def of(cls, config: Fields) -> "_Targets":
        layers = config.get("layers_to_transform")
        numbers = [layers] if type(layers) is int else config.items("layers_to_transform")
        if not all(type(number) is int for number in numbers or ()):
            raise CheckpointError(
                f"layers_to_transform in {config.where} must be numbers of layers."
            )
        return cls(
            _matcher("target_modules", config),
            _matcher("exclude_modules", config),
            frozenset(numbers) if numbers else None,  # PEFT takes an empty list for none
            tuple(_compiled(_LAYER.format(pattern)) for pattern in _layer_patterns(config)),
        )

    def include(self, path: str) -> bool:
        if self.layers is not None:
            places = (pattern.match(path) for pattern in self.layer_number)
            place = next((number for number in places if number is not None), None)
            if place is None or int(place[1]) not in self.layers:
                return False
        return self.names(path) and not self.excluded(path)


def _layer_patterns(config: Fields) -> list[str]:
    stated = config.get("layers_pattern")
    patterns = [stated] if isinstance(stated, str) else config.items("layers_pattern") or []
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise CheckpointError(f"layers_pattern in {config.where} must be names of lists of layers.")
    return [pattern for pattern in patterns if pattern] or ["[^.]*"]


def _matcher(key: str, config: Fields) -> Callable[[str], bool]:
    stated = config.get(key)
    if stated is None:
        return lambda _: False
    if stated == "all-linear":  # all but the output projection
        return lambda path: not path.endswith(("lm_head", "embed_tokens"))
    if isinstance(stated, str):
        expression = _compiled(stated)
        return lambda path: expression.fullmatch(path) is not None
    names = config.items(key) or []
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} in {config.where} must be names of modules.")
    ends = tuple(f".{name}" for name in names)
    whole = frozenset(names)
    return lambda path: path in whole or path.endswith(ends)


def _unknown(name: str, file: Path) -> CheckpointError | UnsupportedModelError:
    if "lora_embedding_" in name:
        return UnsupportedModelError(
            f"{file} has matrices for the token table ({name[:200]!r}), which is not supported: "
            "leave embed_tokens out of target_modules."
        )
    if not name.startswith(_FRONT) or ".lora_" in name:
        return CheckpointError(
            f"{file} has a tensor {name[:200]!r}; expected {_FRONT}….lora_A.weight and lora_B."
        )
    return UnsupportedModelError(
        f"{file} has a tensor {name[:200]!r}, which is no matrix of low rank: whole modules "
        "(modules_to_save) and biases are not supported; merge it with PEFT instead."
    )


def parameter_names(config: Fields) -> tuple[str, ...]:
    """Parameters, not modules, that are meant: stacks of experts."""
    names = config.items("target_parameters") or []
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"target_parameters in {config.where} must be names of parameters.")
    return tuple(names)


def _parameter_path(path: str, parameters: tuple[str, ...], paths: Collection[str]) -> str | None:
    """The path of the parameter that a wrapper stands for; None: an ordinary module.

    PEFT wraps a module once for each of its parameters that is meant, in their order, so that the
    innermost wrapper, the one with the most `base_layer` in its name, is that of the first.
    """
    depth = 0
    root = path
    while root.endswith(".base_layer"):
        root, depth = root.removesuffix(".base_layer"), depth + 1
    meant = [
        name
        for name in _STACKS
        if any(
            f"{root}.{name}" == parameter or f"{root}.{name}".endswith(f".{parameter}")
            for parameter in parameters
        )
    ]
    if not meant or not root.endswith(".experts"):
        return None
    levels = sum(f"{root}{'.base_layer' * i}" in paths for i in range(len(meant) + 1))
    if levels != len(meant) or depth >= levels:
        raise CheckpointError(
            f"The matrices for {root[:200]!r} are those of {levels} parameters; target_parameters "
            f"in {CONFIG} names {len(meant)} of them."
        )
    return f"{root}.{meant[levels - 1 - depth]}"


class _Modules:
    """Makes modules of the tensors that were found."""

    def __init__(
        self,
        file: Path,
        config: Fields,
        headers: Mapping[str, TensorInfo],
        tensors: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.file = file
        self.sizes = _Sizes.of(config)
        self.targets = _Targets.of(config)
        self._parameters = parameter_names(config)
        self._headers = headers
        self._found = tensors

    def all(self) -> tuple[AdapterModule, ...]:
        """Every module; raises CheckpointError where its tensors are not as the config says."""
        return tuple(self._module(path, parts) for path, parts in self._found.items())

    def _module(self, path: str, parts: Mapping[str, str]) -> AdapterModule:
        a, b = complete(parts, path, self.file)
        shapes = self._headers[a].shape, self._headers[b].shape
        if any(len(shape) != 2 for shape in shapes):
            raise CheckpointError(
                f"The matrices for {path[:200]!r} in {self.file} have shapes {shapes[0]} and "
                f"{shapes[1]}; expected (r, inputs) and (outputs, r)."
            )
        magnitude, dora = parts.get("magnitude"), self.sizes.dora
        if dora != (magnitude is not None):
            raise CheckpointError(
                f"{self.file} {'lacks' if dora else 'has'} DoRA's lengths for {path[:200]!r}, and "
                f"use_dora in {CONFIG} is {str(dora).lower()}."
            )
        parameter = _parameter_path(path, self._parameters, self._found)
        if parameter is not None:
            rank = self.sizes.rank_of(parameter)
            return AdapterModule(
                parameter, rank, self.sizes.scale_of(parameter), a, b, None, "parameter", shapes
            )
        if not self.targets.include(path):
            raise CheckpointError(
                f"{self.file} has matrices for {path[:200]!r}, which target_modules in {CONFIG} "
                "does not name."
            )
        rank = self.sizes.rank_of(path)
        for stored_rank in (shapes[0][0], shapes[1][1]):
            check_rank(stored_rank, rank, path, self.file)
        return AdapterModule(path, rank, self.sizes.scale_of(path), a, b, magnitude, "peft", shapes)
