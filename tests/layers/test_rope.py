"""Published frequencies that the tiny models of `test_parity.py` are too small to have."""

import pytest

from mlxinfer.layers.rope import RopeSpec, inverse_frequencies


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    spec = RopeSpec(dims=128, theta=500_000.0, kind="llama3", factor=8.0, original_context=8192)
    plain = inverse_frequencies(RopeSpec(dims=128, theta=500_000.0))
    scaled = inverse_frequencies(spec)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)
    between = [s / p for s, p in zip(scaled, plain, strict=True) if 0.126 < s / p < 0.999]
    assert between == sorted(between, reverse=True)
    assert len(between) >= 5


def test_yarn_rounds_its_range_only_with_truncate() -> None:
    """The rounding moves single frequencies of gpt-oss by up to 76 %."""
    exact, rounded = (
        inverse_frequencies(
            RopeSpec(
                dims=64, theta=150_000.0, kind="yarn", factor=32.0, original_context=4096,
                truncate=truncate,
            )
        )
        for truncate in (False, True)
    )  # fmt: skip
    off = [abs(r / e - 1) for r, e in zip(rounded, exact, strict=True)]
    assert max(off) == pytest.approx(0.76, abs=0.02)
    assert off.index(max(off)) == 17
    assert off[0] == off[-1] == 0
