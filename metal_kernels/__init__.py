"""Metal kernels, each beside its plain-MLX twin."""
