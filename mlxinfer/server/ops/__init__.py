"""Paths for operators: health, metrics, model administration, documentation."""
