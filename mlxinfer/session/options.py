"""The options of an engine, one dataclass for Python, command line, config file and docs.

A field's name is the keyword argument of LLM, the key in the config file, and (with dashes) the
flag of the command line. `help_of` gives the text of each.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from ..cache_specs import CacheSpec
from ..config import (
    MAX_IMAGE_TOKENS,
    DiskOptions,
    EngineConfig,
    KVOptions,
    PeerOptions,
    default_disk_folder,
)
from ..core import MAX_COUNT
from ..errors import InsufficientMemoryError, InvalidRequestError, check_int, check_switch, shown
from ..memory import default_kv_bytes, human_bytes, parse_bytes, total_memory_bytes
from ..models import ExpertOptions
from ..ranks.hosts import RankOptions
from ..speculation.options import SpeculationOptions

if TYPE_CHECKING:
    from ..models.language import LanguageModel

PAGE_SIZE = 16  # tokens of KV cache that are handed out together, where a model needs no more
PAGES_VARIABLE = "MLXINFER_PAGE_SIZE"  # of the environment; 32: pages of twice as many
PREFILL_SLICE_MS = 250
FEATURE_SHARE, MOST_FEATURES = 8, 1 << 30  # an eighth of max_memory, and bytes at most
MOST_PREFILL, LEAST_PREFILL = 2048, 256  # tokens of a step
DTYPES = ("auto", "float32", "bfloat16", "float16")
LEAST_WITH_SPANS = 288  # where a step computes a whole picture: Gemma 4 has 280 tokens of one
KVBits = Literal[8, 4]


def _page_size() -> int:
    """Tokens a page. Raises InvalidRequestError: the environment asks for other pages."""
    given = os.environ.get(PAGES_VARIABLE, str(PAGE_SIZE))
    if given not in (str(PAGE_SIZE), str(2 * PAGE_SIZE)):
        raise InvalidRequestError(f"{PAGES_VARIABLE} is {given!r}; it can be 16 or 32.")
    return int(given)


class EngineArguments(TypedDict, total=False):
    """The fields of EngineOptions that users have, as keyword arguments of LLM."""

    kv_bits: KVBits | tuple[KVBits | None, KVBits | None] | None
    kv_window: int | None
    kv_sinks: int
    max_memory: str | int | None
    prefix_cache: bool
    disk_cache: str | int | None
    disk_cache_dir: str | Path | None
    max_batch: int
    max_context: int | None
    max_image_tokens: int
    prefill_chunk: int | None
    prefill_slice: int | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    task: Literal["auto", "generate", "embed", "score"]
    mmproj: str | Path | None
    chat_template: str | Path | None
    num_pages: int | None
    adapter_memory: str | int | None
    expert_memory: str | int | None
    slow_experts: bool
    speculate: str
    draft: str | Path | None
    max_draft: int
    acceptance: Literal["exact", "rejection"]
    ranks: int
    hostfile: str | Path | None
    rank: int | None
    rank_deadline: float
    pipeline: bool
    peers: Sequence[str]
    prefill_at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is run. Checked when built; the fields are explained by their help texts.

    Fields without a help text are not for users. `room_bytes` limits weights and KV cache of a
    server's model together, instead of max_memory. `fixed_proposals` lets benchmarks propose as
    many tokens as there are, worth it or not. A server that lets peers ask sets `gives_pages`.

    Raises:
        InvalidRequestError: a value out of its range, or values that do not go together.
    """

    kv_bits: Annotated[
        int | tuple[int | None, int | None] | None,
        "Bits of stored keys and values: 8, 4, or (8, 4). Default: they are not quantised.",
    ] = None
    kv_window: Annotated[
        int | None,
        "Layers without a window of their own attend to the last N tokens only, so the KV cache "
        "stops growing.",
    ] = None
    kv_sinks: Annotated[int, "With kv_window: the first N tokens stay visible."] = 0
    max_memory: Annotated[
        str | int | None,
        "Limit of the KV cache, such as 8GB. Default: a share of what the weights leave free.",
    ] = None
    prefix_cache: Annotated[bool, "Prompts reuse the KV cache of earlier requests."] = True
    disk_cache: Annotated[
        str | int | None,
        "Keep cached prompts on disk, up to a size such as 20GB, also for the next start.",
    ] = None
    disk_cache_dir: Annotated[
        str | Path | None, "Folder of the disk cache. Default: ~/.cache/mlxinfer/kv."
    ] = None
    max_batch: Annotated[int, "Requests that run at once; others wait."] = 64
    max_context: Annotated[
        int | None, "Tokens of prompt and answer together. Default: the model's own limit."
    ] = None
    max_image_tokens: Annotated[
        int, "Tokens of a picture at most; larger pictures are scaled down."
    ] = MAX_IMAGE_TOKENS
    prefill_chunk: Annotated[
        int | None,
        "A fixed number of prompt tokens in each step; only a picture whose tokens see each other "
        "may take more. At 16 bits, answers are then the same in each run. Default: steps are "
        "sized by time, up to 2,048 tokens.",
    ] = None
    prefill_slice: Annotated[
        int | None,
        "Most milliseconds of a step with prompts while others are answered. Default: 250.",
    ] = None
    dtype: Annotated[
        str, "Type of activations and KV cache: auto, float32, bfloat16 or float16."
    ] = "auto"
    task: Annotated[
        str, "Use of the model: generate, embed, score, or auto (from its files and name)."
    ] = "auto"
    mmproj: Annotated[
        str | Path | None,
        "File of what sees pictures for a GGUF file. Default: the mmproj file beside it.",
    ] = None
    chat_template: Annotated[
        str | Path | None, "File with a chat template, used instead of the model's own."
    ] = None
    num_pages: Annotated[
        int | None, "Pages of the KV cache, instead of max_memory: for tests of tight memory."
    ] = None
    adapter_memory: Annotated[
        str | int | None,
        "Part of max_memory that is kept for adapters, such as 1GB. Default: adapters get "
        "memory that the KV cache does not use yet.",
    ] = None
    expert_memory: Annotated[
        str | int | None,
        "Memory for the experts of a mixture, such as 8GB. The other experts are read from "
        "disk when tokens need them. Default: all are loaded. See "
        "docs/larger_than_memory.md.",
    ] = None
    slow_experts: Annotated[
        bool, "With expert_memory: load the model even if a token takes seconds."
    ] = False
    speculate: Annotated[
        str,
        "Source of proposed tokens: ngram, draft, mtp, eagle, dflash, auto or off. A step "
        "verifies several of them where that is faster. See docs/speculation.md.",
    ] = "auto"
    draft: Annotated[
        str | Path | None,
        "Draft model with the same tokenizer, EAGLE-3 head or DFlash draft: name or folder.",
    ] = None
    max_draft: Annotated[
        int,
        "Most tokens proposed for a request in one step. A step has room for 8 tokens of a "
        "request, and its newest token takes one place, so 7 are proposed at most.",
    ] = 8
    acceptance: Annotated[
        str,
        "exact: the same answers as without proposals; rejection: sampled answers have the "
        "same distribution, and more proposals are accepted.",
    ] = "exact"
    ranks: Annotated[
        int,
        "Processes of this machine that the model is spread over, to try it; see docs/ranks.md.",
    ] = 1
    hostfile: Annotated[
        str | Path | None,
        "File of machines that the model is spread over; each runs the same program.",
    ] = None
    rank: Annotated[
        int | None, "This machine's place in the host file. Default: the one with its address."
    ] = None
    rank_deadline: Annotated[float, "Seconds that a step over ranks may take before it fails."] = (
        60.0
    )
    pipeline: Annotated[bool, "Each rank has some of the layers, not a part of every layer."] = (
        False
    )
    peers: Annotated[
        Sequence[str],
        "Servers that are asked for the KV cache of a prompt before it is computed, such as "
        "http://studio-2.local:8080. See docs/peers.md.",
    ] = ()
    prefill_at: Annotated[
        str | None,
        "Server that computes long prompts where that is quicker, and hands over their KV cache.",
    ] = None
    room_bytes: int | None = None
    fixed_proposals: bool = False
    gives_pages: bool = False

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, low=1, high=MAX_COUNT)
        check_int("max_image_tokens", self.max_image_tokens, low=1, high=MAX_COUNT)
        _ = self.kv, self.speculation, self.spread, self.experts  # they check their own values
        for name in ("max_context", "num_pages", "prefill_chunk", "prefill_slice"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1, high=MAX_COUNT)
        if self.dtype not in DTYPES:
            expected = f"is {shown(self.dtype)}; expected one of {', '.join(DTYPES)}."
            raise InvalidRequestError.of("dtype", expected)
        check_switch("prefix_cache", self.prefix_cache)
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

        self._check_peers()

    def _check_peers(self) -> None:
        _ = PeerOptions(urls=tuple(self.peers), prefill_at=self.prefill_at)
        if not self._exchanges_pages:
            return
        param = "peers" if self.peers else "prefill_at" if self.prefill_at else "allow_peers"
        if not self.prefix_cache:
            raise InvalidRequestError(
                f"{param} shares what the prefix cache holds, and prefix_cache is off; leave one "
                "of them out.",
                param=param,
            )
        if not self.spread.is_alone:
            raise InvalidRequestError(
                f"{param} does not go with a model that is spread over ranks: each rank has a part "
                "of a page. Leave one of them out.",
                param=param,
            )

    @property
    def _exchanges_pages(self) -> bool:
        return bool(self.peers or self.prefill_at or self.gives_pages)

    def with_draft(self, find: Callable[[str], Path]) -> "EngineOptions":
        return self if self.draft is None else replace(self, draft=find(str(self.draft)))

    @property
    def kv(self) -> KVOptions:
        return KVOptions.build(bits=self.kv_bits, window=self.kv_window, sinks=self.kv_sinks)

    @property
    def speculation(self) -> SpeculationOptions:
        return SpeculationOptions(
            method=self.speculate,
            draft=None if self.draft is None else Path(self.draft),
            max_draft=self.max_draft,
            acceptance=self.acceptance,
            fixed=self.fixed_proposals,
        )

    @property
    def spread(self) -> RankOptions:
        return RankOptions(
            ranks=self.ranks,
            hostfile=None if self.hostfile is None else Path(self.hostfile),
            rank=self.rank,
            rank_deadline=self.rank_deadline,
            pipeline=self.pipeline,
        )

    @property
    def experts(self) -> ExpertOptions | None:
        """Experts that are read when tokens need them; None: all are loaded."""
        given = {"expert_memory": self.expert_memory, "slow_experts": self.slow_experts}
        return ExpertOptions.taken_from(given, alone=self.spread.is_alone)

    def held_bytes(self, folder: Path) -> int:
        """Bytes of a checkpoint's weights that an engine with these options has in memory."""
        from ..memory.fit import held_bytes  # imports mlx

        of_experts = None if self.experts is None else self.experts.num_bytes
        return held_bytes(folder, of_experts, head=self.speculate == "mtp")

    def config(
        self,
        model: "LanguageModel",
        disk: DiskOptions | None,
        kv_bytes: int,
        peers: PeerOptions | None = None,
    ) -> EngineConfig:
        """The sizes of an engine for a loaded model with a KV cache of given bytes, and its disk.

        The features of pictures take a part of these bytes, where a model sees.
        A prefix cache that the model cannot have is left out: answers are the same without it.
        """
        for param, given in (("disk_cache", disk), ("peers", peers and (peers.asked or None))):
            if given is not None and "disk_cache" in model.lacks:
                raise InvalidRequestError(
                    f"{param} does not go with this model: {model.lacks['disk_cache']}. Leave it "
                    "out.",
                    param=param,
                )
        self._check_window(model.cache_specs)
        limit = model.config.max_context
        fixed, most = self.prefill_chunk, self._most_prefill(model.cache_specs, kv_bytes)
        if fixed is not None:  # pictures are as large as without it
            has_spans = model.tower and any(spec.sees_spans for spec in model.cache_specs)
            most = max(fixed, most) if has_spans else fixed
        slice_s = (self.prefill_slice or PREFILL_SLICE_MS) / 1000
        feature_bytes = min(kv_bytes // FEATURE_SHARE, MOST_FEATURES) if model.tower else 0
        page_size = lcm(_page_size(), *(spec.unit for spec in model.cache_specs))
        return EngineConfig(
            page_size=page_size,
            max_batch=self.max_batch,
            prefill_chunk=-(-most // page_size) * page_size,
            prefill_slice_s=slice_s if fixed is None else None,
            prefill_fixed=None if fixed is None else -(-fixed // page_size) * page_size,
            max_context=min(self.max_context or limit, limit),
            kv_budget_bytes=kv_bytes - feature_bytes,
            feature_bytes=feature_bytes,
            num_pages=self.num_pages,
            adapter_bytes=self.adapter_bytes,
            kv=self.kv,
            prefix_cache=self.prefix_cache and "prefix_cache" not in model.lacks,
            disk=disk,
            peers=peers if "disk_cache" not in model.lacks else None,
        )

    def _check_window(self, specs: Sequence[CacheSpec]) -> None:
        takes = any(spec.window is None and spec.numbers for spec in specs)
        if self.kv.window is not None and not takes:
            raise InvalidRequestError(
                f"kv_window is {self.kv.window}, and no layer of this model sees all positions: "
                "each was trained with a window of its own or keeps a state. Leave kv_window out.",
                param="kv_window",
            )

    def _most_prefill(self, specs: Sequence[CacheSpec], kv_bytes: int) -> int:
        """Prompt tokens a step at most, where steps are sized by time.

        Windows hold all of them for a moment: that may take little of the KV cache.
        """
        least = LEAST_WITH_SPANS if any(s.sees_spans for s in specs) else LEAST_PREFILL
        if self.num_pages is not None:
            return least
        token_bytes = sum(4 * s.numbers for s in specs if s.window or self.kv.window)
        most = MOST_PREFILL
        while most > least and most * token_bytes > kv_bytes / 16:
            most = max(most // 2, least)
        return most

    @property
    def adapter_bytes(self) -> int:
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

    def stores(self, folder: Path) -> tuple[DiskOptions | None, PeerOptions | None]:
        """Disk cache and peers of the model in `folder`; its weights are hashed from now on."""
        if self.disk_cache is None and not self._exchanges_pages:
            return None, None
        from ..models.identity import ContentId

        where = self.disk_cache_dir
        place = default_disk_folder() if where is None else Path(where).expanduser()
        identity = ContentId(folder, place / "digests.json").wait
        disk = peers = None
        if self.disk_cache is not None:
            max_bytes = parse_bytes(self.disk_cache, param="disk_cache")
            disk = DiskOptions(folder=_writable(place), max_bytes=max_bytes, identity=identity)
        if self._exchanges_pages:
            urls = tuple(self.peers)
            peers = PeerOptions(urls=urls, prefill_at=self.prefill_at, identity=identity)
        return disk, peers


def help_of(name: str) -> str:
    return str(EngineOptions.__annotations__[name].__metadata__[0])


def _writable(folder: Path) -> Path:
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
