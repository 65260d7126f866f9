"""From options to a running engine: memory found, model loaded on the engine's own thread."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..backend import limit_memory, require_mlx
from ..config import EngineConfig
from ..errors import EngineClosedError, InvalidRequestError
from ..memory import human_bytes, total_memory_bytes
from ..models import Watch, load_any, stoppable
from ..text import Tokenizer
from .options import EngineOptions

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.loop import Loop
    from ..engine.proposals import Proposer
    from ..models.language import LanguageModel
    from ..ranks.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of one loaded model."""

    name: str
    path: Path
    architecture: str
    num_layers: int
    vocab_size: int
    max_context: int  # tokens
    weights_bytes: int
    kv_bytes_per_token: int  # of all layers; windows hold no more than their length
    quantization: str | None  # "4-bit affine, group 64"
    eos_token_ids: tuple[int, ...]
    sees: bool = False  # it reads pictures
    chats: bool = False  # it has a chat template
    thinking: tuple[str, ...] = ()  # what its template can be told: "off" and "on", or levels
    alone_because: str | None = None  # why it runs one sequence after another; None: batched
    task: str = "generate"  # or "embed", "score"
    embedding_dim: int | None = None  # numbers of a vector, of models that embed

    @property
    def summary(self) -> str:
        bits = f", {self.quantization}" if self.quantization else ""
        alone = ", one sequence after another" if self.alone_because else ""
        kind = {"embed": f", vectors of {self.embedding_dim}", "score": ", scores"}
        purpose = kind.get(self.task, "")
        return f"{self.architecture}, {human_bytes(self.weights_bytes)}{bits}{alone}{purpose}"

    def _repr_html_(self) -> str:
        from ..display.cards import facts_card

        facts = {
            "architecture": self.architecture,
            "layers": self.num_layers,
            "vocabulary": self.vocab_size,
            "context": f"{self.max_context:,} tokens",
            "weights": human_bytes(self.weights_bytes),
            "quantised": self.quantization,
            "reads": "text and pictures" if self.sees else "text",
            "KV cache": f"{human_bytes(self.kv_bytes_per_token)} a token",
            "folder": self.path,
        }
        if self.alone_because:
            facts["one sequence after another"] = self.alone_because
        return facts_card(self.name, facts)


def describe(name: str, path: Path, model: "LanguageModel") -> ModelInfo:
    config, spec = model.config, model.config.quantization
    default = spec.default if spec is not None else None
    return ModelInfo(
        name=name,
        path=path,
        architecture=config.model_type,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        weights_bytes=model.num_bytes,
        kv_bytes_per_token=sum(s.numbers * model.activation_dtype.size for s in model.cache_specs),
        quantization=(
            f"{default.bits}-bit {default.mode}, group {default.group_size}" if default else None
        ),
        eos_token_ids=config.eos_token_ids,
        sees=model.tower is not None,
        alone_because=config.alone_because,
    )


def open_engine(
    name: str, folder: Path, options: EngineOptions, *, owner: object, watch: Watch | None = None
) -> "tuple[Engine, ModelInfo]":
    """Load the model in `folder` on the engine's own thread.

    Args:
        owner: the engine is closed when this object is collected.
        watch: is called with the bytes of weights that are loaded, and with all of them.
    """
    require_mlx()  # says why, where what follows cannot import MLX
    from ..engine.engine import Engine, generation
    from ..engine.followers import NO_FOLLOWERS

    watch, stop = stoppable(watch)
    group = _group(name, folder, options, partial(watch, 0, 0))
    load = partial(_load, name, folder, options, group, watch)
    engine = Engine(generation(load, group or NO_FOLLOWERS), owner=owner, stop_loading=stop)
    if group is not None:
        group.on_failure = engine.fail
    return engine, engine.call(partial(_loaded, name, folder))


def _loaded(name: str, folder: Path, loop: "Loop") -> ModelInfo:
    """Load the model within its memory limit; returns its facts. On the engine's thread."""
    model, config = loop.model, loop.config
    limit_memory(model, model.num_bytes + config.kv_budget_bytes + config.adapter_bytes)
    return describe(name, folder, model)


def _load(
    name: str, folder: Path, options: EngineOptions, group: "RankGroup | None", watch: Watch
) -> "tuple[LanguageModel, EngineConfig, Proposer | None]":
    from ..speculation.sources import open_speculation

    disk, peers = options.stores(folder)
    model: LanguageModel
    if group is None:
        model = load_any(folder, dtype=options.dtype, watch=watch, experts=options.experts)
    else:
        pipeline = options.spread.pipeline
        model = group.load(name, folder, dtype=options.dtype, pipeline=pipeline, watch=watch)

    def kv_bytes(draft_bytes: int) -> int:
        """Bytes of the KV cache on each rank, if rank 0 also has the weights of a draft."""
        weights = model.num_bytes + draft_bytes
        if group is None or options.max_memory is not None:
            return options.kv_bytes(weights)
        return group.kv_bytes(options.kv_bytes, weights, adapter_bytes=options.adapter_bytes)

    config = options.config(model, disk, kv_bytes(0), peers)
    return model, *open_speculation(
        options.speculation, folder, model, config, kv_bytes, dtype=options.dtype
    )


def _group(
    name: str, folder: Path, options: EngineOptions, check: Callable[[], None]
) -> "RankGroup | None":
    """The ranks that share the model; None: one process runs all of it.

    In a process that is another rank than 0, this call works for rank 0 until the group ends, and
    then raises EngineClosedError. `check` is called while it waits for other ranks, and may raise.
    """
    if options.spread.is_alone:
        return None
    from ..ranks.follower import follow
    from ..ranks.group import open_group
    from ..ranks.hosts import shared_secret

    place = options.spread.elsewhere
    if place is not None and place.rank:
        follow(place, shared_secret(), lambda name: folder)
        raise EngineClosedError(f"Rank 0 has ended, and rank {place.rank}, this process, with it.")
    return open_group(options.spread, name, check)


def check_draft(tokenizer: Tokenizer, folder: Path) -> None:
    difference = tokenizer.difference(Tokenizer.from_folder(folder))
    if difference is not None:
        raise InvalidRequestError(
            f"The draft model in {folder} has other tokens than the model: {difference}. Choose "
            "one of the same family with the same tokenizer.",
            param="draft",
        )


def require_room(name: str, folder: Path, options: EngineOptions) -> None:
    """Refuse a model that does not fit into this machine's memory, before its weights are read.

    The options of a server's model have `room_bytes`, because the server has checked it already.
    If the caller states `max_memory`, the limit is all of the machine's memory. If experts are read
    when they are needed, only the experts that stay in memory count.
    """
    from ..memory.fit import require_fit  # imports mlx

    if options.room_bytes is not None or not options.spread.is_alone:
        return
    limit = None if options.max_memory is None else total_memory_bytes()
    require_fit(
        name,
        folder,
        weights_bytes=options.held_bytes(folder),
        limit_bytes=limit,
        context=options.max_context,
        kv=options.kv,
    )
