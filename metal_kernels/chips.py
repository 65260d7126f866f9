"""Apple's chips: cores of the GPU, bandwidth and arithmetic.

MLX tells a chip's name and family, not how many cores it has.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Chip:
    """One of Apple's chips, at its largest and at its smallest configuration of that name."""

    bandwidth: tuple[float, float]  # of unified memory, GB/s, least and most
    cores: tuple[int, int]  # of the GPU, least and most
    core_tflops: float  # 16-bit multiply-adds of one core, in 10^12 operations a second


# Bandwidth and cores: Apple's technical specifications, support.apple.com/specs, and the press
# releases of the chips. Machines report the most cores of M2 Pro (smpanaro/coreml-llm-cli #2), M2
# Max (philipturner/applegpuinfo #10) and M2 Ultra (ggml-org/llama.cpp #1642). Arithmetic of a core:
# 128 lanes x 2 operations x its clock, 1.28 to 1.8 GHz by generation (philipturner/metal-benchmarks
# on GitHub); the matrix units of M5 give 1.5 a core at 16 bits, as measured on the A19
# (github.com/tzakharko/apple-neural-accelerators-benchmark).
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
# Head dims, of keys and values both, for which MLX's fused attention keeps no scores in memory
# (scaled_dot_product_attention.cpp of its Metal backend).
FUSED_DIMS = frozenset({64, 72, 80, 96, 128})
# Others that MLX has fused attention for, and does without by itself, except where it is faster.
FORCED_DIMS = frozenset({192, 256})
# Of chips that are not in the table, by the last letter of MLX's name of the architecture: phones;
# chips without a suffix and Pro, which share a letter; Max; Ultra.
FAMILY_CORES = {"p": 6, "g": 20, "s": 40, "d": 80}


def cores_of(chip: str, architecture: str) -> int:
    """GPU cores of a chip, by its name, or by its family.

    Of several configurations the largest: a split that is too fine costs little.
    """
    known = CHIPS.get(chip.removeprefix("Apple "))
    return known.cores[1] if known else FAMILY_CORES.get(architecture[-1:], FAMILY_CORES["g"])


def this_chip() -> Chip | None:
    """The chip of this machine; None where there is no Metal, or the chip is not in the table."""
    if not mx.metal.is_available():
        return None
    return CHIPS.get(str(mx.device_info().get("device_name", "")).removeprefix("Apple "))


@cache
def gpu_cores() -> int:
    """The cores of this machine; where there is no Metal, those of a small Mac."""
    if not mx.metal.is_available():
        return CHIPS["M4"].cores[1]
    info = mx.device_info()
    return cores_of(str(info.get("device_name", "")), str(info.get("architecture", "")))
