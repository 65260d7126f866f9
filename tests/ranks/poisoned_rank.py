"""One of two ranks whose kernels are executed on the CPU; those of rank 1 write NaN.

    python -m ranks.poisoned_rank SETTINGS   (JSON, from the test that starts it)

Rank 0 starts rank 1 and prints what came of its requests, as JSON.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.harness import Harness
from engine.test_kernel_steps import choose_all
from engine.test_not_finite import Poisoned, asked
from metal_cpu import MetalCPU

from mlxinfer.config import KVOptions
from mlxinfer.engine import kernels as kernels_module
from mlxinfer.engine.kernels import choose_none
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.selfcheck import Gpu
from mlxinfer.models import load
from mlxinfer.ranks import follower
from mlxinfer.ranks.group import RankGroup
from mlxinfer.ranks.hosts import LocalRanks, RankPlace, local_place

GPU = Gpu(Launch.on_metal, "a GPU", timer=lambda calls: dict.fromkeys(calls, 1.0))


class OtherRank(LocalRanks):
    """Rank 1 is this program, too."""

    def start(self, place: RankPlace, secret: bytes) -> None:
        settings = json.loads(sys.argv[1])
        settings["place"] = {**asdict(place), "rank": 1, "secret": secret.hex()}
        command = [sys.executable, "-m", "ranks.poisoned_rank", json.dumps(settings)]
        self._processes[1] = subprocess.Popen(command)


def keep_verdicts(settings: dict[str, Any], rank: int) -> None:
    """Each rank remembers in a folder of its own, as on machines of their own."""
    kernels_module.this_gpu = lambda: GPU  # type: ignore[assignment]
    kernels_module.default_kernel_folder = lambda: Path(settings["verdicts"]) / str(rank)


def follow(settings: dict[str, Any]) -> None:
    place = settings["place"]
    secret = bytes.fromhex(place.pop("secret"))
    follower.choose_on_this_machine = lambda: choose_all(set())  # type: ignore[assignment]
    device = Poisoned(settings["file"], since=settings["since"], value=float("nan"))
    with running_on(device):
        follower.follow(RankPlace(**{**place, "control": tuple(place["control"])}), secret, None)


def ask(settings: dict[str, Any]) -> dict[str, Any]:
    folder = Path(settings["folder"])
    plain = asked(Harness(load(folder), kernels=choose_none, kv=KVOptions(), max_batch=4))
    group = RankGroup(local_place(2), b"0123456789abcdef", local=OtherRank())
    pipeline = settings["pipeline"]
    with running_on(MetalCPU(checked=False)):
        model = group.load("wide", folder, dtype="auto", pipeline=pipeline, watch=None)
        harness = Harness(
            model, kernels=choose_all(set()), kv=KVOptions(), max_batch=4, followers=group
        )
        actual = asked(harness)
    left_out = harness.loop.kernels.stats().get("left_out")
    harness.loop.close()
    group.close()
    return {
        "plain": [outcome.token_ids for outcome in plain],
        "tokens": [outcome.token_ids for outcome in actual],
        "errors": [str(outcome.error) for outcome in actual if outcome.error is not None],
        "left_out": left_out,
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    keep_verdicts(given, 1 if "place" in given else 0)
    if "place" in given:
        follow(given)
    else:
        print(json.dumps(ask(given)))
