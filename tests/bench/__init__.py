"""What our claims rest on, measured: `python -m tests.bench`."""
