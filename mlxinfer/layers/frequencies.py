"""The frequencies of rotary position embeddings. Knows no mlx, no model: numbers in, numbers out.

Pair i of a head turns by `position * frequency[i]`; where a context was stretched after training,
the slow pairs turn slower. Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595),
YaRN (2309.00071), and the smoothing that Llama 3.1 published with its weights.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One way to encode positions, as a config states it. Equal specs share their tables."""

    dims: int  # leading dimensions of a head that turn; even
    theta: float = 10000.0
    kind: str = "default"  # "default" | "linear" | "llama3" | "yarn"
    factor: float = 1.0  # how far the context was stretched
    original_context: int = 8192  # tokens the model was first trained with
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: turns over the original context above which a pair is kept
    beta_slow: float = 1.0  # yarn: turns below which a pair is slowed by `factor`
    truncate: bool = True  # yarn: round the range between the two to whole pairs
    attention_factor: float = 1.0  # multiplies what was rotated


def inverse_frequencies(spec: RopeSpec) -> list[float]:
    """Radians per token of each of the `spec.dims // 2` pairs."""
    plain = [spec.theta ** (-2 * i / spec.dims) for i in range(spec.dims // 2)]
    match spec.kind:
        case "linear":
            return [f / spec.factor for f in plain]
        case "llama3":
            return [_llama3(f, spec) for f in plain]
        case "yarn":
            return _yarn(plain, spec)
    assert spec.kind == "default", spec.kind
    return plain


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What YaRN multiplies the rotated queries and keys with, where the config does not say."""
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequency: float, spec: RopeSpec) -> float:
    turns = spec.original_context * frequency / (2 * math.pi)
    if turns < spec.low_freq_factor:
        return frequency / spec.factor
    if turns > spec.high_freq_factor:
        return frequency
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    return (1 - kept) * frequency / spec.factor + kept * frequency


def _yarn(plain: list[float], spec: RopeSpec) -> list[float]:
    low, high = _pair_at(spec.beta_fast, spec), _pair_at(spec.beta_slow, spec)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    width = high - low or 0.001  # the ramp of a single step still needs a slope
    frequencies = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / width, 0.0), 1.0)
        frequencies.append(slowed * f / spec.factor + (1 - slowed) * f)
    return frequencies


def _pair_at(turns: float, spec: RopeSpec) -> float:
    """The (fractional) pair that turns this often over the original context."""
    wavelength = spec.original_context / (turns * 2 * math.pi)
    return spec.dims * math.log(wavelength) / (2 * math.log(spec.theta))
