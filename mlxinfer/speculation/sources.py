"""Options to drafts, sources, controller and proposer: the one place that assembles them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache_specs import CacheSpec
from ..config import EngineConfig
from ..engine.kernels import choose_on_this_machine
from ..engine.model_cache import absent_layers
from ..errors import InvalidRequestError
from ..models import load, whole_tables
from ..models.decoder import Model
from ..models.dflash import load_dflash
from ..models.eagle import load_eagle
from ..models.language import LanguageModel
from ..models.mtp import load_mtp
from ..models.stage import StageModel
from .block import BlockProposer
from .controller import Controller, FixedDepth
from .draft import DraftProposer
from .ngram import ForcedProposer, NgramProposer
from .options import MAX_PROPOSALS, SpeculationOptions, kind_of
from .predictor import PredictorProposer
from .speculation import ProposalSource, Speculation


@dataclass(frozen=True, slots=True)
class Draft:
    """A network that proposes tokens."""

    kind: str  # "draft", "mtp", "eagle" or "dflash"
    network: Any  # a LanguageModel, a Predictor or a BlockDraft
    num_bytes: int  # of its weights, and of tables that were read for it


def open_speculation(
    options: SpeculationOptions,
    folder: Path,
    model: LanguageModel,
    config: EngineConfig,
    kv_bytes: Callable[[int], int],
    *,
    dtype: str,
) -> tuple[EngineConfig, Speculation | None]:
    """The proposer that the options ask for, or None, and the memory that it leaves for the cache.

    Call it on the thread that runs the model.

    Args:
        kv_bytes: for both KV caches, by the bytes of a draft's weights.

    Raises:
        InvalidRequestError: this model cannot verify proposals, and they were asked for by name;
            or the draft does not go with it.
        InsufficientMemoryError: the draft model leaves no memory for the KV cache.
        ModelError: the draft model is broken or not supported.
    """
    reason = model.lacks.get("speculation")
    if reason is not None and options.method not in ("auto", "off"):
        raise InvalidRequestError.of(
            "speculate", f"is {options.method!r}, and this model takes no proposals: {reason}"
        )
    if options.is_off or reason is not None:
        return config, None
    sources: list[ProposalSource] = [ForcedProposer()]
    if options.method in ("auto", "ngram"):
        sources.append(NgramProposer())
    draft = load_draft(options, folder, model, dtype=dtype)
    if draft is not None:
        budget = kv_bytes(draft.num_bytes) - config.feature_bytes
        config, draft_budget = _share_budget(config, budget, model, draft.network)
        rejects = options.acceptance == "rejection"
        sources.append(_draft_source(model, draft, draft_budget, rejects=rejects))
    depth = options.depth
    controller = FixedDepth(depth) if options.fixed else Controller(max_depth=depth)
    return config, Speculation(sources, controller, max_depth=depth, method=options.method)


def load_draft(
    options: SpeculationOptions, folder: Path, model: LanguageModel, *, dtype: str
) -> Draft | None:
    """Load the network that the options name; None: no network proposes.

    Args:
        options: not off.

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
    known = _with_hidden_states(model, kind)
    tables, num_bytes = whole_tables(known, folder, has_logits=kind != "eagle")
    if kind == "mtp":
        head: Any = load_mtp(folder, tables)
    else:
        assert options.draft is not None
        head = (load_eagle if kind == "eagle" else load_dflash)(options.draft, tables)
    return Draft(kind, head, head.num_bytes + num_bytes)


def _with_hidden_states(model: LanguageModel, kind: str) -> Model | StageModel:
    """The model; raises InvalidRequestError where a token has no hidden state, or several."""
    if not isinstance(model, Model | StageModel):
        raise InvalidRequestError(
            f"speculate={kind!r} reads hidden states, which mlx-lm's definition of this model does "
            "not give; use 'ngram', or 'draft' with a draft model.",
            param="speculate",
        )
    streams = ["altup_num_inputs"]  # of Gemma 3n
    if kind != "mtp":  # whose heads may read several
        streams += ["hc_count", "hc_mult", "n_layers_per_attn_res_block"]  # Qwen4-Exp, Inkling
    if model.config.fields.get(*streams):
        raise InvalidRequestError(
            f"speculate={kind!r} reads one hidden state of a token, and this model has several "
            "streams of them; use 'ngram', or 'draft' with a draft model.",
            param="speculate",
        )
    return model


def _share_budget(
    config: EngineConfig, budget: int, model: LanguageModel, network: Any
) -> tuple[EngineConfig, EngineConfig]:
    """The sizes of a model's engine and of a draft's cache, which share `budget` bytes.

    The draft's KV cache has room for as many tokens as the model's, at full precision.
    """
    absent = absent_layers(model)
    specs = [spec for i, spec in enumerate(model.cache_specs) if i not in absent]
    ours = _bytes_per_token(specs, model.activation_dtype)
    network_bytes = _bytes_per_token(network.cache_specs, network.activation_dtype)
    of_draft = replace(
        config,
        kv_budget_bytes=int(budget * network_bytes / (ours + network_bytes)),
        max_context=min(config.max_context, network.config.max_context),
        kv=replace(config.kv, bits=(None, None)),
        disk=None,
    )
    return replace(config, kv_budget_bytes=budget - of_draft.kv_budget_bytes), of_draft


def _bytes_per_token(specs: Sequence[CacheSpec], dtype: mx.Dtype) -> int:
    return max(sum(spec.numbers for spec in specs) * dtype.size, 1)


def _draft_source(
    model: LanguageModel, draft: Draft, config: EngineConfig, *, rejects: bool
) -> ProposalSource:
    network, vocab_size = draft.network, model.config.vocab_size
    step_bytes = model.all_bytes if isinstance(model, StageModel) else model.num_bytes
    if draft.kind == "dflash":
        cost = network.bytes_read / step_bytes / MAX_PROPOSALS  # a pass proposes them all
        return BlockProposer(network, config, vocab_size=vocab_size, cost=cost)
    how: dict[str, Any] = {
        "vocab_size": vocab_size,
        "kernels": choose_on_this_machine(),
        "rejects": rejects,
    }
    if draft.kind == "draft":
        return DraftProposer(network, config, cost=network.num_bytes / step_bytes, **how)
    cost = network.bytes_read / step_bytes
    return PredictorProposer(network, config, name=draft.kind, cost=cost, **how)
