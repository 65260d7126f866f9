"""Speculation through LLM and commands, with the bundled models: counted, not timed."""

import json
import shutil
from pathlib import Path

import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness

from benchmarks.speculate import PROMPTS, answers_of
from mlxinfer import LLM, SamplingParams, hub
from mlxinfer.errors import InvalidRequestError
from mlxinfer.models import load
from mlxinfer.session.options import EngineOptions
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.ngram import NgramProposer
from mlxinfer.speculation.sources import open_speculation
from mlxinfer.speculation.speculation import Speculation
from mlxinfer.text import Tokenizer

pytestmark = [pytest.mark.ci, pytest.mark.demo]

HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "held_out.txt"


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_the_demo_and_its_draft_give_more_than_three_tokens_a_step(batch: int) -> None:
    draft = hub.resolve("demo-draft")
    fixed = EngineOptions(speculate="draft", draft=draft, max_draft=4, fixed_proposals=True)
    counted = answers_of(hub.resolve("demo"), fixed, PROMPTS, batch, 40)
    assert counted.num_tokens / counted.num_steps >= 3.3


class Saying(FakeGrammar):
    """Lets an answer say one text alone, as a model would that was asked to copy it."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__()
        self.token_ids, self.length = token_ids, len(token_ids)

    def allowed(self, vocab: int = 0) -> list[int]:
        return [self.token_ids[len(self.taken)]]

    def forced(self) -> list[int]:
        return []


def test_a_text_repeated_with_one_change_takes_less_than_a_quarter_of_the_steps() -> None:
    folder = hub.resolve("demo-draft")
    tokenizer = Tokenizer.from_folder(folder)
    text = HELD_OUT.read_text()[:800]
    place = text.index(" ", 400)
    changed = tokenizer.encode(f"{text[:place]} indeed{text[place:]}")
    speculation = Speculation([NgramProposer()], FixedDepth(7), max_depth=7, method="ngram")
    harness = Harness(load(folder), proposer=speculation)
    prompt_ids = tokenizer.encode(f"Repeat this text with one change:\n{text}")
    params = SamplingParams(max_tokens=len(changed))
    assert harness.run("a", prompt_ids, params, grammar=Saying(changed)).token_ids == changed
    assert len(changed) / harness.loop.scheduler.counters.steps >= 4


@pytest.mark.alike
@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_llm_with_a_draft_gives_the_same_answer_and_says_what_was_drafted(acceptance: str) -> None:
    params = SamplingParams(max_tokens=40)
    with LLM("demo", speculate="off") as llm:
        plain = llm.generate(PROMPTS[0], params)
        assert "speculation" not in llm.stats()
    with LLM("demo", draft="demo-draft", acceptance=acceptance, max_batch=4) as llm:
        result = llm.generate(PROMPTS[0], params)
        stats = llm.stats()["speculation"]
        off = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, speculate=False))
    assert result.token_ids == plain.token_ids == off.token_ids
    assert (result.timing.drafted, result.timing.accepted) == (stats["drafted"], stats["accepted"])
    assert (off.timing.drafted, off.timing.accepted) == (0, 0)
    assert stats["method"] == "auto"
    assert set(stats["sources"]) == {"forced", "ngram", "draft"}


def test_a_drawn_answer_without_a_seed_goes_through_a_draft() -> None:
    with LLM("demo", speculate="draft", draft="demo-draft") as llm:
        result = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=1.0))
    assert len(result.token_ids) <= 20


def test_a_draft_with_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(hub.resolve("demo-draft"), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġa"] = vocab["Ġa"], vocab["Ġthe"]
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match="has other tokens than the model: token"):
        LLM("demo", draft=folder)


def test_the_draft_takes_its_share_of_the_memory() -> None:
    with LLM("demo", speculate="off", max_memory="24MB") as llm:
        whole = sum(g["pages"] * g["page_bytes"] for g in llm.stats()["groups"])
    with LLM("demo", draft="demo-draft", max_memory="24MB") as llm:
        rest = sum(g["pages"] * g["page_bytes"] for g in llm.stats()["groups"])
    assert 0.7 * whole < rest < 0.9 * whole  # the draft's tokens are a sixth of the model's


def test_a_drafts_weights_and_cache_are_taken_from_the_memory_of_the_model() -> None:
    """What is left beside them may be decided by the rank with the least room."""
    options, folder = EngineOptions(draft=hub.resolve("demo-draft")), hub.resolve("demo")
    model, draft = load(folder), load(hub.resolve("demo-draft"))

    def kv_bytes(draft_bytes: int) -> int:
        return 10_000_000 + draft.num_bytes - draft_bytes

    config = options.config(model, None, kv_bytes(0))
    rest, proposer = open_speculation(
        options.speculation, folder, model, config, kv_bytes, dtype="auto"
    )
    assert proposer is not None
    assert 7_000_000 < rest.kv_budget_bytes < 9_000_000


def test_a_model_that_takes_no_proposals_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer.models.decoder import Model

    made = Model.__init__

    def lacking(self: Model, *given: object, **named: object) -> None:
        made(self, *given, **named)
        self.lacks = {"speculation": "its caches cannot be taken back."}

    monkeypatch.setattr(Model, "__init__", lacking)
    with LLM("demo") as llm:
        assert "speculation" not in llm.stats()
    with pytest.raises(InvalidRequestError, match="takes no proposals: its caches cannot"):
        LLM("demo", speculate="ngram")
