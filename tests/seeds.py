"""Random numbers of a test: others in each run, and the same again by the seed."""

import os
import random


def seeded() -> random.Random:
    """A generator by MLXINFER_SEED, else by a new seed; pytest shows it where the test fails."""
    seed = int(os.environ.get("MLXINFER_SEED") or random.randrange(2**32))
    print(f"MLXINFER_SEED={seed}")
    return random.Random(seed)
