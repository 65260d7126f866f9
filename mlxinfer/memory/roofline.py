"""How fast a Mac can be at most with a model: an estimate from its memory bandwidth and arithmetic.

Each token of an answer reads its weights, the KV cache and the states once. So no answer is faster
than bandwidth / bytes. Each token of a prompt costs two operations a weight. So no prompt is faster
than arithmetic / operations (Williams, Waterman, Patterson: Roofline, CACM 2009). Nothing here was
measured: programs reach a part of it, see docs/benchmarks.md.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..cache_specs import StateSpec
from ..errors import InvalidRequestError, shown
from ..metal_kernels.chips import CHIPS, Chip
from ..models.language import LanguageConfig
from . import MODELS_SHARE
from .fit import fit_of, kv_bytes

CHIP = r"(?:apple[\s-]*)?(?P<chip>m\d+)(?:[\s-]*(?P<kind>pro|max|ultra))?"
MEMORY = r"[\s,/(-]*(?<!\d)(?P<memory>\d{1,5})\s*(?:gi?b?)?\)?(?:\s+(?:ram|memory))?"
MACHINE = re.compile(rf"{CHIP}(?:{MEMORY})?", re.I)


@dataclass(frozen=True, slots=True)
class Machine:
    """A Mac: its chip and its memory."""

    name: str
    chip: Chip
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and multiplications that one token of a model takes, at batch one."""

    weight_bytes: int  # that each token of an answer reads
    weights: int  # that it is multiplied by


def machine(text: str) -> Machine:
    """A machine from words such as "M4 Max 64GB".

    Raises:
        InvalidRequestError: an unknown chip, or no memory.
    """
    match = MACHINE.fullmatch(" ".join(text.split()))
    name = f"{match['chip']} {match['kind'] or ''}".strip().title() if match else ""
    if match is None or name not in CHIPS:
        known = ", ".join(CHIPS)
        raise InvalidRequestError(
            f"{shown(text)} is no chip with its memory such as 'M4 Max 64GB', or one with "
            f"specifications that are not known here. Known are {known}.",
            param="on",
        )
    if not int(match["memory"] or 0):
        raise InvalidRequestError(
            f"{shown(text)} names no memory: say how much, such as '{name} 64GB'.", param="on"
        )
    memory = int(match["memory"])
    return Machine(f"{name} {memory} GB", CHIPS[name], memory << 30)


def estimate(
    config: LanguageConfig,
    weights_bytes: int,
    work: Work,
    mac: Machine,
    context: int,
    *,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The verdict for a machine, and its limits of speed at a context, as plain data.

    `folder`: see `fit_of`.

    Returns:
        `fit`: see `Fit.as_dict`. `decode_tokens_per_s` and `prefill_tokens_per_s`: the limits of
        one answer and of one prompt, for the smallest and the largest chip of that name.
    """
    specs = map(config.cache_spec, range(len(config.windows)))
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    state_bytes = sum(prod(shape) * 4 for spec in states for shape, _ in spec.shapes)
    moved = work.weight_bytes + kv_bytes(config, context) + 2 * state_bytes  # read and written
    rates = [bandwidth * 1e9 / moved for bandwidth in mac.chip.bandwidth]
    limit_bytes = int(MODELS_SHARE * mac.memory_bytes)
    flops = [cores * mac.chip.core_tflops * 1e12 for cores in mac.chip.cores]
    return {
        "machine": mac.name,
        "context": context,
        "bytes_per_token": moved,
        "decode_tokens_per_s": [round(rate, 1) for rate in rates],
        "prefill_tokens_per_s": [round(bandwidth / (2 * work.weights)) for bandwidth in flops],
        "fit": fit_of(config, weights_bytes, limit_bytes, folder=folder).as_dict(),
    }
