"""Counts behind the benchmarks' speeds, which come out the same on every machine; their parts."""

import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from benchmarks import memory
from benchmarks.checkpoints import TINY_WINDOWED, TWO_LAYERS, Dense, random_prompt, write_checkpoint
from benchmarks.engines import Ask, OurEngine, Work, serve
from benchmarks.memory import PAGE
from benchmarks.prefix import (
    Player,
    Scale,
    agents,
    conversations,
    document,
    edited,
    tree_of_thoughts,
)
from benchmarks.processes import run_python
from benchmarks.quality import compared, divergence, log_softmax
from mlxinfer.bench import peer
from mlxinfer.bench.report import describe_machine
from mlxinfer.errors import BackendMissingError, MlxinferError
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

SCALE = Scale(
    conversations=12, opening=40, message=20, answer=4, system=96, agents=3, steps=3, catalogue=160,
    document=100, questions=3,
)  # fmt: skip


@cache
def model_of(dense: Dense) -> Model:
    return load(write_checkpoint(Path(mkdtemp()), dense))


def player(dense: Dense = TWO_LAYERS) -> Player:
    vocab = min(TWO_LAYERS.vocab, dense.vocab)
    return Player(OurEngine(model_of(dense)), vocab, SCALE, time.perf_counter)


def test_a_turn_computes_its_message_and_the_last_token_of_the_answer() -> None:
    turns = conversations(player())
    count = SCALE.conversations
    assert [turn["computed"] for turn in turns] == [count * 40, count * 21, count * 21]
    assert [turn["prompt_tokens"] for turn in turns] == [count * 40, count * 64, count * 88]


def test_a_fleet_computes_and_holds_its_catalogue_once() -> None:
    playing = player()
    (served,) = agents(playing)
    num_own = SCALE.agents * (SCALE.task + (SCALE.steps - 1) * (SCALE.result + 1))
    assert served["computed"] == 160 + num_own
    (group,) = playing.engine.loop.cache.groups
    per_agent = SCALE.task + SCALE.steps * (SCALE.answer + SCALE.result)
    most = 160 // PAGE + SCALE.agents * (per_agent // PAGE + 2)
    assert served["peak_kv_bytes"] - playing.engine.tail_bytes <= most * group.page_bytes


@pytest.mark.parametrize("dense", [TWO_LAYERS, TINY_WINDOWED], ids=["whole", "windowed"])
def test_an_edited_message_and_a_known_document_are_all_that_is_computed(dense: Dense) -> None:
    (served,) = edited(player(dense))
    assert served["computed"] == 20
    (served,) = document(player(dense))
    assert served["computed"] == 2 * SCALE.message  # of two questions after the first
    assert served["prompt_tokens"] == 2 * 120


def test_branches_of_a_tree_compute_what_is_theirs() -> None:
    """Of equal prompts that come together, one computes the whole pages, each what is behind."""
    (served,) = tree_of_thoughts(player())
    num_own = SCALE.question + 1  # and the last token of the answer
    longer = SCALE.opening + SCALE.answer + SCALE.question
    thoughts, ways = (SCALE.opening + 2 * (SCALE.opening % PAGE)), 3 * num_own + 6 * (longer % PAGE)
    assert served["computed"] == thoughts + ways + 9 * num_own


def test_requests_share_passes_and_nothing_is_padded() -> None:
    engine = OurEngine(model_of(TWO_LAYERS))
    prompts = [random_prompt(length, TWO_LAYERS.vocab, length) for length in (3, 17, 25, 8, 31)]
    served = serve(engine, [Ask.of(str(len(ids)), ids, 20) for ids in prompts])
    assert served.num_tokens == 20 * len(prompts)
    rows = sum(map(len, prompts)) + 19 * len(prompts)
    assert engine.launched == Work(passes=20, rows=rows)


# -- parts ----------------------------------------------------------------------------------------


def test_divergence_is_the_textbook_sum() -> None:
    plain = log_softmax(np.log(np.array([[0.5, 0.25, 0.25]], np.float32)))
    other = log_softmax(np.log(np.array([[0.25, 0.5, 0.25]], np.float32)))
    wanted = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert divergence(plain, other) == pytest.approx([wanted], rel=1e-6)


def test_comparison_counts_positions() -> None:
    plain = np.log(np.array([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]))
    other = np.log(np.array([[0.6, 0.4], [0.4, 0.6], [0.5, 0.5]]))
    actual = compared([[0, 1, 1]], [plain], [other])
    assert actual["top1"] == pytest.approx(2 / 3)
    assert actual["perplexity"] == pytest.approx((1 / (0.4 * 0.6)) ** 0.5)
    assert actual["kl_mean"] == pytest.approx(0.2 * np.log(1.5) / 3)


def test_a_process_has_costs_and_one_that_fails_is_quoted() -> None:
    ran = run_python("-c", "print(sum(range(1_000_000)))")
    assert min(ran.cost.values()) > 0
    assert ran.lines == ["499999500000"]
    with pytest.raises(MlxinferError, match="exited with 1: no such thing"):
        run_python("-c", "raise SystemExit('no such thing')")


def test_machine_says_what_a_number_needs() -> None:
    facts = describe_machine("mlxinfer bench", blas="libopenblas.so.0")
    assert set(facts) == {"command", "machine", "load", "python", "versions", "blas"}
    assert "mlx " in facts["versions"]


def test_without_mlx_lm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise peer.PackageNotFoundError(name)

    monkeypatch.setattr(peer, "version", missing)
    with pytest.raises(BackendMissingError, match=r"\.\[bench\]"):
        memory.run(small=True, peer=True)
