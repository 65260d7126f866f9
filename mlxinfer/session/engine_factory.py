"""Options to a running engine: arguments checked, memory found, model loaded."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..backend import require_mlx
from ..config import DiskOptions, EngineConfig, KVOptions, default_disk_folder
from ..core import CacheSpec, KVSpec, check_count, check_switch
from ..errors import InsufficientMemoryError, InvalidRequestError, shown
from ..memory import default_kv_bytes, human_bytes, parse_bytes, total_memory_bytes
from ..models import ExpertOptions
from ..ranks.options import RankOptions
from ..speculation.options import SpeculationOptions

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.scheduler import Proposer
    from ..models.language import LanguageModel
    from ..ranks.group import RankGroup

PAGE_SIZE = 16  # tokens of KV cache that are handed out together
PREFILL_SLICE_MS = 250
MOST_PREFILL, LEAST_PREFILL = 2048, 256  # tokens of a step


class EngineArguments(TypedDict, total=False):
    """Keyword arguments of LLM for its engine: what each means stands there."""

    kv_bits: int | tuple[int | None, int | None] | None
    kv_window: int | None
    kv_sinks: int
    kv_plain_ends: bool
    kv_plain_windows: bool
    max_memory: str | int | None
    prefix_cache: bool
    disk_cache: str | int | None
    disk_cache_dir: str | Path | None
    max_batch: int
    max_context: int | None
    prefill_chunk: int | None
    prefill_slice: int | None
    dtype: str
    task: str
    num_pages: int | None
    adapter_memory: str | int | None
    expert_memory: str | int | None
    slow_experts: bool
    launch_ahead: bool
    speculate: str
    draft: str | Path | None
    max_draft: int
    acceptance: str
    ranks: int
    hostfile: str | Path | None
    rank: int | None
    rank_deadline: float
    pipeline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """EngineArguments by their parts, checked when built.

    A server gives `room_bytes` instead of max_memory: what weights and KV cache may take together.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    kv: KVOptions = field(default_factory=KVOptions)
    max_memory: str | int | None = None
    prefix_cache: bool = True
    disk_cache: str | int | None = None
    disk_cache_dir: str | Path | None = None
    max_batch: int = 64
    max_context: int | None = None
    prefill_chunk: int | None = None
    prefill_slice: int | None = None
    dtype: str = "auto"
    task: str = "auto"
    num_pages: int | None = None
    adapter_memory: str | int | None = None
    experts: ExpertOptions | None = None
    launch_ahead: bool = True
    room_bytes: int | None = None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    spread: RankOptions = field(default_factory=RankOptions)

    @classmethod
    def of(cls, arguments: EngineArguments, find: Callable[[str], Path]) -> "EngineOptions":
        """The options of these arguments; `find` gives the folder of a draft model's name."""
        rest: dict[str, Any] = dict(arguments)
        kv: dict[str, Any] = {"bits": None, "window": None, "sinks": 0}
        for name in [name for name in rest if name.startswith("kv_")]:
            kv[name.removeprefix("kv_")] = rest.pop(name)
        names = ("speculate", "draft", "max_draft", "acceptance")
        speculation = {name: rest.pop(name) for name in names if name in rest}
        if "speculate" in speculation:
            speculation["method"] = speculation.pop("speculate")
        if speculation.get("draft") is not None:
            speculation["draft"] = find(str(speculation["draft"]))
        spread = {f.name: rest.pop(f.name) for f in fields(RankOptions) if f.name in rest}
        if spread.get("hostfile") is not None:
            spread["hostfile"] = Path(spread["hostfile"])
        return cls(
            kv=KVOptions.build(**kv),
            speculation=SpeculationOptions(**speculation),
            spread=RankOptions(**spread),
            experts=ExpertOptions.taken_from(rest, alone=RankOptions(**spread).is_alone),
            **rest,
        )

    def __post_init__(self) -> None:
        check_count("max_batch", self.max_batch, 1)
        for name in ("max_context", "num_pages", "prefill_chunk", "prefill_slice"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        for name in ("prefix_cache", "launch_ahead"):
            check_switch(name, getattr(self, name))
        if self.prefill_chunk is not None and self.prefill_slice is not None:
            raise InvalidRequestError(
                "prefill_chunk fixes the tokens of a step, and prefill_slice says how long it may "
                "take; leave one of them out.",
                param="prefill_slice",
            )
        if self.max_memory is not None:
            parse_bytes(self.max_memory)
        if self.adapter_memory is not None:
            parse_bytes(self.adapter_memory, param="adapter_memory")
        if self.disk_cache is not None:
            parse_bytes(self.disk_cache, param="disk_cache")
            if not self.prefix_cache:
                raise InvalidRequestError(
                    "disk_cache keeps what the prefix cache holds, and prefix_cache is off; leave "
                    "one of them out.",
                    param="disk_cache",
                )
        elif self.disk_cache_dir is not None:
            raise InvalidRequestError(
                "disk_cache_dir goes with disk_cache: say how much may lie there, such as '20GB'.",
                param="disk_cache_dir",
            )

    def config(
        self, model: "LanguageModel", disk: DiskOptions | None, kv_bytes: int
    ) -> EngineConfig:
        """The sizes of an engine for a loaded model with a KV cache of so many bytes, and its disk.

        A prefix cache that the model cannot have is left out: answers are the same without it.
        """
        if disk is not None and "disk_cache" in model.lacks:
            raise InvalidRequestError(
                f"disk_cache does not go with this model: {model.lacks['disk_cache']}. Leave it "
                "out.",
                param="disk_cache",
            )
        limit = model.config.max_context
        chunk = self.prefill_chunk or self._most_prefill(model.cache_specs, kv_bytes)
        slice_s = (self.prefill_slice or PREFILL_SLICE_MS) / 1000
        return EngineConfig(
            page_size=PAGE_SIZE,
            max_batch=self.max_batch,
            prefill_chunk=-(-chunk // PAGE_SIZE) * PAGE_SIZE,
            prefill_slice_s=slice_s if self.prefill_chunk is None else None,
            max_context=min(self.max_context or limit, limit),
            kv_budget_bytes=kv_bytes,
            num_pages=self.num_pages,
            adapter_bytes=self.adapter_bytes,
            kv=self.kv,
            prefix_cache=self.prefix_cache and "prefix_cache" not in model.lacks,
            disk=disk,
            launch_ahead=self.launch_ahead,
        )

    def _most_prefill(self, specs: Sequence[CacheSpec], kv_bytes: int) -> int:
        """Prompt tokens a step at most, where steps are sized by time.

        Windows hold all of them for a moment: that may take little of the KV cache.
        """
        if self.num_pages is not None:
            return LEAST_PREFILL
        windowed = [s for s in specs if isinstance(s, KVSpec) and (s.window or self.kv.window)]
        token_bytes = sum(4 * s.num_kv_heads * (s.key_dim + s.value_dim) for s in windowed)
        most = MOST_PREFILL
        while most > LEAST_PREFILL and most * token_bytes > kv_bytes / 16:
            most //= 2
        return most

    @property
    def adapter_bytes(self) -> int:
        """Memory kept for adapters."""
        if self.adapter_memory is None:
            return 0
        return parse_bytes(self.adapter_memory, param="adapter_memory")

    def kv_bytes(self, weights_bytes: int) -> int:
        """Budget of the KV cache; raises InsufficientMemoryError where others leave none."""
        if self.max_memory is not None:
            left = parse_bytes(self.max_memory) - self.adapter_bytes
            if left <= 0:
                raise InsufficientMemoryError(
                    f"adapter_memory is {shown(self.adapter_memory)}, which leaves nothing of "
                    f"max_memory, {shown(self.max_memory)}, for the KV cache.",
                    param="adapter_memory",
                )
            return left
        weights_bytes += self.adapter_bytes
        if self.room_bytes is None:
            return default_kv_bytes(total_memory_bytes(), weights_bytes)
        if weights_bytes >= self.room_bytes:
            raise InsufficientMemoryError(
                f"The weights take {human_bytes(weights_bytes)}, and the model may have "
                f"{human_bytes(self.room_bytes)} with its KV cache; raise --max-memory.",
                param="max_memory",
            )
        return self.room_bytes - weights_bytes

    def disk(self, folder: Path) -> DiskOptions | None:
        """The disk cache of the model in `folder`; its weights are hashed from now on."""
        if self.disk_cache is None:
            return None
        from ..models.identity import ContentId

        where = self.disk_cache_dir
        place = default_disk_folder() if where is None else Path(where).expanduser()
        return DiskOptions(
            folder=_writable(place),
            max_bytes=parse_bytes(self.disk_cache, param="disk_cache"),
            identity=ContentId(folder, place / "digests.json").wait,
        )


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
    alone_because: str | None = None  # why it runs one sequence after another; None: batched
    task: str = "generate"  # or "embed", "score"
    embedding_dim: int | None = None  # numbers of a vector, of models that embed

    @property
    def summary(self) -> str:
        """One short line."""
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
            "KV cache": f"{human_bytes(self.kv_bytes_per_token)} a token",
            "folder": self.path,
        }
        if self.alone_because:
            facts["one sequence after another"] = self.alone_because
        return facts_card(self.name, facts)


def describe(name: str, path: Path, model: "LanguageModel") -> ModelInfo:
    """The facts of `model`, loaded from `path`."""
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
        alone_because=config.alone_because,
    )


