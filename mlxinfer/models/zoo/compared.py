"""Verdicts of comparing mlx-lm's definitions with transformers, and the refusals that follow.

`verdicts.json` is written by `tests/data/zoo/compare.py`. Of each type that both define it says
whether the logits of a tiny random model agree, and which keys of config.json the definition
ignores: a config that sets one of those would load, and answer wrongly. `unsupported.json` has the
types of transformers that do not run, with the reasons. Types of native families are in neither.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModelError

VERDICTS = Path(__file__).with_name("verdicts.json")
UNSUPPORTED = Path(__file__).with_name("unsupported.json")
NOT_COMPARED = "transformers has no such model, so this was not compared with it"


@cache
def verdicts() -> Mapping[str, Any]:
    table: dict[str, Any] = json.loads(VERDICTS.read_text())
    return table


class ZooVerdict(StrEnum):
    """The definition that runs the models of a type."""

    NATIVE = "native"
    COMPARED = "mlx-lm, compared"  # its definition gives transformers' logits
    NOT_COMPARABLE = "mlx-lm, not comparable"  # its definition, which only it can check
    REFUSED = "refused"
    OUT_OF_SCOPE = "out of scope"


@cache
def unsupported() -> Mapping[str, tuple[ZooVerdict, str]]:
    """Types of transformers that do not run: whether refused or out of scope, and why."""
    stated = json.loads(UNSUPPORTED.read_text())
    return {
        kind: (ZooVerdict(verdict), reason)
        for verdict, reasons in stated.items()
        for reason, kinds in reasons.items()
        for kind in kinds
    }


def verdict_of(model_type: str) -> tuple[ZooVerdict, str]:
    """The definition for a type that no native family builds, and why, in words.

    A config of a type that runs may still be refused, see `refuse_wrong`.
    """
    if model_type in unsupported():
        return unsupported()[model_type]
    row = verdicts()["types"].get(model_type)
    if row is None or row["verdict"] == "impossible":
        why = NOT_COMPARED if row is None else "it could not be compared with transformers"
        return ZooVerdict.NOT_COMPARABLE, why
    if row["verdict"] != "agrees":
        return ZooVerdict.REFUSED, f"mlx-lm's definition differs from transformers ({row['why']})"
    return ZooVerdict.COMPARED, f"it agrees with transformers {verdicts()['transformers']}"


def refuse_wrong(config: Mapping[str, Any]) -> None:
    """Refuse a config that mlx-lm's definition is known to get wrong, or that is out of scope."""
    model_type = str(config.get("model_type"))
    row = verdicts()["types"].get(model_type, {})
    theirs = f"mlx-lm's definition of {model_type!r}"
    verdict, why = verdict_of(model_type)
    if verdict is ZooVerdict.OUT_OF_SCOPE or row.get("verdict") == "differs":
        raise UnsupportedModelError(f"The architecture {model_type!r} is {verdict}: {why}.")
    text = config.get("text_config")
    stated = dict(settings({**config, **text} if isinstance(text, dict) else config))
    for key, right in row.get("wrong", {}).items():
        if key in stated and not any(_same(stated[key], value) for value in right):
            instead = f"with {key} = {' or '.join(map(repr, right))}" if right else "without it"
            raise UnsupportedModelError(
                f"{theirs} ignores {key}, which config.json sets to {str(stated[key])[:60]!r}, so "
                f"answers would be wrong; {model_type!r} models {instead} run."
            )


def refuse_unread(config: Mapping[str, Any], fields: Collection[str]) -> None:
    """Refuse a window or a stretched rope that a definition, never compared, cannot know."""
    model_type = str(config.get("model_type"))
    if verdicts()["types"].get(model_type, {}).get("verdict") == "agrees":
        return
    reads = {
        "sliding_window": any("window" in field for field in fields),
        "rope_scaling": not {"rope_scaling", "rope_parameters"}.isdisjoint(fields),
    }
    stated = dict(settings(config))
    for key, is_read in reads.items():
        if key in stated and not is_read:
            raise UnsupportedModelError(
                f"mlx-lm's definition of {model_type!r} does not read {key}, which config.json "
                f"sets to {str(stated[key])[:60]!r}, so answers would be wrong."
            )


def settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that a config states, by key, in either spelling.

    A window that is as long as the context, or is switched off, is not stated, nor is a rope's
    scaling of kind "default".
    """
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    full = rope.get("full_attention", rope)
    old = config.get("rope_scaling")
    scaling = old if isinstance(old, dict) else full
    kind = scaling_kind(scaling)
    for key, value in {**config, **full}.items():
        if key not in ("sliding_window", "rope_scaling") and value is not None:
            yield key, value
    if kind not in ("default", "mrope"):
        yield "rope_scaling", kind
    if _has_window(config):
        yield "sliding_window", config["sliding_window"]


def scaling_kind(rope: Mapping[str, Any]) -> str:
    """The kind of a rope's scaling; ropes of two sets of factors are another kind."""
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in ("longrope", "su") and rope.get("short_factor") != rope.get("long_factor"):
        return "longrope of two sets of factors"
    return kind


def _has_window(config: Mapping[str, Any]) -> bool:
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if type(window) is not int or config.get("use_sliding_window") is False:
        return False
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return False
    context = config.get("max_position_embeddings")
    return not (type(context) is int and window >= context)


def _same(one: Any, other: Any) -> bool:
    """Equal for the comparison, or two names of one activation."""
    names = {"silu", "swish"}, {"gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"}
    if isinstance(one, str):
        return one == other or any({one, other} <= pair for pair in names)
    return bool(one == other)
