"""What proposes in random programs: the answers themselves, right or wrong, or the real sources."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from engine.harness import config, tiny_model
from engine.oracle import Oracle
from models.tiny import tiny_config
from speculation.head_checkpoints import dflash_checkpoint, eagle_checkpoint, mtp_checkpoint
from speculation.head_names import MTP_CASES

from mlxinfer.cache_specs import (
    BlockSpec,
    CacheSpec,
    CompressedSpec,
    KVSpec,
    LatentSpec,
    PooledSpec,
)
from mlxinfer.config import EngineConfig, KVOptions
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.models.decoder import Model
from mlxinfer.models.dflash import BlockDraft, load_dflash
from mlxinfer.models.eagle import load_eagle
from mlxinfer.models.language import LanguageModel
from mlxinfer.models.mtp import load_mtp
from mlxinfer.models.predictor import Predictor
from mlxinfer.speculation.block import BlockProposer
from mlxinfer.speculation.controller import Controller, MeasuredStep, Outlook
from mlxinfer.speculation.draft import DraftProposer
from mlxinfer.speculation.ngram import ForcedProposer, NgramProposer
from mlxinfer.speculation.predictor import PredictorProposer
from mlxinfer.speculation.speculation import ProposalSource, Speculation

DRAFTS = ("qwen3-v4", "gemma3_text-v4", "deepseek_v3-v4", "gpt_oss-v4", "lfm2-v4")
WITH_MTP = {case.rpartition("-")[0]: case for case in MTP_CASES}  # model type -> case


class RandomDepths(Controller):
    """Any depths, none included."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_depth=1)
        self._rng, self._rests = rng, rng.choice([0.0, 0.3, 0.8])

    def is_open(self, num_sequences: int) -> bool:
        return self._rng.random() < 0.9

    def choose(self, outlooks: Seq[Outlook], num_sequences: int, share: float = 1.0) -> list[int]:
        if self._rng.random() < self._rests:
            return [0] * len(outlooks)
        return [self._rng.randint(0, len(outlook.chances)) for outlook in outlooks]

    def observe(self, step: MeasuredStep) -> bool:
        return self._rng.random() < 0.1


def takes_no_window(spec: CacheSpec) -> bool:
    """Whether a layer chooses what it sees among all tokens, or weighs tokens by distance."""
    return (
        isinstance(spec, PooledSpec | CompressedSpec | BlockSpec)
        or (isinstance(spec, LatentSpec) and bool(spec.index_dim))
        or (isinstance(spec, KVSpec) and spec.relative)
    )


def draft_of(
    model: LanguageModel, rng: random.Random, answers: Mapping[str, Seq[int]]
) -> DraftProposer:
    """The model itself, with proposals that hold, or another one, with little or much room."""
    draft = model if rng.random() < 0.6 else tiny_model(rng.choice(DRAFTS), quantized=True)
    sizes = sizes_of(rng)
    if any(map(takes_no_window, draft.cache_specs)):
        sizes = replace(sizes, kv=KVOptions())
    return made_half_right(
        HalfRightDraft(draft, sizes, vocab_size=model.config.vocab_size, cost=0.1), rng, answers
    )


class HalfRight:
    """A source that runs a network; its first proposals are put right at random."""

    answers: Mapping[str, Seq[int]]
    rng: random.Random

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        proposed = super().propose(sequences, depths)  # type: ignore[misc]
        return [
            Proposal(self._put_right(s, list(tokens.token_ids)))
            for s, tokens in zip(sequences, proposed, strict=True)
        ]

    def _put_right(self, sequence: Sequence, ids: list[int]) -> list[int]:
        count, start = self.rng.randint(0, len(ids)), sequence.num_answered
        right = list(self.answers[sequence.request.id][start : start + count])
        return right + ids[len(right) :]


class HalfRightDraft(HalfRight, DraftProposer):
    """A draft."""


class HalfRightHead(HalfRight, PredictorProposer):
    """A head."""


T = TypeVar("T", bound=HalfRight)


