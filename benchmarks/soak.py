"""`bench soak`: what one process holds while mixed requests come for a long time.

Each client asks for answers of mixed lengths to prompts of mixed lengths, one after the other. Some
prompts are earlier ones again, and some requests are cancelled. The KV cache is small, so that it
is full soon. If memory leaks, later samples are larger than earlier ones even then.
"""

import asyncio
import os
import random
import subprocess
import time
from itertools import count
from pathlib import Path

import mlx.core as mx

from benchmarks.checkpoints import random_prompt
from mlxinfer import LLM
from mlxinfer.bench.report import Report, Table

SAMPLES = 10
MAX_MEMORY = 32 << 20  # bytes of the KV cache
KINDS = {"active_bytes": mx.get_active_memory, "cache_bytes": mx.get_cache_memory}
Sample = dict[str, float]


def resident_bytes() -> int:
    """The memory of this process, as the system counts it."""
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    return int(subprocess.run(command, capture_output=True, check=True).stdout) * 1024


async def ask(llm: LLM, client: int, until_s: float, answered: list[int]) -> None:
    """Requests of one client, one after the other."""
    rng = random.Random(client)
    vocab = llm.model_info.vocab_size
    for turn in count():
        if time.monotonic() > until_s:
            return
        seed = rng.randrange(20) if rng.random() < 0.5 else 1000 * client + turn
        ids = random_prompt(rng.choice([8, 40, 150, 400]), vocab, seed)
        answer = llm.agenerate(ids, max_tokens=rng.choice([1, 20, 80]), temperature=0.7)
        leaves_s = rng.random() if rng.random() < 0.1 else None
        try:
            await asyncio.wait_for(answer, leaves_s)
        except TimeoutError:
            continue
        answered[client] += 1


async def soak(llm: LLM, seconds: float, clients: int) -> list[Sample]:
    """Samples at equal distances, the first at the end of the first distance."""
    begun_s = time.monotonic()
    answered, samples = [0] * clients, []
    tasks = [asyncio.create_task(ask(llm, i, begun_s + seconds, answered)) for i in range(clients)]
    for number in range(1, SAMPLES + 1):
        await asyncio.sleep(max(begun_s + number * seconds / SAMPLES - time.monotonic(), 0))
        sample = {"seconds": time.monotonic() - begun_s, "requests": sum(answered)}
        sample |= {name: held() for name, held in KINDS.items()}
        samples.append(sample | {"resident_bytes": await asyncio.to_thread(resident_bytes)})
    await asyncio.gather(*tasks)
    return samples


def table(samples: list[Sample]) -> Table:
    """A row for each sample."""
    columns = ["minute", "requests", "process (MB)", "MLX's arrays (MB)", "freed buffers (MB)"]
    names = ("resident_bytes", "active_bytes", "cache_bytes")
    rows = [
        [
            f"{sample['seconds'] / 60:.1f}",
            f"{sample['requests']:.0f}",
            *(f"{sample[name] / 1e6:.1f}" for name in names),
        ]
        for sample in samples
    ]
    return Table("Memory of a process under mixed requests", columns, rows)


def run(*, model: str, minutes: float, clients: int) -> Report:
    """Ask for so long; `model` is a name or a folder."""
    result = Path(model) if Path(model).exists() else model
    with LLM(result, max_memory=MAX_MEMORY) as llm:
        samples = asyncio.run(soak(llm, 60 * minutes, clients))
    return Report("soak", [table(samples)], {"samples": samples})
