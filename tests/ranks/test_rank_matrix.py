"""Everything at once over several ranks: whatever is switched on together, each request gets the
tokens that one rank gives it alone. Ranks are processes here, joined by MLX's ring: 2 or 4, as the
heads of the tiny models allow.

    MLXINFER_RANKS=4 MLXINFER_RANK_PROGRAMS=99 HYPOTHESIS_SEED=7 pytest tests/ranks
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import hypothesis
import numpy as np
import pytest
from adapters.cases import drawn, folders
from adapters.drawn import write_mlx
from engine.fake_grammar import FakeGrammar
from engine.harness import PAGE, Harness, Outcome, alone, disk_at, prompt
from engine.oracle import Oracle
from engine.pictures import RandomTower, picture, placed, with_tower
from engine.proposers import some_proposer
from engine.test_matrix import NEAR_TIE, Asked, Sight, assert_same, kv_options, play, programs
from engine.test_matrix import _often_a_rolling_snapshot as _often_a_rolling_snapshot
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models.runs import every
from models.tiny import tiny_checkpoint

from mlxinfer.cache_specs import KVSpec
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine.runner import Launched
from mlxinfer.errors import CheckpointError, InvalidRequestError
from mlxinfer.models import load
from mlxinfer.models.adapters.loaded import read_adapter
from mlxinfer.models.decoder import Model
from mlxinfer.models.language import LanguageModel
from mlxinfer.models.registry import family
from mlxinfer.models.stage import StageModel
from mlxinfer.ranks.group import RankGroup, open_group
from mlxinfer.ranks.hosts import RankOptions

SIZE = int(os.environ.get("MLXINFER_RANKS", "2"))
if SIZE not in (2, 4):
    raise ValueError(
        f"MLXINFER_RANKS is {SIZE}; expected 2 or 4, which divide the tiny models' heads"
    )
NUM_PROGRAMS = int(os.environ.get("MLXINFER_RANK_PROGRAMS", "2"))
SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
CASES = ("qwen3-v4", "gpt_oss-v4", "deepseek_v3-v4", "qwen3_next-v5", "gemma3_text-v4", "llama-v4")
STAGED = (  # others too, which heads or columns of each layer on every rank do not suit
    "olmo2-v4", "gemma4_text-v4", "granitemoehybrid-v4", "lfm2-v4", "falcon_h1-v4",
    *("kimi_linear-v4", "minimax_m2-v4", "llama4_text-v4", "nemotron_h-v5", *CASES),
    "gemma3n_text-v4", "gemma4_e-v4", "glm_moe_dsa-shared", "qwen4_exp_text-v4",
    "glm5_next_text-v5", "deepseek_v4-v4",
)  # fmt: skip


@pytest.fixture(scope="module")
def group() -> RankGroup:
    """Processes that stay until this one ends: MLX forms one group in the life of a process."""
    group = open_group(RankOptions(ranks=SIZE))
    assert group is not None
    return group


@cache
def folder_of(case: str) -> Path:
    return tiny_checkpoint(Path(mkdtemp()), case)


@cache
def whole(case: str) -> Model:
    return load(folder_of(case))


@cache
def seeing(case: str, num_deep: int) -> Model:
    return with_tower(whole(case), num_deep)  # type: ignore[no-any-return]


def on_rank_0(
    group: RankGroup, case: str, sight: Sight | None = None, *, pipeline: bool = False
) -> LanguageModel:
    """The model of rank 0, which alone sees."""
    model = group.load(case, folder_of(case), dtype="auto", pipeline=pipeline, watch=None)
    if sight is not None:
        part = model.part if isinstance(model, StageModel) else model
        assert isinstance(part, Model)
        part.tower = RandomTower(model.config.hidden_size, sight.num_deep)
    return model


def plain_run(case: str, options: KVOptions, asked: Asked, sight: Sight | None = None) -> Outcome:
    """A request by itself on one rank, with its adapter."""
    model = whole(case) if sight is None else seeing(case, sight.num_deep)
    how: dict[str, Any] = {"adapter": asked.adapter, "adapters": folders(case)}
    ids, pictures = list(asked.prompt_ids), asked.pictures
    return alone(model, ids, asked.params, kv=options, pictures=pictures, **how)


def most_stages(case: str) -> int:
    """That the layers of a model allow."""
    config = whole(case).config
    return config.num_layers - len(family(config.model_type).between_stages(config).bound)


@pytest.mark.alike
@pytest.mark.parametrize("pipeline", [False, True], ids=["parts", "stages"])
@given(data=st.data())
@settings(max_examples=NUM_PROGRAMS, phases=[Phase.generate], deadline=None)
@hypothesis.seed(SEED)
def test_all_at_once_over_ranks(group: RankGroup, pipeline: bool, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(STAGED if pipeline else CASES))
    options = data.draw(kv_options(case))
    specs = [spec for spec in whole(case).cache_specs if isinstance(spec, KVSpec)]
    unknown = whole(case).config.qkv_bias and not all(spec.key_bias for spec in specs)
    if unknown and options.bits[0] == 4:
        options = replace(options, bits=(8, 4))
    if case.startswith("kimi_linear"):  # the tiny one's latent vectors suit no codes
        options = replace(options, bits=(None, None))
    hypothesis.assume(not pipeline or most_stages(case) >= SIZE)
    adapters = data.draw(st.sampled_from([{}, folders(case)]))
    sights = [None, Sight(False, 0, False), Sight(False, 0 if pipeline else 2, False)]
    sight = data.draw(st.sampled_from(sights))
    num_runs = data.draw(st.sampled_from([1, 1, 2]))
    runs = [data.draw(programs(adapters, sight)) for _ in range(num_runs)]
    longest = max(asked.length for run in runs for asked in run)
    changes = {
        "kv": options,
        "num_pages": -(-longest // PAGE) + data.draw(st.sampled_from([0, 1, 3, 60])),
        "prefill_chunk": data.draw(st.sampled_from([16, 32, 64, 128])),
        "max_batch": data.draw(st.sampled_from([1, 2, 3, 5, 16])),
        "launch_ahead": data.draw(st.booleans()),
        "prefix_cache": data.draw(st.sampled_from([True, True, False])),
    }
    preempt_every = data.draw(st.sampled_from([None, None, 3, 7]))
    guess_seed = data.draw(st.none() | st.integers(0, 2**20))
    with TemporaryDirectory() as folder:
        if changes["prefix_cache"] and data.draw(st.booleans()):
            changes["disk"] = disk_at(Path(folder), case)
        for run in runs:  # each in an engine of its own, and a model that is loaded again
            plains = {str(i): plain_run(case, options, asked, sight) for i, asked in enumerate(run)}
            model = on_rank_0(group, case, sight, pipeline=pipeline)
            answers = {name: plain.token_ids for name, plain in plains.items()}
            changes["proposer"] = some_proposer(guess_seed, whole(case), answers)
            harness = Harness(model, followers=group, adapters=adapters, **changes)
            play(harness, run, preempt_every)
            for name, plain in plains.items():
                near_tie = 0.0 if options.bits == (None, None) else NEAR_TIE
                assert_same(harness.outcomes[name], plain, near_tie=near_tie)
            harness.loop.close()


def test_ranks_that_share_layers_get_features_from_rank_0(group: RankGroup) -> None:
    sight, options = Sight(False, 2, False), KVOptions()
    ids, pictures = placed(prompt(9), picture(1, 5, 8), prompt(30))
    asked = Asked(0, tuple(ids), SamplingParams(max_tokens=8, logprobs=2), pictures=pictures)
    plain = plain_run("qwen3-v4", options, asked, sight)
    model = on_rank_0(group, "qwen3-v4", sight, pipeline=False)
    harness = Harness(model, followers=group, prefill_chunk=16)
    play(harness, [asked], None)
    assert_same(harness.outcomes["0"], plain, near_tie=0.0)
    sent = harness.loop.stats()["ranks"]["bytes_sent"]["features"]
    assert sent >= 3 * 40 * model.config.hidden_size * 4
    harness.loop.close()


@pytest.mark.skipif(SIZE > 3, reason="the model has three layers")
def test_stages_refuse_pictures_that_add_to_layers_of_other_ranks(group: RankGroup) -> None:
    model = on_rank_0(group, "qwen3-v4", Sight(False, 3, False), pipeline=True)
    harness = Harness(model, followers=group)
    ids, pictures = placed(prompt(9), picture(1, 2, 2), prompt(3))
    with pytest.raises(InvalidRequestError, match="its first 3 layers, of which the first"):
        harness.add("it", ids, SamplingParams(max_tokens=2), pictures=pictures)
    harness.loop.close()


@pytest.mark.parametrize("pipeline", every(2, [False, True]), ids=["parts", "stages"])
def test_prefixes_on_disk_are_kept(group: RankGroup, pipeline: bool, tmp_path: Path) -> None:
    """But where another rank's part of a page is broken: that is computed again, and stored."""
    case, params = "qwen3_next-v5", SamplingParams(max_tokens=6)
    ids = prompt(6 * PAGE + 3)
    disk = disk_at(tmp_path, case)

    def run() -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were on disk."""
        model = on_rank_0(group, case, pipeline=pipeline)
        harness = Harness(model, followers=group, disk=disk)
        outcome = harness.run("a", list(ids), params)
        namespaces.add(harness.loop.store.disk.namespace.hex())
        harness.loop.close()
        return outcome.token_ids, outcome.cached_tokens

    namespaces: set[str] = set()
    plain = alone(whole(case), ids, params).token_ids
    assert run() == (plain, 0)
    assert run() == (plain, 6 * PAGE)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.kv")}
    folders = {path.parent for path in before}
    assert len(folders) == SIZE, "a namespace of each rank"
    (namespace,) = namespaces
    for path, data in before.items():
        if not path.parent.name.startswith(namespace):
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    tokens, cached = run()
    assert tokens == plain
    assert cached < 6 * PAGE
    assert run() == (plain, 6 * PAGE)


@pytest.mark.parametrize("pipeline", every(2, [False, True]), ids=["parts", "stages"])
def test_adapters_come_and_go_meanwhile(group: RankGroup, pipeline: bool, tmp_path: Path) -> None:
    """And one that is broken in another rank's part ends its load alone, with the reason."""
    case, names = "smollm3-v4" if pipeline else "qwen3-v4", ("first", "second")
    broken = drawn.__wrapped__(case, "second")  # a fresh one, of lengths that ranks sum
    last = max(path for path in broken.b if path.endswith(".gate_proj"))
    broken.b[last][-1] = np.nan  # of the last layer, the last column: the last rank's
    bad = write_mlx(tmp_path, broken)
    params = SamplingParams(max_tokens=24, logprobs=2)
    asked = [Asked(0, tuple(prompt(20 + i, i)), params, None, (None, *names)[i]) for i in range(3)]
    model = on_rank_0(group, case, pipeline=pipeline)
    harness = Harness(model, followers=group)
    table = harness.loop.adapters

    def add(i: int) -> None:
        harness.add(str(i), list(asked[i].prompt_ids), params, adapter=asked[i].adapter)

    add(0)
    for i, name in enumerate(names, 1):
        for _ in table.load(name, read_adapter(folders(case)[name])):
            harness.turn()
        add(i)
    harness.turn(3)
    with pytest.raises(CheckpointError, match=rf"Rank {SIZE - 1} cannot load .*NaN or infinity"):
        list(table.load("bad", read_adapter(bad)))
    for name in names:
        list(table.unload(name))
    assert not harness.loop.idle, "requests go on with what new ones cannot name"
    outcomes = harness.drain()
    for i, one in enumerate(asked):
        assert_same(outcomes[str(i)], plain_run(case, KVOptions(), one), near_tie=0.0)
    assert table.num_bytes == 0
    assert not model.adapted if not pipeline else not model.part.adapted
    harness.loop.close()


