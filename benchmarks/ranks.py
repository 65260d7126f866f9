"""`bench ranks`: one model over processes of this machine, beside mlx-lm's `sharded_load`.

A random dense model of some 50M float32 weights, in one process and in several. They share the
cores of one machine: what is compared is the cost of being several, not a gain. Bytes are counted
as each side hands arrays to MLX's ring, by what they are, and compared with what the two sums of a
layer take for each row that was computed: with proposals these are more than the tokens made.
`python -m benchmarks.ranks FOLDER` is one rank of mlx-lm.
"""

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.checkpoints import LAPTOP, SMALL, write_served
from benchmarks.processes import Peer
from benchmarks.rates import VOCAB, measured
from benchmarks.tables import medians
from benchmarks.turns import in_turn
from mlxinfer import LLM, SamplingParams
from mlxinfer.bench.peer import PeerGeneration, peer_module
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, token_times
from mlxinfer.ranks.group import RankGroup, open_group
from mlxinfer.ranks.hosts import RankOptions, local_place

WAYS = {"bytes_sent": "out", "bytes_received": "in"}
KINDS = {  # of what is sent
    "layers": "sums of layers",
    "embedding": "of embeddings",
    "tokens": "of tokens",
    "logits": "logits",
    "hidden": "hidden states",
    "steps": "what steps are",
}
ALONE, EIGHT, PROMPT = "stream 1", "stream 8", "prompt"  # figures of `rates`
Facts = dict[str, Any]
Answer = Callable[[list[int], int], int]  # (prompt, least tokens of the answer)


def run(*, runs: int, size: int, small: bool, peer: bool) -> Report:
    """Both sides in one process, then in `size` of them."""
    sizes = SMALL if small else LAPTOP
    answer, length = (8, 128) if small else (24, 512)
    data: dict[str, Facts] = {}

    def rates(times: TokenTimes) -> Facts:
        one = partial(measured, times, answer=answer, lengths=[length])
        result = medians(in_turn({"": one}, runs)[""])
        return {PROMPT: result.pop(f"prompt {length}"), **result}

    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", sizes)
        ours = partial(_ours, folder, rates, answer)
        data["mlxinfer, 1"] = ours({})
        if peer:
            data["mlx-lm, 1"] = rates(PeerGeneration(folder).token_times)
        data[f"mlxinfer, {size}"] = ours({"ranks": size})
        data[f"mlxinfer, {size}, no proposals"] = _ours(
            folder, lambda _: {}, answer, {"ranks": size, "speculate": "off"}
        )
        data[f"mlxinfer, {size}, stages"] = ours({"ranks": size, "pipeline": True})
        if peer:
            with peer_ranks(folder, size) as ranks:
                result = data[f"mlx-lm, {size}"] = rates(ranks.token_times)
                result["weights"] = ranks.weights
                result["bytes"] = _counted(ranks.answer, ranks.counters, answer)
    two_sums = 2 * sizes.layers * sizes.hidden * 4 * 2 * (size - 1) / size
    weights_bytes = data["mlxinfer, 1"]["weights"][0]
    data["model"] = {"weights_bytes": weights_bytes, "size": size, "two_sums": two_sums}
    return Report("ranks", [_table(data), _bytes_table(data)], data)


def _ours(
    folder: Path, measured: Callable[[TokenTimes], Facts], num_tokens: int, how: dict[str, Any]
) -> Facts:
    how |= {"rank_deadline": 600.0} if how else {}  # the machine may be a busy one
    spread = {name: value for name, value in how.items() if name != "speculate"}
    group = open_group(RankOptions(**spread)) if how else None
    with ExitStack() as closing:
        sending = closing.enter_context(_timed_sends(group)) if group else []
        llm = closing.enter_context(LLM(folder, prefix_cache=False, progress=False, **how))

        def answer(ids: list[int], num_tokens: int) -> int:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            return len(llm.generate([ids], params)[0].token_ids)

        report = measured(partial(token_times, llm))
        report["kv_bytes"] = llm.model_info.kv_bytes_per_token
        report["weights"] = [llm.model_info.weights_bytes]
        if group:
            report["weights"] += [one.weights_bytes for one in group.loaded]
            report["bytes"] = _counted(answer, partial(_counters, llm), num_tokens)
            report["send_ms"] = 1e3 * statistics.median(sending)
    return report


