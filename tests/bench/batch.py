"""`bench batch`: the requests of a batch beside as many handed to the engine at once.

Both sides answer on one engine of one process, turn by turn, with prompts that no cache has. The
engine's requests are built before its clock runs, and all wait in its queue: more it cannot do. A
batch reads a file, renders, encodes, decodes and writes a file besides, in the same time.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxinfer import hub
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.core import SamplingParams
from mlxinfer.errors import MlxinferError
from mlxinfer.server.app import ENDPOINTS
from mlxinfer.server.batches.lines import ResultFiles, rows_of
from mlxinfer.server.batches.run import BatchRun, batch_endpoints
from mlxinfer.server.calls.service import Service
from mlxinfer.server.registry.models import Models
from mlxinfer.server.registry.served import ServedModel
from mlxinfer.server.settings import ServerConfig
from mlxinfer.session.engine_factory import EngineOptions
from tests.bench.checkpoints import MIDDLE, SMALL
from tests.bench.serve import user, words, write_served

PROMPT_WORDS = 40


@dataclass(frozen=True, slots=True)
class Round:
    """One side's answers to all requests."""

    wall_s: float
    cpu_s: float


def run(*, model: str | None, requests: int, tokens: int, runs: int, small: bool) -> Report:
    """Measure both sides in turn.

    Args:
        model: name or folder; None: a random one.
        requests: of a round.
        tokens: of an answer.
        runs: rounds of each side; the median counts.
        small: a small random model.
    """
    with TemporaryDirectory() as scratch, asyncio.Runner() as runner:
        work = Path(scratch)
        made = SMALL if small else MIDDLE
        folder = write_served(work / "model", made) if model is None else hub.resolve(model)
        served = ServedModel.open("model", folder, EngineOptions(), created_s=1)
        service = Service(Models.of([served]), ServerConfig(port=0))
        try:
            sides = Sides(service, served, work, requests, tokens)
            found: dict[str, list[Round]] = {"engine": [], "batch": []}
            for number in range(runs + 1):
                for name in ("engine", "batch") if number % 2 else ("batch", "engine"):
                    took = sides.engine() if name == "engine" else runner.run(sides.batch())
                    if number:  # the first round is for kernels and caches
                        found[name].append(took)
        finally:
            service.close()
    return report(found, requests, tokens)


class Sides:
    """The two ways to the same answers.

    Args:
        service: of the model.
        served: the model.
        folder: for files.
        requests, tokens: as of `run`.
    """

    def __init__(
        self, service: Service, served: ServedModel, folder: Path, requests: int, tokens: int
    ) -> None:
        self._service, self._served, self._folder = service, served, folder
        self._requests, self._tokens = requests, tokens
        self._seed = 0

    def _prompts(self) -> list[str]:
        """As many new ones."""
        first, self._seed = self._seed, self._seed + self._requests
        return [words(PROMPT_WORDS, seed) for seed in range(first, self._seed)]

    def engine(self) -> Round:
        """Requests of token ids, all at once."""
        params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        builder = self._served.builder
        outputs = [builder.chat([user(text)], params).output for text in self._prompts()]
        clock = stopwatch()
        results = self._served.client.run(outputs)
        took = clock()
        self._check(sum(len(result.token_ids) for result in results))
        return took

    async def batch(self) -> Round:
        """A file of requests, and a file of answers."""
        given, answers = self._folder / "in.jsonl", self._folder / f"out{self._seed}.jsonl"
        how = {"max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        given.write_text(
            "".join(
                json.dumps(
                    {
                        "custom_id": str(number),
                        "method": "POST",
                        "url": "/v1/chat/completions",
                        "body": {"messages": [user(text)], **how},
                    }
                )
                + "\n"
                for number, text in enumerate(self._prompts())
            )
        )
        clock = stopwatch()
        results = ResultFiles(answers, answers.with_suffix(".errors"))
        endpoints = batch_endpoints(ENDPOINTS)
        await BatchRun(self._service, endpoints, results).run(rows_of(given))
        results.close()
        took = clock()
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        self._check(sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines))
        return took

    def _check(self, tokens: int) -> None:
        if tokens != self._requests * self._tokens:
            raise MlxinferError(f"{tokens} tokens came of {self._requests * self._tokens}.")


def stopwatch() -> Callable[[], Round]:
    """What says how long it is since this call."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: Round(time.perf_counter() - wall, time.process_time() - cpu)


def report(found: dict[str, list[Round]], requests: int, tokens: int) -> Report:
    """Medians, and what part of the engine's speed a batch has."""
    medians = {
        name: Round(
            statistics.median(each.wall_s for each in rounds),
            statistics.median(each.cpu_s for each in rounds),
        )
        for name, rounds in found.items()
    }
    rows = [
        [name, f"{requests * tokens / each.wall_s:,.0f}", f"{each.wall_s:.2f}", f"{each.cpu_s:.2f}"]
        for name, each in medians.items()
    ]
    engine, batch = medians["engine"], medians["batch"]
    by_wall, by_cpu = ratio(engine.wall_s, batch.wall_s), ratio(engine.cpu_s, batch.cpu_s)
    rows.append(["batch to engine", by_wall, by_wall, by_cpu])
    table = Table(
        f"{requests} requests of {PROMPT_WORDS} words, {tokens} tokens each",
        ["", "tokens/s", "seconds", "CPU seconds"],
        rows,
        "CPU seconds are of all threads: they say more where others use the machine.",
    )
    data: dict[str, Any] = {
        name: {"wall_s": each.wall_s, "cpu_s": each.cpu_s} for name, each in medians.items()
    }
    return Report("batch", [table], data)
