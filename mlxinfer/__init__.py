"""mlxinfer."""
