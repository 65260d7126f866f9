"""Heads that propose from hidden states, over several ranks: rank 0 runs them, and every request
gets the tokens that one rank gives it. Ranks are processes here, joined by MLX's ring.

    MLXINFER_RANKS=4 pytest tests/ranks/test_rank_heads.py
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from engine.harness import Harness, config, prompt
from models.tiny import tiny_checkpoint, tiny_config
from ranks.test_rank_matrix import SIZE, group  # noqa: F401 - a fixture
from speculation.head_checkpoints import dflash_checkpoint, eagle_checkpoint, mtp_checkpoint
from speculation.head_names import num_streams

from mlxinfer.core import SamplingParams
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.followers import StepInputs
from mlxinfer.engine.prefill import PrefillSizer
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from mlxinfer.models.weights.share import SPLITTABLE
from mlxinfer.ranks.group import RankGroup
from mlxinfer.speculation.options import SpeculationOptions
from mlxinfer.speculation.sources import open_speculation

pytestmark = pytest.mark.ci

GREEDY = SamplingParams(max_tokens=10)
DRAWN = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, seed=11)
HEADS = ("mtp", "mtp latent", "mtp streams", "eagle", "dflash")
CASES = {
    "mtp": "qwen3_5_text-v4",
    "mtp latent": "glm4_moe_lite-v4",
    "mtp streams": "qwen4_exp_text-v4",
}


@cache
def folders(kind: str) -> tuple[Path, Path | None]:
    """Of a model, and of its head where that is a checkpoint of its own."""
    folder, head = Path(mkdtemp()), Path(mkdtemp())
    if kind in CASES:
        return mtp_checkpoint(folder, CASES[kind], right=True), None
    tiny_checkpoint(folder, "qwen3_moe-v4")
    sizes = tiny_config("qwen3_moe-v4")
    if kind == "eagle":
        return folder, eagle_checkpoint(head, sizes, drafted=40)
    return folder, dflash_checkpoint(head, sizes, taps=[0, sizes["num_hidden_layers"] - 1])


def model_type_of(kind: str) -> str:
    """The type of the model that a head is for."""
    return whole(kind).config.model_type


@cache
def whole(kind: str) -> Model:
    return load(folders(kind)[0])


@pytest.mark.alike
@pytest.mark.parametrize("pipeline", [False, True], ids=["parts", "stages"])
@pytest.mark.parametrize("kind", HEADS)
def test_answers_are_those_of_one_rank(
    group: RankGroup,  # noqa: F811
    kind: str,
    pipeline: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and drawn, after a preemption, from a cached prefix, and on a cache made anew."""
    folder, head = folders(kind)
    if pipeline and whole(kind).config.num_layers < SIZE:
        pytest.skip(f"{whole(kind).config.num_layers} layers for {SIZE} stages")
    try:
        model = group.load(kind, folder, dtype="auto", pipeline=pipeline, watch=None)
    except UnsupportedModelError as error:  # so many ranks cannot share this model's heads
        assert SIZE > 2 or model_type_of(kind) not in SPLITTABLE
        pytest.skip(str(error))
    method = kind.partition(" ")[0]
    options = SpeculationOptions(method=method, draft=head, max_draft=4, fixed=True)
    rest, speculation = open_speculation(
        options, folder, model, config(feature_bytes=0), lambda _: 1 << 26, dtype="auto"
    )
    assert speculation is not None
    sizes = {"kv_budget_bytes": rest.kv_budget_bytes, "max_batch": 3}
    harness = Harness(model, proposer=speculation, followers=group, **sizes)
    positions = counted_positions(group, monkeypatch)
    sent = group.stats()["bytes_sent"].get("hidden", 0)
    rows = {"0": (prompt(12, 0), GREEDY), "1": (prompt(72, 1), DRAWN), "2": (prompt(40, 2), GREEDY)}
    for name, (ids, params) in rows.items():
        harness.add(name, ids, params)
        harness.turn(2)
    queues = harness.loop.scheduler.queues
    queues.preempt(queues.running[-1])
    harness.drain()
    rows["cached"] = rows["1"][0] + rows["0"][0], DRAWN
    harness.run("cached", *rows["cached"])
    harness.loop.assemble()
    rows["anew"] = rows["cached"]
    harness.add("anew", *rows["anew"])
    outcomes = harness.check(model=whole(kind))
    harness.loop.close()
    assert outcomes["cached"].cached_tokens > outcomes["anew"].cached_tokens == 0
    stats = speculation.stats()
    assert stats["drafted"] > 20
    if kind in CASES:
        assert stats["accepted"] == stats["drafted"], "the head is made to be right"
    if pipeline:
        width = model.config.hidden_size * model.activation_dtype.size
        if kind == "mtp streams":
            width *= num_streams(tiny_config(CASES[kind]))
        assert group.stats()["bytes_sent"]["hidden"] - sent == sum(positions) * width


def counted_positions(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> list[int]:  # noqa: F811
    """Of each step that is sent from now on."""
    positions: list[int] = []
    send = group.send

    def counted(step: StepInputs) -> None:
        positions.append(len(step.metadata.positions))
        send(step)

    monkeypatch.setattr(group, "send", counted)
    return positions


def test_rank_0_knows_which_steps_other_stages_still_work_on(
    group: RankGroup,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of a prompt stream on, and the last one gives a token; with a head all come back."""
    folder, head = folders("eagle")
    assert head is not None
    model = group.load("eagle", folder, dtype="auto", pipeline=True, watch=None)
    options = SpeculationOptions(method="eagle", draft=head)
    _, speculation = open_speculation(
        options, folder, model, config(feature_bytes=0), lambda _: 1 << 26, dtype="auto"
    )
    seen: list[bool] = []

    def observe(self: PrefillSizer, batch: Batch, seconds: float, *, on_later_stages: bool) -> None:
        seen.append(on_later_stages)

    monkeypatch.setattr(PrefillSizer, "observe", observe)
    for proposer in (None, speculation):
        harness = Harness(model, proposer=proposer, followers=group, prefill_chunk=16)
        harness.run("a", prompt(80), SamplingParams(max_tokens=1))
        harness.loop.close()
        group.load("eagle", folder, dtype="auto", pipeline=True, watch=None)
    assert seen == [True] * 4 + [False] * 6