def test_a_load_that_ends_after_its_model_leaves_the_next_one_as_it_is(group: RankGroup) -> None:
    """Adapters of each model are numbered from 1."""
    case, params = "qwen3-v4", SamplingParams(max_tokens=8, logprobs=2)
    asked = Asked(0, tuple(prompt(20)), params, None, "first")
    folder, loads = folders(case)["first"], []
    for _ in range(2):
        model = on_rank_0(group, case)
        harness = Harness(model, followers=group)
        loads.append(harness.loop.adapters.load("first", read_adapter(folder)))
        next(loads[-1])
        if len(loads) == 1:
            harness.loop.close()
    list(loads[1])
    loads[0].close()
    harness.add("a", list(asked.prompt_ids), asked.params, adapter="first")
    assert_same(harness.drain()["a"], plain_run(case, KVOptions(), asked), near_tie=0.0)
    harness.loop.close()


def test_adapters_take_the_memory_of_pages_that_other_stages_have(group: RankGroup) -> None:
    """Of four layers the third has pages: on rank 0 one costs nothing."""
    case = "qwen3_next-v5"
    model = on_rank_0(group, case, pipeline=True)
    harness = Harness(model, followers=group)
    (pages,) = harness.loop.cache.groups
    before = pages.allocator.num_pages
    list(harness.loop.adapters.load("first", read_adapter(folders(case)["first"])))
    spec = next(spec for spec in model.cache_specs if isinstance(spec, KVSpec))
    page_bytes = spec.numbers * model.activation_dtype.size * PAGE
    assert pages.page_bytes == 0
    freed = (before - pages.allocator.num_pages) * page_bytes
    assert 0 <= freed - harness.loop.adapters.num_bytes < page_bytes
    harness.loop.close()


