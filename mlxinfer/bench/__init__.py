"""Benchmarks: ratios measured in one run, beside mlx-lm on the same machine and model."""
