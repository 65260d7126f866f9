"""What proposes in random programs: the answers themselves, right or wrong, or the real sources."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.harness import config, tiny_model
from engine.oracle import Oracle

from mlxinfer.core import StateSpec
from mlxinfer.engine.scheduler import Proposer
from mlxinfer.models.decoder import LanguageModel
from mlxinfer.speculation.controller import Controller, MeasuredStep, Outlook, Policy
from mlxinfer.speculation.draft import DraftProposer
from mlxinfer.speculation.forced import ForcedProposer
from mlxinfer.speculation.ngram import NgramProposer
from mlxinfer.speculation.source import Score, Source
from mlxinfer.speculation.speculation import Speculation

DRAFTS = ("qwen3-v4", "gemma3_text-v4", "deepseek_v3-v4", "gpt_oss-v4")  # windows and latents, too


class RandomDepths:
    """Any depths, none included."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._rests = rng, rng.choice([0.0, 0.3, 0.8])

    def is_open(self, num_sequences: int) -> bool:
        return self._rng.random() < 0.9

    def choose(self, outlooks: Seq[Outlook], num_sequences: int) -> list[int]:
        if self._rng.random() < self._rests:
            return [0] * len(outlooks)
        return [self._rng.randint(0, len(outlook.chances)) for outlook in outlooks]

    def observe(self, step: MeasuredStep) -> bool:
        return self._rng.random() < 0.1


def draft_of(model: LanguageModel, rng: random.Random) -> DraftProposer:
    """The model itself, whose proposals hold, or another one, with little or much room."""
    same = not any(isinstance(spec, StateSpec) for spec in model.cache_specs)
    draft = model if same and rng.random() < 0.6 else tiny_model(rng.choice(DRAFTS), quantized=True)
    sizes = config(
        num_pages=rng.choice([8, 14, 400]),
        max_batch=rng.choice([1, 3, 8]),
        prefill_chunk=rng.choice([16, 64]),
        max_context=rng.choice([60, 4096]),
        prefix_cache=rng.random() < 0.8,
    )
    return DraftProposer(draft, sizes, vocab_size=model.config.vocab_size, cost=0.1)


def some_proposer(
    seed: int | None, model: LanguageModel, answers: Mapping[str, Seq[int]]
) -> Proposer | None:
    """A proposer of random kind and settings; None without a seed."""
    if seed is None:
        return None
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return Oracle(answers, seed)
    names = rng.choice([("ngram",), ("draft",), ("forced", "ngram", "draft")])

    def sources(score: Score) -> list[Source]:
        made: list[Source] = []
        for name in names:
            if name == "ngram":
                made.append(NgramProposer(score, searches=rng.choice([1, 8])))
            else:
                made.append(draft_of(model, rng) if name == "draft" else ForcedProposer())
        return made

    depth = rng.choice([1, 4, 7])
    policy: Policy = Controller(max_depth=depth) if rng.random() < 0.2 else RandomDepths(rng)
    return Speculation(sources, policy, max_depth=depth)
