"""Model definitions: a checkpoint folder in, a callable decoder out.

All readers raise CheckpointError for a broken file, and UnsupportedModelError for what this
version cannot run.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, check_switch
from ..memory import parse_bytes

if TYPE_CHECKING:
    from ..layers.ranks import Link
    from .config import ModelConfig
    from .decoder import Model
    from .language import LanguageConfig, LanguageModel
    from .stage import StageModel
    from .weights.expert_store import ExpertStore
    from .weights.placing import InSlots
    from .weights.share import Share
    from .weights.tensors import FileTensor


log = logging.getLogger("mlxinfer.models")
Watch = Callable[[int, int], None]  # bytes of weights that are loaded, and all of them


def stoppable(watch: Watch | None) -> tuple[Watch, Callable[[], None]]:
    """A wrapped `watch` of loading, and a function that makes the loading end."""
    from ..errors import EngineClosedError

    stopped: list[bool] = []

    def watching(num_loaded: int, num_bytes: int) -> None:
        if stopped:
            raise EngineClosedError("The loading of the model was interrupted.")
        if watch is not None:
            watch(num_loaded, num_bytes)

    return watching, lambda: stopped.append(True)


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Experts that are read when tokens need them."""

    num_bytes: int  # of those in memory
    slow: bool = False  # even where tokens would take seconds

    @classmethod
    def taken_from(cls, arguments: dict[str, Any], *, alone: bool) -> "ExpertOptions | None":
        """LLM's expert_memory and slow_experts, taken out; None: all experts are loaded.

        Args:
            alone: the model is not spread over ranks.

        Raises:
            InvalidRequestError: no size, slow_experts without one, or ranks.
        """
        memory, slow = arguments.pop("expert_memory", None), arguments.pop("slow_experts", False)
        check_switch("slow_experts", slow)
        if memory is not None and not alone:
            raise InvalidRequestError(
                "expert_memory reads experts on one machine, and ranks have all of theirs in "
                "memory; leave one of them out.",
                param="expert_memory",
            )
        if memory is not None:
            return cls(parse_bytes(memory, param="expert_memory"), slow)
        if slow:
            raise InvalidRequestError(
                "slow_experts goes with expert_memory: say how much of the experts is kept in "
                "memory, such as '8GB'.",
                param="slow_experts",
            )
        return None


def load_any(
    folder: Path,
    *,
    dtype: str = "auto",
    watch: Watch | None = None,
    experts: ExpertOptions | None = None,
) -> "LanguageModel":
    """Load a native family, or mlx-lm's definition if there is no native family; see `load`.

    It is loaded in one piece, without a report of progress.
    """
    if _is_native(folder):
        return load(folder, dtype=dtype, watch=watch, experts=experts)
    if experts is not None:
        from ..errors import UnsupportedModelError

        raise UnsupportedModelError(
            "This architecture runs by mlx-lm's definition of it, which holds all experts: leave "
            "expert_memory out."
        )
    from . import zoo

    return zoo.load(folder, dtype=dtype)


def load_any_config(folder: Path) -> "LanguageConfig":
    """The config of the model in a folder, native or zoo. Reads no weights; raises as `load`."""
    from .config import load_config

    if _is_native(folder):
        return load_config(folder)
    from . import zoo

    return zoo.load_config(folder)


def load_share(
    folder: Path,
    rank: int,
    link: "Link",
    *,
    dtype: str = "auto",
    pipeline: bool = False,
    watch: Watch | None = None,
    read: Callable[[int], None] = lambda num_bytes: None,
) -> "Model | StageModel":
    """Load the part of a model that one of several ranks has. Every rank calls this.

    Only that part of the files is read. Rank 0 has the part that sees pictures.

    Args:
        folder: see `load`.
        pipeline: its part is some of the layers; else it is a part of every layer.
        dtype, watch: see `load`.
        read: is called with the bytes that were read from the files.

    Raises:
        UnsupportedModelError: the model cannot be spread over these ranks; the message says why.
        others: see `load`.
    """
    from .config import load_config
    from .registry import family
    from .towers.loading import load_tower, num_bytes, tower_tensors
    from .weights.share import Share
    from .weights.tensors import load_tensors

    share = None if pipeline else Share(rank, link.size)
    require_native(folder)
    config = load_config(folder, share)
    options = _reading(config, family(config.model_type), dtype, watch)
    tensors = load_tensors(folder)
    if rank == 0:
        _note_heads(tensors, config)
    seeing = {} if rank else tower_tensors(folder, tensors)
    loaded, part, bytes_read = _load_part(tensors, config, share, link, options)
    part.tower = load_tower(folder, seeing, part)
    read(bytes_read + num_bytes(seeing))
    return loaded


def _load_part(
    tensors: dict[str, "FileTensor"],
    config: "ModelConfig",
    share: "Share | None",
    link: "Link",
    options: dict[str, Any],
) -> tuple["Model | StageModel", "Model", int]:
    """The part that a rank runs, its decoder, and the bytes read; `share` None: whole layers."""
    from .registry import family
    from .stage import load_stage
    from .weights.source import Checkpoint
    from .weights.weights import Weights

    builder = family(config.model_type)
    if share is None:
        stage, bytes_read = load_stage(tensors, config, builder, link, **options)
        return stage, stage.part, bytes_read
    weights = Weights(Checkpoint(tensors, builder.tensor_name, share), link=link, **options)
    part: Model = builder.build(config, weights)
    part.link = link
    return part, part, weights.bytes_read


