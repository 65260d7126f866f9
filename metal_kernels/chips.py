"""GPU cores of Apple's chips. MLX tells a chip's name and family, not how many cores it has."""

from functools import cache

import mlx.core as mx

# Of the largest configuration sold under a name: a split that is too fine costs little.
CORES = {
    # github.com/wenerme/wener, notes/platform/apple; Max also ollama #373, Ultra (48 or 64) also
    # philipturner/applegpuinfo #1
    "Apple M1": 8,
    "Apple M1 Pro": 16,
    "Apple M1 Max": 32,
    "Apple M1 Ultra": 64,
    "Apple M2": 10,  # comparemela.com on Gurman's developer source, 2022; no spec sheet was read
    "Apple M2 Pro": 19,  # smpanaro/coreml-llm-cli #2, as a machine reports it
    "Apple M2 Max": 38,  # philipturner/applegpuinfo #10, as a machine reports it
    "Apple M2 Ultra": 76,  # ggml-org/llama.cpp #1642, as a machine reports it
    # tellforceblog.com and pcextreme.com.br (after AnandTech) on the launch, October 2023
    "Apple M3": 10,
    "Apple M3 Pro": 18,
    "Apple M3 Max": 40,
    "Apple M3 Ultra": 80,  # bgr.com on the launch, 2025-03-05
    # neowin.net on the launch, 2024-10-30
    "Apple M4": 10,
    "Apple M4 Pro": 20,
    "Apple M4 Max": 40,
    "Apple M5": 10,  # tomshardware.com on the launch, October 2025
    # mikeshouts.com and pepelac.news on the launch, March 2026
    "Apple M5 Pro": 20,
    "Apple M5 Max": 40,
}
# Of chips that are not in the table, by the last letter of MLX's name of the architecture: phones;
# chips without a suffix and Pro, which share a letter; Max; Ultra.
FAMILY_CORES = {"p": 6, "g": 20, "s": 40, "d": 80}


def cores_of(chip: str, architecture: str) -> int:
    """GPU cores of a chip, by its name, or by its family."""
    return CORES.get(chip) or FAMILY_CORES.get(architecture[-1:], FAMILY_CORES["g"])


@cache
def gpu_cores() -> int:
    """Of this machine; where there is no Metal, of a small Mac."""
    if not mx.metal.is_available():
        return CORES["Apple M4"]
    info = mx.device_info()
    return cores_of(str(info.get("device_name", "")), str(info.get("architecture", "")))
