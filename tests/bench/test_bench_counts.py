"""Counts behind the benchmarks' speeds, which come out the same on every machine; their parts."""

import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import jsonschema
import numpy as np
import pytest

from mlxinfer.bench import peer
from mlxinfer.bench.report import describe_machine, ratio
from mlxinfer.errors import BackendMissingError, MlxinferError
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench import start
from tests.bench.checkpoints import (
    LAPTOP,
    TINY_WINDOWED,
    TWO_LAYERS,
    Dense,
    random_prompt,
    write_checkpoint,
)
from tests.bench.engines import Ask, OurEngine, Work, serve
from tests.bench.grammar_cases import CASES, END, large_tokenizer
from tests.bench.memory import PAGE, TOKEN_BYTES, WIDE, change, decode, waste
from tests.bench.prefix import (
    Player,
    Scale,
    agents,
    cold_start,
    conversations,
    document,
    edited,
)
from tests.bench.processes import run_python
from tests.bench.quality import compared, divergence, log_softmax

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


def test_requests_that_arrive_at_once_share_what_they_begin_with() -> None:
    (found,) = cold_start(player(), 6)
    assert found["prompt_tokens"] == 6 * (96 + SCALE.question)
    assert found["computed"] == 96 + 6 * SCALE.question


def test_a_fleet_computes_and_holds_its_catalogue_once() -> None:
    playing = player()
    (found,) = agents(playing)
    own = SCALE.agents * (SCALE.task + (SCALE.steps - 1) * (SCALE.result + 1))
    assert found["computed"] == 160 + own
    (group,) = playing.engine.loop.cache.groups
    per_agent = SCALE.task + SCALE.steps * (SCALE.answer + SCALE.result)
    most = 160 // PAGE + SCALE.agents * (per_agent // PAGE + 2)
    assert found["peak_kv_bytes"] - playing.engine.tail_bytes <= most * group.page_bytes


@pytest.mark.parametrize("dense", [TWO_LAYERS, TINY_WINDOWED], ids=["whole", "windowed"])
def test_an_edited_message_and_a_known_document_are_all_that_is_computed(dense: Dense) -> None:
    (found,) = edited(player(dense))
    assert found["computed"] == 20
    (found,) = document(player(dense))
    assert found["computed"] == 2 * SCALE.message  # of two questions after the first
    assert found["prompt_tokens"] == 2 * 120


def test_requests_share_passes_and_nothing_is_padded() -> None:
    engine = OurEngine(model_of(TWO_LAYERS))
    prompts = [random_prompt(length, TWO_LAYERS.vocab, length) for length in (3, 17, 25, 8, 31)]
    served = serve(engine, [Ask.of(str(len(ids)), ids, 20) for ids in prompts])
    assert served.num_tokens == 20 * len(prompts)
    rows = sum(map(len, prompts)) + 19 * len(prompts)
    assert engine.launched == Work(passes=20, rows=rows)


# -- memory ---------------------------------------------------------------------------------------


def wide(num_pages: int) -> OurEngine:
    return OurEngine(model_of(WIDE), num_pages=num_pages)


def test_steps_launched_ahead_do_not_copy_the_pool() -> None:
    ours = wide(2000)  # 131 MB
    (found,) = decode([ours], 4, 128, steps=2 * PAGE, rounds=1)
    pool = ours.loop.cache.bytes_allocated
    assert pool > 100e6
    assert found["extra_bytes"] < 0.1 * pool
    copied = ours.loop.cache.bytes_copied / ours.loop.scheduler.counters.steps
    assert copied <= ours.tail_bytes


def test_pages_hold_live_tokens_and_no_padding() -> None:
    found = waste(wide(300), [1500, 500, 10])
    assert found["live_bytes"] == 2010 * TOKEN_BYTES
    assert found["rounded_bytes"] == (94 + 32 + 1) * PAGE * TOKEN_BYTES
    assert found["held_bytes"] - found["tail_bytes"] <= 1.05 * found["rounded_bytes"]


def test_coming_and_going_copies_nothing_of_the_others() -> None:
    ours = wide(600)
    found = change(ours, 5, 512)
    others = 5 * 512 * TOKEN_BYTES
    assert ours.loop.cache.bytes_grown == (0 + 4) * 2 * PAGE * TOKEN_BYTES  # tails, at the fill
    assert found["join_bytes"] - found["steady_bytes"] < 0.25 * others
    assert found["leave_bytes"] - found["steady_bytes"] < 0.25 * others


# -- parts ----------------------------------------------------------------------------------------


def test_divergence_is_the_textbook_sum() -> None:
    plain = log_softmax(np.log(np.array([[0.5, 0.25, 0.25]], np.float32)))
    other = log_softmax(np.log(np.array([[0.25, 0.5, 0.25]], np.float32)))
    wanted = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert divergence(plain, other) == pytest.approx([wanted], rel=1e-6)


def test_comparison_counts_positions() -> None:
    plain = np.log(np.array([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]))
    other = np.log(np.array([[0.6, 0.4], [0.4, 0.6], [0.5, 0.5]]))
    found = compared([[0, 1, 1]], [plain], [other])
    assert found["top1"] == pytest.approx(2 / 3)
    assert found["perplexity"] == pytest.approx((1 / (0.4 * 0.6)) ** 0.5)
    assert found["kl_mean"] == pytest.approx(0.2 * np.log(1.5) / 3)


def test_documents_satisfy_their_schemas() -> None:
    for case in CASES:
        for each in case.documents:
            jsonschema.Draft202012Validator(case.schema).validate(each)


def test_a_large_tokenizer_has_its_size_and_round_trips() -> None:
    made = large_tokenizer(5000)
    assert made.get_vocab_size() == 5000
    for text in ('{"a": [1, 2]}', "Hé, 世界\n\n", "x" * 50):
        assert made.decode(made.encode(text).ids) == text
    assert made.encode(END).ids == [4999]


def test_a_process_has_costs_and_one_that_fails_is_quoted() -> None:
    ran = run_python("-c", "print(sum(range(1_000_000)))")
    assert min(ran.cost.values()) > 0
    assert ran.lines == ["499999500000"]
    with pytest.raises(MlxinferError, match="exited with 1: no such thing"):
        run_python("-c", "raise SystemExit('no such thing')")


def test_laptop_model_has_the_size_it_is_said_to_have() -> None:
    assert 54e6 < LAPTOP.num_weights < 55e6


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [(3.0, 2.0, "1.50x"), (20.0, 2.0, "10.0x"), (1000.0, 2.0, "500x"), (1.0, 0.0, "-")],
)
def test_ratio(theirs: float, ours: float, text: str) -> None:
    assert ratio(theirs, ours) == text


def test_machine_says_what_a_number_needs() -> None:
    facts = describe_machine("mlxinfer bench", blas="libopenblas.so.0")
    assert set(facts) == {"command", "machine", "load", "python", "versions", "blas"}
    assert "mlx " in facts["versions"]


def test_without_mlx_lm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise peer.PackageNotFoundError(name)

    monkeypatch.setattr(peer, "version", missing)
    with pytest.raises(BackendMissingError, match=r"mlxinfer\[bench\]"):
        start.run(model="demo", runs=1, peer=True)
