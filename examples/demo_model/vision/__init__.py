"""Trains `demo-vision`, the bundled model that sees simple drawings."""