def made_half_right(source: T, rng: random.Random, answers: Mapping[str, Seq[int]]) -> T:
    source.answers, source.rng = answers, rng
    return source


def sizes_of(rng: random.Random) -> EngineConfig:
    """Little or much room for a draft."""
    return config(
        num_pages=rng.choice([8, 14, 400]),
        max_batch=rng.choice([1, 3, 8]),
        prefill_chunk=rng.choice([16, 64]),
        max_context=rng.choice([60, 4096]),
        prefix_cache=rng.random() < 0.8,
        kv=KVOptions(window=rng.choice([None, None, None, 12, 40])),
    )


@cache
def eagle_of(model: Model) -> Predictor:
    """A random EAGLE-3 head for any model."""
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    return load_eagle(eagle_checkpoint(Path(mkdtemp()), sizes, drafted=40), model)


@cache
def mtp_of(model: Model) -> Predictor:
    """A random MTP module for a model of a family that has them."""
    how = None if model.config.quantization is None else {"group_size": 32, "bits": 4}
    case = WITH_MTP[model.config.model_type]
    of_queries = model.config.fields.get("q_lora_rank")
    if model.config.qkv_bias or tiny_config(case).get("q_lora_rank") != of_queries:
        case = case.replace("-v4", "-v5")  # the module is like the model's layers
    folder = mtp_checkpoint(Path(mkdtemp()), case, how=how)
    return load_mtp(folder, model)


def head_of(model: Model, rng: random.Random, answers: Mapping[str, Seq[int]]) -> HalfRightHead:
    """It runs, and some of what it proposes holds."""
    name, head = "eagle", eagle_of(model)
    config = model.config
    of_family = config.model_type in WITH_MTP and not config.qkv_bias
    if config.model_type == "nemotron_h":  # whose module has experts, so its model has them
        of_family &= "E" in config.blocks
    if of_family and rng.random() < 0.7:
        name, head = "mtp", mtp_of(model)
    vocab_size = model.config.vocab_size
    made = HalfRightHead(head, sizes_of(rng), name=name, vocab_size=vocab_size, cost=0.1)
    return made_half_right(made, rng, answers)


@cache
def block_draft_of(model: Model) -> BlockDraft:
    """A random block draft for any model."""
    sizes = {
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "num_hidden_layers": model.config.num_layers,
    }
    taps = [0, model.config.num_layers - 1]
    return load_dflash(dflash_checkpoint(Path(mkdtemp()), sizes, taps=taps), model)


# Types of models.
WITH_STREAMS = ("gemma3n", "qwen4_exp", "glm5_next", "deepseek_v4", "xing4_0", "inkling2")


def has_hidden_states(model: LanguageModel) -> bool:
    """Whether heads can read one hidden state of each token; some models have several streams."""
    return isinstance(model, Model) and not model.config.model_type.startswith(WITH_STREAMS)


def some_proposer(
    seed: int | None, model: LanguageModel, answers: Mapping[str, Seq[int]]
) -> Proposer | None:
    """A proposer of random kind and settings; None without a seed."""
    if seed is None:
        return None
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return Oracle(answers, seed)
    names = rng.choice(
        [("ngram",), ("draft",), ("forced", "ngram", "draft"), ("head",), ("ngram", "block")]
    )
    if names[-1] in ("head", "block") and not has_hidden_states(model):
        names = ("ngram",)

    made: list[ProposalSource] = []
    for name in names:
        if name == "ngram":
            made.append(NgramProposer(searches=rng.choice([1, 8])))
        elif name == "head":
            assert isinstance(model, Model)
            made.append(head_of(model, rng, answers))
        elif name == "block":
            assert isinstance(model, Model)
            draft, vocab_size = block_draft_of(model), model.config.vocab_size
            made.append(BlockProposer(draft, config(), vocab_size=vocab_size, cost=0.1))
        else:
            made.append(draft_of(model, rng, answers) if name == "draft" else ForcedProposer())
    depth = rng.choice([1, 4, 7])
    policy: Controller = Controller(max_depth=depth) if rng.random() < 0.2 else RandomDepths(rng)
    return Speculation(made, policy, max_depth=depth)
