"""The executable of the bundle; the app is `mlxinfer.app`."""
