"""Whatever shares the engine with a request, it gets the tokens that it gets alone.

Random programs of arrivals, lengths, settings, cancels and pool sizes. Models are quantised here:
MLX's CPU kernels then compute each row by itself, so that even bits do not depend on the batch.

    MLXINFER_PROGRAMS=1000 HYPOTHESIS_SEED=7 pytest tests/engine/test_same_tokens.py -s
"""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis
import pytest
from engine.harness import PAGE, Harness, alone, prompt, tiny_model
from engine.proposers import some_proposer
from engine.recurrent import hybrid_model
from hypothesis import given, settings
from hypothesis import strategies as st
from models.zoo_table import small_model

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.models.decoder import Model

NUM_PROGRAMS = int(os.environ.get("MLXINFER_PROGRAMS", "3"))
SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
CASES = (
    *("qwen3-v4", "mistral-v4", "gemma3_text-v4", "gpt_oss-v4", "qwen3_moe-v4", "qwen3-v5"),
    *("deepseek_v3-v4", "phi3-v4", "olmo2-v4", "lfm2-v4", "qwen3_next-v4", "qwen3_5_text-v4"),
    *("qwen3_5_moe_text-v4", "granitemoehybrid-v4", "gemma2-v4", "gemma4_text-v4"),
    *(
        "kimi_linear-v4",
        "lfm2_moe-v5",
        "nemotron_h-v5",
        "falcon_h1-v5",
        "gemma4_e-v5",
        "gemma3n_text-v5",
    ),
    *("hunyuan_v1_dense-v4", "ministral3-v5", "mistral4-v5", "glm_moe_dsa-v5"),
)
HYBRIDS = {  # places of recurrent layers among those of attention
    "hybrid qwen3-v4": (0, 2),
    "hybrid gemma3_text-v4": (1, 2),
    "hybrid deepseek_v3-v4": (1,),
    "recurrent qwen3-v4": (0, 1, 2),
}


@dataclass(frozen=True)
class Arrival:
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    cancel_after: int | None  # turns


@cache
def zoo_model(name: str) -> Any:
    """A small model of one of mlx-lm's definitions."""
    return small_model(name, quantized=True)