@pytest.mark.ci
def test_eight_requests_at_once_draw_the_tokens_of_one_rank(group: RankGroup) -> None:
    """Drawn, with seeds. Of each row that is computed two sums a layer go over the links, and one
    of its embedding; of the last layer's sums the rows that are read. Logits go to rank 0.
    """
    case = "llama-v4"
    asked = {
        str(i): (prompt(4 + 9 * i, i), SamplingParams(max_tokens=20, temperature=0.9, seed=i))
        for i in range(8)
    }
    model = on_rank_0(group, case)
    before = group.stats()
    harness = Harness(model, followers=group)
    for name, (ids, params) in asked.items():
        harness.add(name, list(ids), params)
    outcomes = harness.check(model=whole(case))
    after = group.stats()
    sent, received = (
        {kind: after[way][kind] - before[way].get(kind, 0) for kind in after[way]}
        for way in ("bytes_sent", "bytes_received")
    )
    rows = after["rows"] - before["rows"]
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes.values())
    num_prompt = sum(len(ids) for ids, _ in asked.values())
    assert 0 <= rows - (num_prompt + num_tokens - len(asked)) <= 8, "8 were launched in vain"
    one_sum = rows * model.config.hidden_size * 4 * 2 * (SIZE - 1) // SIZE
    last = sent["layers"] - 2 * (len(model.layers) - 1) * one_sum
    read = last * rows / one_sum / 2
    assert 0 <= read - (rows - num_prompt + len(asked)) <= 2, "a chunk that gives no token: a row"
    assert sent["embedding"] == one_sum
    assert sent.get("tokens", 0) <= rows * 4 * 2 * (SIZE - 1) // SIZE
    row_bytes = 4 * (SIZE - 1) * -(-model.config.vocab_size // SIZE)
    assert num_tokens * row_bytes <= received["logits"] <= (num_tokens + 8) * row_bytes
    assert sent.get("logits", 0) == 0
    assert sent["steps"] < 400 * (SIZE - 1) * (after["steps"] - before["steps"])
    harness.loop.close()


def test_every_stage_has_a_step_while_requests_run(group: RankGroup) -> None:
    """When a step is read, others of other rows were sent behind it, one for each other stage.

    One row has a grammar, one is drawn with a penalty on what it said: both are sampled late.
    """
    case, count = "gemma3_text-v4", 3 * SIZE
    params = [SamplingParams(max_tokens=8, repetition_penalty=1.3, seed=i) for i in range(count)]
    model = on_rank_0(group, case, pipeline=True)
    harness = Harness(model, followers=group, max_batch=16, prefill_chunk=256)
    in_flight, commit = harness.loop._in_flight, harness.loop._read_step
    seen: list[tuple[int, int]] = []

    def read(launched: Launched) -> bool:
        rows = [s for step in [launched, *in_flight] for s in step.batch.decodes.sequences]
        alone = len(harness.loop.scheduler.queues.unfinished()) == 1
        assert alone or len({s.request.id for s in rows}) == len(rows), "a row is in two steps"
        seen.append((len(launched.batch.decodes.sequences), len(in_flight)))
        return commit(launched)

    harness.loop._read_step = read  # type: ignore[method-assign]
    for i in range(count):
        grammar = FakeGrammar() if i == 1 else None
        harness.add(str(i), prompt(9, i), params[i], grammar=grammar)
    harness.check(model=whole(case))
    harness.loop.close()
    steady = [others for rows, others in seen if rows == 3]
    assert len(steady) > 4 * SIZE
    assert steady.count(SIZE - 1) > len(steady) - SIZE


def test_every_stage_has_a_step_with_proposals(group: RankGroup) -> None:
    """They are verified of other rows at the same time, also where states have to go back."""
    case, count = "qwen3_next-v5", 2 * SIZE
    params = [
        SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i) for i in range(count)
    ]
    plains = {str(i): alone(whole(case), prompt(9, i), params[i]).token_ids for i in range(count)}
    proposer = Oracle(plains, SEED)
    proposer._rests = 0.0
    model = on_rank_0(group, case, pipeline=True)
    harness = Harness(model, followers=group, proposer=proposer, prefill_chunk=256)
    in_flight, commit = harness.loop._in_flight, harness.loop._read_step
    seen: list[int] = []

    def read(launched: Launched) -> bool:
        seen.append(sum(bool(s.batch.sampling.proposals) for s in [launched, *in_flight]))
        return commit(launched)

    harness.loop._read_step = read  # type: ignore[method-assign]
    for i in range(count):
        harness.add(str(i), prompt(9, i), params[i])
    outcomes = harness.drain()
    counters = harness.loop.scheduler.counters
    harness.loop.close()
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == plains
    assert max(seen) == SIZE
    assert 0 < counters.tokens_accepted < counters.tokens_proposed


def test_the_seed_that_is_printed_draws_the_programs() -> None:
    print(f"\n{NUM_PROGRAMS} random programs over {SIZE} ranks, HYPOTHESIS_SEED={SEED}")
    assert vars(test_all_at_once_over_ranks)["_hypothesis_internal_use_seed"] == SEED
