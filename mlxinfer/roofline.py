"""How fast a Mac can be at most with a model: an estimate from its memory bandwidth and arithmetic.

Each token of an answer reads the weights it is computed with, the KV cache and the states once, so
no answer is faster than bandwidth / bytes; each token of a prompt costs two operations a weight, so
no prompt is faster than arithmetic / operations (Williams, Waterman, Patterson: Roofline, CACM
2009). Nothing here was measured: programs reach a part of it, see docs/benchmarks.md.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .core import StateSpec
from .errors import InvalidRequestError
from .fit import fit_of, kv_bytes
from .memory import MODELS_SHARE, parse_bytes
from .models.decoder import LanguageConfig


@dataclass(frozen=True, slots=True)
class Chip:
    """One of Apple's chips, at its largest and at its smallest configuration of that name.

    Attributes:
        bandwidth: of unified memory, GB/s, least and most.
        cores: of the GPU, least and most.
        core_tflops: 16-bit multiply-adds of one core, in 10^12 operations a second.
    """

    bandwidth: tuple[float, float]
    cores: tuple[int, int]
    core_tflops: float


# Bandwidth and cores: Apple's technical specifications, support.apple.com/specs, and the press
# releases of the chips. Arithmetic of a core: 128 lanes x 2 operations x its clock, 1.28 to 1.8 GHz
# by generation (github.com/philipturner/metal-benchmarks); the matrix units of M5 give 1.5 a core
# at 16 bits, as measured on the A19 (github.com/tzakharko/apple-neural-accelerators-benchmark).
M1, M2, M3, M4, M5 = 0.33, 0.36, 0.36, 0.46, 1.5
CHIPS = {
    "M1": Chip((68, 68), (7, 8), M1),
    "M1 Pro": Chip((200, 200), (14, 16), M1),
    "M1 Max": Chip((400, 400), (24, 32), M1),
    "M1 Ultra": Chip((800, 800), (48, 64), M1),
    "M2": Chip((100, 100), (8, 10), M2),
    "M2 Pro": Chip((200, 200), (16, 19), M2),
    "M2 Max": Chip((400, 400), (30, 38), M2),
    "M2 Ultra": Chip((800, 800), (60, 76), M2),
    "M3": Chip((100, 100), (8, 10), M3),
    "M3 Pro": Chip((150, 150), (14, 18), M3),
    "M3 Max": Chip((300, 400), (30, 40), M3),
    "M3 Ultra": Chip((819, 819), (60, 80), M3),
    "M4": Chip((120, 120), (8, 10), M4),
    "M4 Pro": Chip((273, 273), (16, 20), M4),
    "M4 Max": Chip((410, 546), (32, 40), M4),
    "M5": Chip((153, 153), (8, 10), M5),
    "M5 Pro": Chip((307, 307), (16, 20), M5),
    "M5 Max": Chip((460, 614), (32, 40), M5),
}
MACHINE = re.compile(r"(?:apple\s+)?(m\d+(?:\s+(?:pro|max|ultra))?)[\s,]+(\d+)\s*(gb)?", re.I)


@dataclass(frozen=True, slots=True)
class Machine:
    """A Mac: its chip and its memory."""

    name: str
    chip: Chip
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a token of a model is computed with, at batch one.

    Attributes:
        weight_bytes: that each token of an answer reads.
        weights: that it is multiplied by.
    """

    weight_bytes: int
    weights: int


def machine(text: str) -> Machine:
    """A machine from words such as "M4 Max 64GB".

    Raises:
        InvalidRequestError: an unknown chip, or no memory.
    """
    found = MACHINE.fullmatch(text.strip())
    name = " ".join(found[1].split()).title() if found else ""
    if found is None or name not in CHIPS:
        known = ", ".join(CHIPS)
        raise InvalidRequestError(
            f"{text[:60]!r} is no chip with its memory such as 'M4 Max 64GB'. Known are {known}.",
            param="on",
        )
    return Machine(f"{name} {found[2]} GB", CHIPS[name], parse_bytes(f"{found[2]}GiB"))


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

    `folder`: as of `fit_of`.

    Returns:
        `fit`: as of `Fit.as_dict`. `decode_tokens_per_s` and `prefill_tokens_per_s`: the limits of
        one answer and of one prompt, for the smallest and the largest chip of that name.
    """
    states = [spec for spec in _specs(config) if isinstance(spec, StateSpec)]
    state_bytes = sum(prod(shape) * 4 for spec in states for shape, _ in spec.shapes)
    moved = work.weight_bytes + kv_bytes(config, context) + 2 * state_bytes  # read and written
    rates = [each * 1e9 / moved for each in mac.chip.bandwidth]
    limit_bytes = int(MODELS_SHARE * mac.memory_bytes)
    flops = [cores * mac.chip.core_tflops * 1e12 for cores in mac.chip.cores]
    return {
        "machine": mac.name,
        "context": context,
        "bytes_per_token": moved,
        "decode_tokens_per_s": [round(rate, 1) for rate in rates],
        "prefill_tokens_per_s": [round(each / (2 * work.weights)) for each in flops],
        "fit": fit_of(config, weights_bytes, limit_bytes, folder=folder).as_dict(),
    }


def _specs(config: LanguageConfig) -> list[Any]:
    return [config.cache_spec(index) for index in range(len(config.windows))]