def whole_tables(
    model: "Model | StageModel", folder: Path, *, has_logits: bool
) -> tuple["Model", int]:
    """The tables that a head on rank 0 shares with a model, and the extra bytes that they take.

    Embedding and output projection in one piece: a head is not spread, and needs no message of
    other ranks. Where each rank has some of their rows, rank 0 reads them whole.

    Args:
        has_logits: the head has no output projection of its own.
    """
    from dataclasses import replace

    from ..layers.ranks import SplitEmbedding
    from .config import load_config
    from .registry import family
    from .stage import StageModel, load_tables
    from .weights.tensors import FLOATS, load_tensors

    if isinstance(model, StageModel):
        return model.part, 0
    if not isinstance(model.embed_tokens, SplitEmbedding):
        return model, 0
    config = replace(load_config(folder), without_lm_head=not has_logits)
    builder = family(config.model_type)
    options = {"quantization": config.quantization, "dtype": FLOATS[model.activation_dtype]}
    tables = load_tables(load_tensors(folder), config, builder, **options)
    return tables, tables.num_bytes


def require_native(folder: Path) -> None:
    """Raise UnsupportedModelError where mlx-lm's definition would run the model in a folder."""
    from ..errors import UnsupportedModelError

    if not _is_native(folder):
        raise UnsupportedModelError(
            "This architecture runs by mlx-lm's definition of it, which cannot be spread over "
            "ranks here: run it with ranks=1."
        )


def _is_native(folder: Path) -> bool:
    from .jsonfields import read_json
    from .registry import is_native

    return is_native(read_json(folder / "config.json"))


def load(
    folder: Path,
    *,
    dtype: str = "auto",
    watch: Watch | None = None,
    experts: ExpertOptions | None = None,
) -> "Model":
    """The model in a checkpoint folder, evaluated and ready.

    Args:
        folder: config.json and safetensors, as the hub has them.
        dtype: "auto" (the checkpoint's own on Metal, but bfloat16 where float16 is too small for
            the architecture; float32 on the CPU), "float32", "bfloat16" or "float16".
        watch: is called as weights are loaded.
        experts: read them when tokens need them; None: they are loaded with the rest.

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: the architecture, or a feature of it, is not supported.
        CheckpointError: a file is broken or disagrees with the config.
        InvalidRequestError: an unknown dtype.
        InsufficientMemoryError: `experts` is so little that it makes no sense.
    """
    from .config import load_config
    from .registry import family
    from .towers.loading import load_tower, num_bytes, tower_tensors
    from .weights.placing import IN_MEMORY, InSlots
    from .weights.source import Checkpoint
    from .weights.tensors import load_tensors
    from .weights.weights import Weights

    config = load_config(folder)
    _require_text(config, folder)
    builder = family(config.model_type)
    tensors = load_tensors(folder)
    _note_heads(tensors, config)
    seeing = tower_tensors(folder, tensors)
    source = Checkpoint(tensors, builder.tensor_name)
    del tensors  # it would hold all that was read until the model is whole
    options = _reading(config, builder, dtype, _part_of(watch, after=num_bytes(seeing)))
    slots = None if experts is None else InSlots()
    model: Model = builder.build(config, Weights(source, slots or IN_MEMORY, **options))
    read = _part_of(watch, before=source.num_bytes)
    model.tower = load_tower(folder, seeing, model, watch=read)
    if experts is not None and slots is not None:
        model.expert_store = _opened(slots, experts, model, config)
    return model


def _opened(
    slots: "InSlots", experts: ExpertOptions, model: "Model", config: "ModelConfig"
) -> "ExpertStore":
    return slots.open_experts(
        experts.num_bytes,
        dtype=model.activation_dtype,
        per_token=config.experts_per_token,
        forced=experts.slow,
    )


def _note_heads(names: Iterable[str], config: "ModelConfig") -> None:
    """Say which heads of a checkpoint are not read; `names`: of its tensors."""
    from .registry import predictors_read, predictors_text

    count, read = predictors_read(names, config)
    if read < count:
        log.warning("%s: the checkpoint has %s", config.model_type, predictors_text(count, read))


def _require_text(config: "ModelConfig", folder: Path) -> None:
    from ..errors import UnsupportedModelError

    if config.without_lm_head or config.bidirectional:
        raise UnsupportedModelError(
            f"The model in {folder} gives embeddings, no text: LLM(...).embed(texts), or "
            "/v1/embeddings of a server."
        )


def _part_of(watch: Watch | None, *, before: int = 0, after: int = 0) -> Watch | None:
    """`watch` for a part of what is loaded, with bytes before and after that part."""
    if watch is None:
        return None
    return lambda num_loaded, of: watch(before + num_loaded, before + of + after)


def _reading(
    config: "ModelConfig", builder: Any, dtype: str, watch: Watch | None
) -> dict[str, Any]:
    """Arguments of `Weights` that say how a model's weights are read."""
    if dtype == "float16" and not builder.fits_float16:
        log.warning(
            "%s: activations of this family exceed 65,504, the largest number of float16: logits "
            "may be NaN; use dtype auto or bfloat16",
            config.model_type,
        )
    return {
        "quantization": config.quantization,
        "dtype": dtype,
        "fits_float16": builder.fits_float16,
        "watch": watch,
        "adaptable": True,
    }
