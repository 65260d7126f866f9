"""`bench ranks`: one model over processes of this machine, beside mlx-lm's `sharded_load`.

A random dense model of some 50M float32 weights, in one process and in several. They share the
cores of one machine: what is compared is the cost of being several, not a gain. Bytes are counted
as each side hands arrays to MLX's ring.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer import LLM, hub
from mlxinfer.bench.peer import PeerGeneration, peer_module
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, _token_times, generation_rate
from mlxinfer.ranks.group import RankGroup
from mlxinfer.ranks.hosts import local_place
from mlxinfer.ranks.open import open_group
from mlxinfer.ranks.options import RankOptions
from tests.bench.checkpoints import LAPTOP, SMALL, Dense, write_checkpoint
from tests.bench.serve import TOKENIZER

ALONE, EIGHT, PROMPT = "alone", "8 at once", "prompt"
SENT, RECEIVED = "sent", "received"
VOCAB = 2048  # of the demo's tokenizer
SIDE_S = 25.0  # for the runs of one side: where ranks outnumber cores, one may be all that there is
ANSWER_S = 4.0  # for one answer; it has so many tokens, 48 at most
Facts = dict[str, Any]
Sent = Callable[[], tuple[int, int]]  # bytes that rank 0 has sent and received
Side = Callable[[TokenTimes, Sent], Facts]  # measures what it is given


def run(*, runs: int = 3, size: int = 2, small: bool = False, peer: bool = True) -> Report:
    """Both sides in one process, then in `size` of them."""
    sizes = replace(SMALL if small else LAPTOP, vocab=VOCAB)
    data: dict[str, Facts] = {}
    with TemporaryDirectory() as scratch:
        folder = _checkpoint(Path(scratch) / "model", sizes)

        def measured(times: TokenTimes, sent: Sent) -> Facts:
            return _rates(times, sent, runs, small)

        data["mlxinfer, 1"] = _ours(folder, measured, {})
        if peer:
            data["mlx-lm, 1"] = measured(PeerGeneration(folder).token_times, lambda: (0, 0))
        data[f"mlxinfer, {size}"] = _ours(folder, measured, {"ranks": size})
        stages = {"ranks": size, "pipeline": True}
        data[f"mlxinfer, {size}, stages"] = _ours(folder, measured, stages)
        if peer:
            with peer_ranks(folder, size) as ranks:
                data[f"mlx-lm, {size}"] = measured(ranks.token_times, ranks.bytes_sent)
                data[f"mlx-lm, {size}"]["weights"] = ranks.weights
    data["weights"] = {"bytes": 4 * sizes.num_weights, "size": size}
    return Report("ranks", [_table(data)], data)


def _checkpoint(folder: Path, sizes: Dense) -> Path:
    write_checkpoint(folder, sizes)
    for name in TOKENIZER:
        shutil.copyfile(hub.resolve("demo") / name, folder / name)
    return folder


def _ours(folder: Path, measured: Side, how: dict[str, Any]) -> Facts:
    how |= {"rank_deadline": 600.0} if how else {}  # the machine may be a busy one
    group = open_group(RankOptions(**how)) if how else None
    with ExitStack() as closing:
        sending = closing.enter_context(_timed_sends(group)) if group else []
        llm = closing.enter_context(LLM(folder, prefix_cache=False, **how))

        def times(prompts: list[list[int]], enough: int) -> list[list[float]]:
            return _token_times(llm, prompts, enough)

        def sent() -> tuple[int, int]:
            stats = group.stats() if group else {"bytes_sent": 0, "bytes_received": 0}
            return stats["bytes_sent"], stats["bytes_received"]

        found = measured(times, sent)
        if group:
            others = [one.weights_bytes for one in group.loaded]
            found["weights"] = [llm.model_info.weights_bytes, *others]
            found["send_ms"] = 1e3 * statistics.median(sending)
    return found


@contextmanager
def _timed_sends(group: RankGroup) -> Iterator[list[float]]:
    """Processor seconds that rank 0 takes to say to the others what each step is."""
    found: list[float] = []
    send = group.send

    def timed(step: Any) -> None:
        began = time.thread_time()
        send(step)
        found.append(time.thread_time() - began)

    group.send = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        group.send = send  # type: ignore[method-assign]


def _rates(times: TokenTimes, sent: Sent, runs: int, small: bool) -> Facts:
    """Answer tokens a second, prompt tokens a second, bytes of rank 0 for a token alone."""
    drawn, length = random.Random(0), 128 if small else 512

    def prompt(count: int) -> list[int]:
        return [drawn.randrange(3, VOCAB) for _ in range(count)]

    times([prompt(32)], 4)  # compiles
    (first_tokens,) = times([prompt(32)], 4)
    token_s = (first_tokens[-1] - first_tokens[0]) / (len(first_tokens) - 1)
    answer = 8 if small else min(max(int(ANSWER_S / token_s), 8), 48)
    began = time.monotonic()
    found: dict[str, list[float]] = {ALONE: [], EIGHT: [], PROMPT: [], SENT: [], RECEIVED: []}
    for run in range(runs):
        if run and time.monotonic() > began + SIDE_S:
            break
        one, eight = [prompt(32)], [prompt(32) for _ in range(8)]
        first = sent()
        short = times(one, 2)
        middle = sent()
        alone = times(one, answer)
        extra = len(alone[0]) - len(short[0])
        last = sent()
        for what, a, b, c in zip((SENT, RECEIVED), first, middle, last, strict=True):
            found[what].append((c - b - (b - a)) / max(extra, 1))
        found[ALONE].append(generation_rate(alone))
        found[EIGHT].append(generation_rate(times(eight, answer)))
        found[PROMPT].append(length / times([prompt(length)], 1)[0][0])
    return {what: statistics.median(values) for what, values in found.items()} | {
        "runs": len(found[ALONE])
    }


def _table(data: dict[str, Facts]) -> Table:
    total, size = data["weights"]["bytes"], data["weights"]["size"]
    rows = []
    for name, found in data.items():
        if name == "weights":
            continue
        weights, send_ms = found.get("weights"), found.get("send_ms")
        rows.append(
            [
                name,
                *(f"{found[what]:,.0f}" for what in (ALONE, EIGHT, PROMPT)),
                ", ".join(f"{found[what] / 1e3:,.1f}" for what in (SENT, RECEIVED)),
                "1.00" if weights is None else f"{max(weights) / (total / size):.2f}",
                "" if send_ms is None else f"{send_ms:.2f}",
                f"{found['runs']}",
            ]
        )
    return Table(
        f"{total / 4e6:,.0f}M float32 weights over {size} processes of one machine",
        ["", ALONE, EIGHT, PROMPT, "KB out, in", "largest part", "send ms", "runs"],
        rows,
        "Tokens a second; KB that rank 0 sends and receives for a token alone; weights of the "
        "largest rank over an equal share; processor time to send a step; runs, of which the "
        f"median counts: none begins after {SIDE_S:g} s of a side. mlx-lm: sharded_load.",
    )


# -- mlx-lm ------------------------------------------------------------------------------------


class PeerRanks:
    """Processes of mlx-lm that run the same batches; each draws all tokens by itself."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes
        self._sent = 0
        self.weights = [int(self._read(process)["weights"]) for process in processes]

    def token_times(self, prompts: list[list[int]], enough: int) -> list[list[float]]:
        """As of `PeerGeneration`, of rank 0."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([prompts, enough]) + "\n")
            process.stdin.flush()
        found, *_ = [self._read(process) for process in self._processes]
        self._sent = found["sent"]
        times: list[list[float]] = found["times"]
        return times

    def bytes_sent(self) -> tuple[int, int]:
        """By rank 0 so far, and received: sums alone, of which both are alike."""
        return self._sent, self._sent

    @staticmethod
    def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found


@contextmanager
def peer_ranks(folder: Path, size: int) -> Iterator[PeerRanks]:
    """mlx-lm's `sharded_load` in `size` processes over MLX's ring."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(local_place(size).ring))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.ranks", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
        )
        for rank in range(size)
    ]
    try:
        yield PeerRanks(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _be_a_peer(folder: Path) -> None:
    """One rank of mlx-lm: batches from standard input, times to standard output."""
    group = mx.distributed.init(strict=True, backend="ring")
    sent = _counted_bytes(group.size())
    generation = PeerGeneration.__new__(PeerGeneration)
    model, _ = peer_module("mlx_lm.utils").sharded_load(str(folder), tensor_group=group)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    generation._model = model
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    print(json.dumps({"weights": num_bytes}), flush=True)
    for line in sys.stdin:
        prompts, enough = json.loads(line)
        times = generation.token_times(prompts, enough)
        print(json.dumps({"times": times, "sent": sent[0]}), flush=True)


def _counted_bytes(size: int) -> list[int]:
    """Count the bytes of sums, as `ranks.link.GroupLink` does."""
    total, all_sum = [0], mx.distributed.all_sum

    def counted(x: mx.array, **how: Any) -> mx.array:
        total[0] += 2 * (size - 1) * x.nbytes // size
        return all_sum(x, **how)

    mx.distributed.all_sum = counted
    return total


if __name__ == "__main__":
    _be_a_peer(Path(sys.argv[1]))
