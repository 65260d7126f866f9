"""Any checkpoint in, a verified MLX folder out, one tensor group at a time."""
