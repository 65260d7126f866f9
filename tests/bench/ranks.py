"""`bench ranks`: one model over processes of this machine, beside mlx-lm's `sharded_load`.

A random dense model of some 50M float32 weights, in one process and in several. They share the
cores of one machine: what is compared is the cost of being several, not a gain. Bytes are counted
as each side hands arrays to MLX's ring, by what they are, and compared with what the two sums of a
layer take for each row that was computed: with proposals these are more than the tokens made.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer import LLM, SamplingParams
from mlxinfer.bench.peer import PeerGeneration, peer_module
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, _token_times, generation_rate
from mlxinfer.ranks.group import RankGroup, open_group
from mlxinfer.ranks.hosts import RankOptions, local_place
from tests.bench.checkpoints import LAPTOP, SMALL, Dense, with_tokenizer, write_checkpoint

ALONE, EIGHT, PROMPT = "alone", "8 at once", "prompt"
WAYS = {"bytes_sent": "out", "bytes_received": "in"}
KINDS = {  # of what is sent
    "layers": "sums of layers",
    "embedding": "of embeddings",
    "tokens": "of tokens",
    "logits": "logits",
    "hidden": "hidden states",
    "steps": "what steps are",
}
VOCAB = 2048  # of the demo's tokenizer
SIDE_S = 25.0  # for the runs of one side: where ranks outnumber cores, one may be all that there is
ANSWER_S = 4.0  # for one answer; it has so many tokens, 48 at most
Facts = dict[str, Any]
Side = Callable[[TokenTimes], Facts]  # measures what it is given
Answer = Callable[[list[int], int], int]  # answers a prompt with so many tokens, or some more


def run(*, runs: int = 3, size: int = 2, small: bool = False, peer: bool = True) -> Report:
    """Both sides in one process, then in `size` of them."""
    sizes = replace(SMALL if small else LAPTOP, vocab=VOCAB)
    data: dict[str, Facts] = {}

    def measured(times: TokenTimes) -> Facts:
        return _rates(times, runs, small)

    with TemporaryDirectory() as scratch:
        folder = _checkpoint(Path(scratch) / "model", sizes)
        data["mlxinfer, 1"] = _ours(folder, measured, {})
        if peer:
            data["mlx-lm, 1"] = measured(PeerGeneration(folder).token_times)
        spread = data[f"mlxinfer, {size}"] = _ours(folder, measured, {"ranks": size})
        answer = spread["answer"]
        plain = {"ranks": size, "speculate": "off"}
        data[f"mlxinfer, {size}, no proposals"] = _ours(folder, lambda _: {"answer": answer}, plain)
        stages = {"ranks": size, "pipeline": True}
        data[f"mlxinfer, {size}, stages"] = _ours(folder, measured, stages)
        if peer:
            with peer_ranks(folder, size) as ranks:
                found = data[f"mlx-lm, {size}"] = measured(ranks.token_times)
                found["weights"] = ranks.weights
                found["bytes"] = _counted(ranks.answer, ranks.counters, found["answer"])
    two_sums = 2 * sizes.layers * sizes.hidden * 4 * 2 * (size - 1) / size
    data["model"] = {"weights_bytes": 4 * sizes.num_weights, "size": size, "two_sums": two_sums}
    return Report("ranks", [_table(data), _bytes_table(data)], data)


def _checkpoint(folder: Path, sizes: Dense) -> Path:
    return with_tokenizer(write_checkpoint(folder, sizes))


def _ours(folder: Path, measured: Side, how: dict[str, Any]) -> Facts:
    how |= {"rank_deadline": 600.0} if how else {}  # the machine may be a busy one
    spread = {name: value for name, value in how.items() if name != "speculate"}
    group = open_group(RankOptions(**spread)) if how else None
    with ExitStack() as closing:
        sending = closing.enter_context(_timed_sends(group)) if group else []
        llm = closing.enter_context(LLM(folder, prefix_cache=False, **how))

        def times(prompts: list[list[int]], enough: int) -> list[list[float]]:
            return _token_times(llm, prompts, enough)

        def answer(ids: list[int], num_tokens: int) -> int:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            return len(llm.generate([ids], params)[0].token_ids)

        found = measured(times)
        found["kv_bytes"] = llm.model_info.kv_bytes_per_token
        if group:
            others = [one.weights_bytes for one in group.loaded]
            found["weights"] = [llm.model_info.weights_bytes, *others]
            found["bytes"] = _counted(answer, lambda: _counters(llm), found["answer"])
            found["send_ms"] = 1e3 * statistics.median(sending)
    return found


def _counters(llm: LLM) -> Counter[str]:
    """Return the bytes that rank 0 has sent and received so far, and the rows computed."""
    stats = llm.stats()["ranks"]
    found = Counter({"rows": stats["rows"]})
    for way, short in WAYS.items():
        found.update({f"{short} {kind}": count for kind, count in stats[way].items()})
    return found


def _counted(
    answer: Answer, counters: Callable[[], Counter[str]], num_tokens: int
) -> dict[str, float]:
    """Rows and bytes a token of an answer alone: of a long one, less those of a short one."""
    ids = [random.Random(1).randrange(3, VOCAB) for _ in range(32)]
    lengths, counts = [], []
    for length in (2, num_tokens):
        before = counters()
        lengths.append(answer(ids, length))
        counts.append(counters() - before)
    counts[1].subtract(counts[0])
    return {kind: count / (lengths[1] - lengths[0]) for kind, count in counts[1].items()}


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


def _rates(times: TokenTimes, runs: int, small: bool) -> Facts:
    """Answer tokens a second, prompt tokens a second."""
    drawn, length = random.Random(0), 128 if small else 512

    def prompt(count: int) -> list[int]:
        return [drawn.randrange(3, VOCAB) for _ in range(count)]

    times([prompt(32)], 4)  # compiles
    (first_tokens,) = times([prompt(32)], 4)
    token_s = (first_tokens[-1] - first_tokens[0]) / (len(first_tokens) - 1)
    answer = 8 if small else min(max(int(ANSWER_S / token_s), 8), 48)
    began = time.monotonic()
    found: dict[str, list[float]] = {ALONE: [], EIGHT: [], PROMPT: []}
    for run in range(runs):
        if run and time.monotonic() > began + SIDE_S:
            break
        one, eight = [prompt(32)], [prompt(32) for _ in range(8)]
        found[ALONE].append(generation_rate(times(one, answer)))
        found[EIGHT].append(generation_rate(times(eight, answer)))
        found[PROMPT].append(length / times([prompt(length)], 1)[0][0])
    return {what: statistics.median(values) for what, values in found.items()} | {
        "runs": len(found[ALONE]),
        "answer": answer,
    }


def _table(data: dict[str, Facts]) -> Table:
    total, size = data["model"]["weights_bytes"], data["model"]["size"]
    kv_bytes = data["mlxinfer, 1"]["kv_bytes"]
    rows = []
    for name, found in data.items():
        if ALONE not in found:
            continue
        weights, send_ms = found.get("weights"), found.get("send_ms")
        share = "" if weights is None else f"{max(weights) / (total / size):.3f}"
        if "mlxinfer" in name and weights is not None and "stages" not in name:
            share += f", {found['kv_bytes'] / (kv_bytes / size):.2f}"
        rows.append(
            [
                name,
                *(f"{found[what]:,.0f}" for what in (ALONE, EIGHT, PROMPT)),
                share,
                "" if send_ms is None else f"{send_ms:.2f}",
                f"{found['runs']}",
            ]
        )
    return Table(
        f"{total / 4e6:,.0f}M float32 weights over {size} processes of one machine",
        ["", ALONE, EIGHT, PROMPT, "largest part, its KV", "send ms", "runs"],
        rows,
        "Tokens a second; weights of the largest rank, and KV of a token, over an equal share; "
        "processor time to send a step; runs, of which the median counts: none begins after "
        f"{SIDE_S:g} s of a side. mlx-lm: sharded_load.",
    )


def _bytes_table(data: dict[str, Facts]) -> Table:
    """Bytes of each row that was computed, over those of the two sums a layer."""
    two_sums = data["model"]["two_sums"]
    sides = {name: facts["bytes"] for name, facts in data.items() if "bytes" in facts}

    def row(name: str, kinds: Sequence[str], *, a_token: bool = False) -> list[str]:
        found = [name]
        for side in sides.values():
            count = max(
                sum(side.get(f"{way} {kind}", 0) for kind in kinds) for way in WAYS.values()
            )
            num_rows = 1 if a_token else side.get("rows", 1)
            found.append(f"{count / num_rows / two_sums:.4f}" if count else "")
        return found

    rows = [["rows a token", *(f"{side.get('rows', 1):.2f}" for side in sides.values())]]
    rows += [row(name, [kind]) for kind, name in KINDS.items()]
    rows.append(row("all, of a row", list(KINDS)))
    rows.append(row("all, of a token", list(KINDS), a_token=True))
    return Table(
        f"Bytes at rank 0, over the {two_sums / 1e3:,.1f} KB of the two sums a layer",
        ["", *sides],
        rows,
        "An answer alone, in the direction in which more goes; logits come in only. Bytes of each "
        "row that is computed, and at last of each token that comes out: with proposals, rows of "
        "wrong ones count there too.",
    )


# -- mlx-lm ------------------------------------------------------------------------------------


class PeerRanks:
    """Processes of mlx-lm that run the same batches; each draws all tokens by itself."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes
        self._sent = 0  # by rank 0
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

    def answer(self, ids: list[int], num_tokens: int) -> int:
        """Answer a prompt alone; the tokens that were made."""
        return len(self.token_times([ids], num_tokens)[0])

    def counters(self) -> Counter[str]:
        """Return the bytes that rank 0 has sent and received so far: sums of layers alone."""
        return Counter({"out layers": self._sent, "in layers": self._sent})

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
    """Count the bytes of sums, as `ranks.join.GroupLink` does."""
    total, all_sum = [0], mx.distributed.all_sum

    def counted(x: mx.array, **how: Any) -> mx.array:
        total[0] += 2 * (size - 1) * x.nbytes // size
        return all_sum(x, **how)

    mx.distributed.all_sum = counted
    return total


if __name__ == "__main__":
    _be_a_peer(Path(sys.argv[1]))