def model_of(case: str) -> Model:
    """A tiny quantised model; a hybrid has recurrent layers instead of some of its own."""
    if case.startswith("zoo "):
        return zoo_model(case.split()[1])
    if case in HYBRIDS:
        return hybrid_model(case.split()[1], HYBRIDS[case])
    return tiny_model(case, quantized=True)


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    off = st.none()
    return st.builds(
        lambda **drawn: SamplingParams(**{k: v for k, v in drawn.items() if v is not None}),
        max_tokens=st.integers(1, 45),
        temperature=st.sampled_from([0.0, 0.0, 0.0, 0.7, 1.5]),
        seed=st.integers(0, 2**40),
        top_k=off | st.integers(1, 40),
        top_p=off | st.floats(0.3, 0.99),
        min_p=off | st.floats(0.01, 0.3),
        repetition_penalty=off | st.floats(0.8, 1.5),
        repetition_window=off | st.integers(0, 20),
        presence_penalty=off | st.floats(-1, 1),
        frequency_penalty=off | st.floats(-1, 1),
        top_n_sigma=off | st.floats(0.5, 3),
        typical_p=off | st.floats(0.3, 0.99),
        xtc_probability=off | st.floats(0, 1),
        xtc_threshold=off | st.floats(0, 0.3),
        dry_multiplier=off | st.floats(0, 3),
        dry_allowed_length=st.integers(1, 3),
        logit_bias=off | st.dictionaries(st.integers(0, 95), st.floats(-5, 5), max_size=3),
        logprobs=off | st.integers(0, 3),
        min_tokens=st.just(0) | st.just(1),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """A beginning that others may share, cut anywhere, and an end that is its own."""
    shared = draw(st.sampled_from([0, 0, 5, 16, 40, 100, 140]))
    own = draw(st.one_of(st.integers(1, 12), st.integers(1, 60)))
    base = prompt(200, draw(st.sampled_from([0, 0, 1])))
    return (*base[:shared], *prompt(own, draw(st.integers(0, 3))))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    turn, out = 0, []
    for _ in range(draw(st.one_of(st.integers(1, 6), st.integers(1, 16)))):
        turn += draw(st.sampled_from([0, 0, 0, 1, 2, 7, 20]))
        out.append(
            Arrival(
                turn,
                draw(prompts()),
                draw(params_strategy()),
                frozenset(draw(st.sets(st.integers(0, 95), max_size=3))),
                draw(st.sampled_from([None, None, None, None, 0, 1, 5, 12])),
            )
        )
    return out


def pages_for(program: list[Arrival]) -> int:
    """The fewest pages in which each request of a program can run alone."""
    longest = max(len(a.prompt_ids) + (a.params.max_tokens or 0) for a in program)
    return -(-longest // PAGE)


def run(harness: Harness, program: list[Arrival]) -> None:
    """Arrivals and cancels at their turns, then until the end."""
    for turn in range(max(a.turn + (a.cancel_after or 0) for a in program) + 1):
        for i, arrival in enumerate(program):
            if arrival.turn == turn:
                harness.add(
                    str(i), list(arrival.prompt_ids), arrival.params, stop_ids=arrival.stop_ids
                )
            if arrival.cancel_after is not None and arrival.turn + arrival.cancel_after == turn:
                harness.loop.abort(str(i))
        harness.turn()
    harness.drain()


@given(
    case=st.sampled_from([*CASES, *HYBRIDS]),
    program=arrivals(),
    spare_pages=st.sampled_from([0, 0, 1, 4, 100]),
    chunk=st.sampled_from([16, 32, 64, 128]),
    max_batch=st.sampled_from([1, 2, 3, 4, 5, 6, 16]),
    launch_ahead=st.booleans(),
    guess_seed=st.none() | st.integers(0, 2**20),
)
@settings(max_examples=NUM_PROGRAMS)
@hypothesis.seed(SEED)
def test_a_batched_program_gives_each_request_the_tokens_of_its_plain_run(
    case: str,
    program: list[Arrival],
    spare_pages: int,
    chunk: int,
    max_batch: int,
    launch_ahead: bool,
    guess_seed: int | None,
) -> None:
    model = model_of(case)
    plains = {
        str(i): alone(model, list(a.prompt_ids), a.params, stop_ids=a.stop_ids)
        for i, a in enumerate(program)
    }
    answers = {name: plain.token_ids for name, plain in plains.items()}
    harness = Harness(
        model,
        proposer=some_proposer(guess_seed, model, answers),
        num_pages=pages_for(program) + spare_pages,
        prefill_chunk=chunk,
        max_batch=max_batch,
        launch_ahead=launch_ahead,
    )
    run(harness, program)
    assert harness.loop.cache.bytes_grown <= harness.loop.cache.max_batch * 2 * sum(
        group.page_bytes for group in harness.loop.cache.groups
    ), "only tails may grow in a pool of fixed size"
    for name, plain in plains.items():
        outcome = harness.outcomes[name]
        assert outcome.error is None
        if outcome.reason is FinishReason.ABORT:
            assert outcome.token_ids == plain.token_ids[: len(outcome.token_ids)]
            continue
        assert outcome.token_ids == plain.token_ids
        assert outcome.reason is plain.reason
        assert [p.top for p in outcome.logprobs] == [] or len(outcome.logprobs) == len(
            outcome.token_ids
        )
        for ours, theirs in zip(outcome.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-3)


def test_the_seed_that_is_printed_draws_the_programs() -> None:
    print(f"\n{NUM_PROGRAMS} random programs, HYPOTHESIS_SEED={SEED}")
    assert (
        vars(test_a_batched_program_gives_each_request_the_tokens_of_its_plain_run)[
            "_hypothesis_internal_use_seed"
        ]
        == SEED
    )
