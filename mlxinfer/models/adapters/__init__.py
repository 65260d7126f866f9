"""Adapters: folders of PEFT and of mlx-lm, read with care and put on a model's projections."""