def _writable(folder: Path) -> Path:
    """The folder, which is made if need be: a cache that could never hold anything is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        problem = "" if os.access(folder, os.W_OK) else "it is not writable"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise InvalidRequestError(
            f"The disk cache cannot lie in {folder}: {problem}. Choose another folder with "
            "disk_cache_dir or XDG_CACHE_HOME, or leave disk_cache out.",
            param="disk_cache_dir",
        )
    return folder


def open_engine(
    name: str,
    folder: Path,
    options: EngineOptions,
    *,
    owner: object,
    watch: Callable[[int, int], None] | None = None,
) -> "tuple[Engine, ModelInfo]":
    """Load the model in `folder` on the engine's own thread.

    Args:
        name: of the model, for people.
        folder: with the checkpoint.
        options: of the engine.
        owner: the engine is closed when this object is collected.
        watch: is called with the bytes of weights that are loaded, and with all of them.

    Raises:
        ModelError: the model is broken or not supported.
        BackendMissingError: MLX does not run here.
    """
    require_mlx()  # says why, where what follows cannot import MLX
    from ..engine.engine import Engine, generation
    from ..models import load_any, stoppable

    described: list[ModelInfo] = []
    proposers: list[Proposer | None] = []
    watch, stop = stoppable(watch)
    group = _group(name, folder, options, partial(watch, 0, 0))

    def build() -> "tuple[LanguageModel, EngineConfig]":
        disk = options.disk(folder)
        model: LanguageModel
        if group is None:
            model = load_any(folder, dtype=options.dtype, watch=watch, experts=options.experts)
        else:
            pipeline = options.spread.pipeline
            model = group.load(name, folder, dtype=options.dtype, pipeline=pipeline, watch=watch)
        described.append(describe(name, folder, model))

        def kv_bytes(draft_bytes: int) -> int:
            """Of each rank, where rank 0 also has the weights of a draft."""
            weights = model.num_bytes + draft_bytes
            if group is None or options.max_memory is not None:
                return options.kv_bytes(weights)
            return group.kv_bytes(options.kv_bytes, weights, adapter_bytes=options.adapter_bytes)

        config = options.config(model, disk, kv_bytes(0))
        config, proposer = add_speculation(options, folder, model, config, kv_bytes)
        proposers.append(proposer)
        return model, config

    make_loop = generation(build, lambda: proposers.pop(), group)
    engine = Engine(make_loop, owner=owner, stop_loading=stop)
    if group is not None:
        group.on_failure = engine.fail
    return engine, described[0]


def _group(
    name: str, folder: Path, options: EngineOptions, check: Callable[[], None]
) -> "RankGroup | None":
    """The ranks that the model is spread over; None: it is not.

    In a process that is a rank other than 0 this does not return: it follows until the group ends.
    `check` is called while others are awaited, and may raise.

    Raises:
        InvalidRequestError, RanksFailedError: as of `open_group` and `follow`.
    """
    if options.spread.is_alone:
        return None
    from ..ranks.follower import follow
    from ..ranks.hosts import shared_secret
    from ..ranks.open import open_group

    place = options.spread.elsewhere
    if place is not None and place.rank:
        follow(place, shared_secret(), lambda name: folder)
        raise SystemExit(0)
    return open_group(options.spread, name, check)


def add_speculation(
    options: EngineOptions,
    folder: Path,
    model: "LanguageModel",
    config: EngineConfig,
    kv_bytes: Callable[[int], int],
) -> "tuple[EngineConfig, Proposer | None]":
    """The proposer of tokens, or None, and the memory that it leaves for the KV cache.

    Args:
        options: of the engine.
        folder: that the model was loaded from.
        model: that tokens are proposed for.
        config: of its engine.
        kv_bytes: for both KV caches, beside so many bytes of a draft's weights.

    Raises:
        InvalidRequestError: this model cannot verify proposals, and they were asked for by name.
        InsufficientMemoryError: the draft model leaves no memory for the KV cache.
        ModelError: the draft model is broken or not supported.
    """
    speculation = options.speculation
    reason = model.lacks.get("speculation")
    if reason is not None and speculation.method not in ("auto", "off"):
        raise InvalidRequestError(
            f"speculate is {speculation.method!r}, and this model takes no proposals: {reason}",
            param="speculate",
        )
    if speculation.is_off or reason is not None:
        return config, None
    from ..speculation.sources import load_network, make_speculation, share_budget

    found = load_network(speculation, folder, model, dtype=options.dtype)
    if found is None:
        return config, make_speculation(speculation)
    config, draft = share_budget(config, kv_bytes(found.num_bytes), model, found)
    return config, make_speculation(speculation, model, draft)
