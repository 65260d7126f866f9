"""A process whose KV cache is filled once: `python -m benchmarks.filled FOLDER BYTES`.

It prints JSON: the bytes of the process before the model is loaded, and those of the weights.
"""

import json
import resource
import sys
import threading
from pathlib import Path

from benchmarks.blas import preload_openblas
from benchmarks.checkpoints import random_prompt
from benchmarks.processes import RSS_UNIT
from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.session.engine_factory import open_engine
from mlxinfer.session.options import EngineOptions

REQUESTS, ANSWER = 12, 20  # the requests have a fifth more tokens than the KV cache holds


def fill(folder: Path, max_memory: int) -> dict[str, int]:
    """Answer requests that together need more than the KV cache."""
    import mlxinfer.engine.loop  # noqa: F401 - a part of what the process has before the model

    before = RSS_UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = EngineOptions(max_memory=max_memory)
    owner, ended = threading.Event(), threading.Semaphore(0)
    engine, info = open_engine("filled", folder, options, owner=owner)

    def listen(event: TokenEvent) -> None:
        assert event.error is None, event.error
        if event.finish_reason is not None:
            ended.release()

    length = max_memory // info.kv_bytes_per_token // 10 - ANSWER
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    for i in range(REQUESTS):
        prompt = random_prompt(length, info.vocab_size, i)
        engine.submit(Request(str(i), prompt, params), listen)
    for _ in range(REQUESTS):
        ended.acquire()
    engine.close()
    return {"before_bytes": before, "weights_bytes": info.weights_bytes}


if __name__ == "__main__":
    preload_openblas()
    print(json.dumps(fill(Path(sys.argv[1]), int(sys.argv[2]))))
