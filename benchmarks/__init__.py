"""Benchmarks of this project's claims; they share helpers with the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the tests' own helpers are found
