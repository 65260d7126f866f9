"""Conversations with a hybrid, their last message changed, go on where the change begins."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from models.random_weights import tiny_tensors
from models.tiny import tiny_config

from mlxinfer import LLM, SamplingParams
from mlxinfer.session.request_builder import LAST_TURNS, turn_ends

DEMO = Path(__file__).parents[1] / "data" / "demo-bf16"
SYSTEM = " ".join(f"Rule {i}: answer briefly, in plain words." for i in range(12))
ANSWER = "As I said: " + ", ".join(f"point {i} stands" for i in range(12))
TURNS = 3


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """Mamba-2 and attention with random weights, and a tokenizer with a template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    demo = json.loads((DEMO / "config.json").read_text())
    config = tiny_config("granitemoehybrid") | {
        key: demo[key] for key in ("vocab_size", "eos_token_id", "max_position_embeddings")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(value) for name, value in tiny_tensors(config).items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    with LLM(tmp_path, max_memory="256MB") as opened:
        yield opened


def test_edited_conversations_reuse_most_of_their_prompts(llm: LLM) -> None:
    """Beside it: mlx-lm's caches of such models cannot be cut back, so that it reuses nothing."""
    params, prompt_tokens, cached = SamplingParams(max_tokens=8, ignore_eos=True), 0, 0
    llm.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}], params)
    for conversation in range(3):
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(TURNS):
            asked = {"role": "user", "content": f"What of {conversation} and {turn}?"}
            llm.chat([*messages, asked], params)
            edited = {"role": "user", "content": f"No: of {turn}, not of {conversation}?"}
            result = llm.chat([*messages, edited], params)
            prompt_tokens += result.prompt_tokens
            cached += result.cached_tokens
            messages += [edited, {"role": "assistant", "content": ANSWER}]
    print(f"{cached} of {prompt_tokens} prompt tokens reused")
    assert cached >= 0.85 * prompt_tokens


def test_few_turns_are_kept() -> None:
    ends = frozenset({0})
    assert turn_ends([5, 6, 7], ends) == ()
    assert turn_ends([5, 0, 7], ends) == (2,)
    assert turn_ends([5, 0, 7, 0, 8], ends) == (2, 4)
    long = turn_ends([1, 0] * 20, ends)
    assert long == (2, *range(42 - 2 * LAST_TURNS, 42, 2))
