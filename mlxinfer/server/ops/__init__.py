"""Paths for those who run a server: health, metrics, models by hand, the documentation."""
