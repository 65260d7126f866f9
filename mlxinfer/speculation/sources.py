"""Options to drafts, sources, controller and proposer: the one place that assembles them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ..config import EngineConfig
from ..core import CacheSpec
from ..engine.kernels import choose_on_this_machine
from ..engine.runner import absent_layers
from ..errors import InvalidRequestError
from ..models import load, whole_tables
from ..models.decoder import Model
from ..models.dflash import BlockDraft, load_dflash
from ..models.heads import DraftHead, load_eagle, load_prediction_head
from ..models.language import LanguageModel
from ..models.stage import StageModel
from .block import BlockProposer
from .controller import Controller, FixedDepth, Policy
from .draft import DraftProposer
from .heads import HeadProposer
from .ngram import ForcedProposer, NgramProposer
from .options import MAX_PROPOSALS, SpeculationOptions, kind_of
from .source import Source
from .speculation import Speculation

Network = LanguageModel | DraftHead | BlockDraft


@dataclass(frozen=True, slots=True)
class Draft:
    """A network that proposes tokens."""

    kind: str  # "draft", "mtp", "eagle" or "dflash"
    network: Network
    num_bytes: int  # of its weights, and of tables that were read for it
    config: EngineConfig | None = None  # the sizes of its cache, see `share_budget`


def load_network(
    options: SpeculationOptions, folder: Path, model: LanguageModel, *, dtype: str
) -> Draft | None:
    """Load the network that the options name; None: no network proposes.

    Args:
        options: not off.
        folder: that the model was loaded from.
        model: that tokens are proposed for.
        dtype: of a draft model.

    Raises:
        InvalidRequestError: it does not go with this model.
        ModelError: it is broken or not supported.
    """
    kind = "mtp" if options.method == "mtp" else None
    if options.draft is not None:
        kind = kind_of(options.draft)
        if kind != options.method != "auto":
            raise InvalidRequestError(
                f"speculate is {options.method!r}, and the draft {options.draft.name} is one for "
                f"{kind!r}: name that, or leave it to 'auto'.",
                param="draft",
            )
    if kind is None:
        return None
    if kind == "draft":
        assert options.draft is not None
        network = load(options.draft, dtype=dtype)
        return Draft(kind, network, network.num_bytes)
    if not isinstance(model, Model | StageModel):
        raise InvalidRequestError(
            f"speculate={kind!r} reads hidden states, which mlx-lm's definition of this model does "
            "not give; use 'ngram', or 'draft' with a draft model.",
            param="speculate",
        )
    if model.config.fields.get("altup_num_inputs"):  # Gemma 3n
        raise InvalidRequestError(
            f"speculate={kind!r} reads one hidden state of a token, and this model has several "
            "streams of them; use 'ngram', or 'draft' with a draft model.",
            param="speculate",
        )
    tables, num_bytes = whole_tables(model, folder, has_logits=kind != "eagle")
    head: DraftHead | BlockDraft
    if kind == "mtp":
        head = load_prediction_head(folder, tables)
    else:
        assert options.draft is not None
        load_head = load_eagle if kind == "eagle" else load_dflash
        head = load_head(options.draft, tables)
    return Draft(kind, head, head.num_bytes + num_bytes)


def share_budget(
    config: EngineConfig, budget: int, model: LanguageModel, draft: Draft
) -> tuple[EngineConfig, Draft]:
    """The config of a model's engine and the draft, which share a budget of so many bytes.

    The draft's KV cache has room for as many tokens as the model's, at full precision.
    """
    network, absent = draft.network, absent_layers(model)
    own = [spec for i, spec in enumerate(model.cache_specs) if i not in absent]
    ours = _bytes_per_token(own, model.activation_dtype)
    its = _bytes_per_token(network.cache_specs, network.activation_dtype)
    draft_config = replace(
        config,
        kv_budget_bytes=int(budget * its / (ours + its)),
        max_context=min(config.max_context, network.config.max_context),
        kv=replace(config.kv, bits=(None, None)),
        disk=None,
    )
    rest = replace(config, kv_budget_bytes=budget - draft_config.kv_budget_bytes)
    return rest, replace(draft, config=draft_config)


def _bytes_per_token(specs: Sequence[CacheSpec], dtype: mx.Dtype) -> int:
    """Of keys and values as they are computed, in some layers."""
    return max(sum(spec.numbers for spec in specs) * dtype.size, 1)


def make_speculation(
    options: SpeculationOptions,
    model: LanguageModel | None = None,
    draft: Draft | None = None,
) -> Speculation:
    """The proposer that the options ask for. Call it on the thread that runs the model.

    Args:
        options: not off.
        model: that tokens are proposed for, where a draft does it.
        draft: what `load_network` found, if anything.
    """

    sources: list[Source] = [ForcedProposer()]
    if options.method in ("auto", "ngram"):
        sources.append(NgramProposer())
    if model is not None and draft is not None:
        sources.append(_draft_source(model, draft, rejects=options.acceptance == "rejection"))
    policy: Policy = Controller(max_depth=options.depth)
    if options.fixed:
        policy = FixedDepth(options.depth)
    return Speculation(sources, policy, max_depth=options.depth, method=options.method)


def _draft_source(model: LanguageModel, draft: Draft, *, rejects: bool) -> Source:
    """The source that runs a network."""
    network, config = draft.network, draft.config
    assert config is not None, "no sizes"
    vocab_size = model.config.vocab_size
    step_bytes = model.all_bytes if isinstance(model, StageModel) else model.num_bytes
    if isinstance(network, BlockDraft):
        cost = network.bytes_read / step_bytes / MAX_PROPOSALS  # a pass proposes them all
        return BlockProposer(network, config, vocab_size=vocab_size, cost=cost)
    if isinstance(network, DraftHead):
        return HeadProposer(
            network,
            config,
            name=draft.kind,
            vocab_size=vocab_size,
            cost=network.bytes_read / step_bytes,
            kernels=choose_on_this_machine(),
            rejects=rejects,
        )
    return DraftProposer(
        network,
        config,
        vocab_size=vocab_size,
        cost=network.num_bytes / step_bytes,
        kernels=choose_on_this_machine(),
        rejects=rejects,
    )
