"""Damage to files, drawn from a seed: bytes of headers, numbers, values in JSON. No mlxinfer."""

import json
import random
from typing import Any

NUMBERS = (0, 1, 2, 7, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "../x", [], {}, [[]], {"a": 1}, 0, 1, -1, 3, 2**31, 2**63),
    *(10**30, 1e308, -0.5, 0.1, "weight", ["a", 1], [0, 0], [128, 128], [10**9] * 2, "U8"),
)


def mutate_bytes(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four changes, most of them in the header; sometimes the end is cut off."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(1, min(header_bytes, len(damaged) - 8)))
        kind = rng.randrange(6)
        if kind == 0:
            damaged[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[place : place + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
        elif kind == 2:
            damaged[place : place + 4] = (rng.choice(NUMBERS) % 2**32).to_bytes(4, "little")
        elif kind == 3:
            del damaged[place : place + rng.randint(1, 40)]
        elif kind == 4:
            damaged[place:place] = rng.randbytes(rng.randint(1, 40))
        elif len(damaged) > 16:
            del damaged[rng.randrange(16, len(damaged)) :]
    return bytes(damaged)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One to three values anywhere in the tree replaced, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        action = rng.randrange(4)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder[key], int):
            holder[key] = rng.choice(NUMBERS)
        elif action == 2 and isinstance(holder, dict):
            holder[rng.choice(list(holder)) + rng.choice(["", "s", "_"])] = rng.choice(VALUES)
        else:
            holder[key] = rng.choice(VALUES)
    return value


def _places(value: Any) -> Any:
    """Every (container, key) in a tree."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
