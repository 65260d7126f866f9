"""No regular expression takes long for any text: clients choose texts of many megabytes."""

import importlib
import itertools
import pkgutil
import random
import re
import time
from collections.abc import Iterator

import pytest

import mlxinfer
from mlxinfer import grammar, images, server, session, text

PACKAGES = (grammar, images, server, session, text)
OTHERS = ("history", "errors", "config", "http_json")
NUM_CHARS = 10_000
MAX_S = 0.1  # of CPU time; what grows with the square takes many times as long
SEED = 11
pytestmark = pytest.mark.ci


def modules() -> Iterator[str]:
    yield from (f"{mlxinfer.__name__}.{name}" for name in OTHERS)
    for package in PACKAGES:
        for result in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield result.name


def patterns() -> dict[str, re.Pattern[str]]:
    """Every compiled pattern of a module; those of bytes as patterns of text."""
    patterns: dict[str, re.Pattern[str]] = {}
    for module in modules():
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, re.Pattern):
                is_text = isinstance(value.pattern, str)
                source = value.pattern if is_text else value.pattern.decode("latin-1")
                patterns[f"{module}.{name}"] = re.compile(source, value.flags & ~re.UNICODE)
    return patterns


PATTERNS = patterns()


def hostile(pattern: re.Pattern[str], rng: random.Random) -> Iterator[str]:
    """Long texts of a few characters that the pattern names, over and over."""
    plain = sorted(set(re.sub(r"\\[a-zA-Z]", "", pattern.pattern)) | set("a1 -"))
    pairs = list(map("".join, itertools.permutations(plain, 2)))
    pieces = [*plain, *rng.sample(pairs, min(len(pairs), 80)), "$|", "[?", "(^", ";", "\\"]
    for piece in pieces:
        body = piece * (NUM_CHARS // len(piece))
        yield body
        yield rng.choice(["data:", "$", "(", "[", "https://", "\\", ""]) + body + "\0"


@pytest.mark.alike
@pytest.mark.parametrize("name", PATTERNS)
def test_no_text_keeps_a_pattern_busy(name: str) -> None:
    pattern, rng = PATTERNS[name], random.Random(SEED)
    for result in hostile(pattern, rng):
        for use in (pattern.fullmatch, pattern.search, pattern.findall):
            began = time.process_time()
            use(result)
            took = time.process_time() - began
            assert took < MAX_S, (SEED, use.__name__, result[:40])