def _counters(llm: LLM) -> Counter[str]:
    """Return the bytes that rank 0 has sent and received so far, and the rows computed."""
    stats = llm.stats()["ranks"]
    counters = Counter({"rows": stats["rows"]})
    for way, short in WAYS.items():
        counters.update({f"{short} {kind}": count for kind, count in stats[way].items()})
    return counters


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
    sends: list[float] = []
    send = group.send

    def timed(step: Any) -> None:
        began = time.thread_time()
        send(step)
        sends.append(time.thread_time() - began)

    group.send = timed  # type: ignore[method-assign]
    try:
        yield sends
    finally:
        group.send = send  # type: ignore[method-assign]


def _table(data: dict[str, Facts]) -> Table:
    total, size = data["model"]["weights_bytes"], data["model"]["size"]
    kv_bytes = data["mlxinfer, 1"]["kv_bytes"]
    rows = []
    for name, value in data.items():
        if ALONE not in value:
            continue
        share = send_ms = ""
        if "bytes" in value:
            share = f"{max(value['weights']) / (total / size):.3f}"
        if "send_ms" in value:
            send_ms = f"{value['send_ms']:.2f}"
            if "stages" not in name:
                share += f", {value['kv_bytes'] / (kv_bytes / size):.2f}"
        speed = (f"{value[what]:,.0f}" for what in (ALONE, EIGHT, PROMPT))
        rows.append([name, *speed, share, send_ms])
    return Table(
        f"{total / 4e6:,.0f}M float32 weights over {size} processes of one machine",
        ["", ALONE, EIGHT, PROMPT, "largest part, its KV", "send ms"],
        rows,
        "Tokens a second; weights of the largest rank, and KV of a token, over an equal share; "
        "processor time to send a step. mlx-lm: sharded_load.",
    )


def _bytes_table(data: dict[str, Facts]) -> Table:
    """Bytes of each row that was computed, over those of the two sums a layer."""
    two_sums = data["model"]["two_sums"]
    sides = {name: facts["bytes"] for name, facts in data.items() if "bytes" in facts}

    def row(name: str, kinds: Sequence[str], *, a_token: bool = False) -> list[str]:
        result = [name]
        for side in sides.values():
            count = max(
                sum(side.get(f"{way} {kind}", 0) for kind in kinds) for way in WAYS.values()
            )
            num_rows = 1 if a_token else side.get("rows", 1)
            result.append(f"{count / num_rows / two_sums:.4f}" if count else "")
        return result

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

    def __init__(self, processes: list[Peer]) -> None:
        self._processes = processes
        self._sent = 0  # by rank 0
        self.weights = [int(process.hear()["weights"]) for process in processes]

    def token_times(self, prompts: list[list[int]], enough: int) -> list[list[float]]:
        """The token times of rank 0, see `PeerGeneration`."""
        for process in self._processes:
            process.tell([prompts, enough])
        result, *_ = [process.hear() for process in self._processes]
        self._sent = result["sent"]
        times: list[list[float]] = result["times"]
        return times

    def answer(self, ids: list[int], num_tokens: int) -> int:
        """Answer a prompt alone; the tokens that were made."""
        return len(self.token_times([ids], num_tokens)[0])

    def counters(self) -> Counter[str]:
        """Return the bytes that rank 0 has sent and received so far: sums of layers alone."""
        return Counter({"out layers": self._sent, "in layers": self._sent})


@contextmanager
def peer_ranks(folder: Path, size: int) -> Iterator[PeerRanks]:
    """mlx-lm's `sharded_load` in `size` processes over MLX's ring."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(local_place(size).ring))
    command = [sys.executable, "-m", "benchmarks.ranks", str(folder)]
    environment = {"MLX_HOSTFILE": str(hosts)}
    processes = [Peer(*command, MLX_RANK=str(rank), **environment) for rank in range(size)]
    try:
        yield PeerRanks(processes)
    finally:
        for process in processes:
            process.close()


def _be_a_peer(folder: Path) -> None:
    """One rank of mlx-lm: batches from standard input, times to standard output."""
    group = mx.distributed.init(strict=True, backend="ring")
    sent, all_sum = 0, mx.distributed.all_sum

    def counted(x: mx.array, **how: Any) -> mx.array:
        """A sum of which the bytes are counted as `ranks.join.GroupLink` does."""
        nonlocal sent
        sent += 2 * (group.size() - 1) * x.nbytes // group.size()
        return all_sum(x, **how)

    mx.distributed.all_sum = counted
    generation = PeerGeneration.__new__(PeerGeneration)
    model, _ = peer_module("mlx_lm.utils").sharded_load(str(folder), tensor_group=group)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    generation._model = model
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    print(json.dumps({"weights": num_bytes}), flush=True)
    for line in sys.stdin:
        times = generation.token_times(*json.loads(line))
        print(json.dumps({"times": times, "sent": sent}), flush=True)


if __name__ == "__main__":
    _be_a_peer(Path(sys.argv[1]))
