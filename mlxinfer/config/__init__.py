"""The configuration of an engine: frozen, with every "auto" resolved before it is built."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..core import MAX_COUNT
from ..errors import InvalidRequestError, check_int, shown, wrong_value

KV_BITS = (8, 4)  # of stored keys and values; each names a format in `metal_kernels.stored`
MAX_IMAGE_TOKENS = 2560  # of a picture, unless a caller says otherwise
LOW_DETAIL_TOKENS = 256  # of a picture that is sent with "detail": "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """Options of the KV cache. Checked when built.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    bits: tuple[int | None, int | None] = (None, None)  # of keys, of values; None: as computed
    # Positions that a layer sees which has no window of its own; None: all.
    window: int | None = None
    sinks: int = 0  # with a window: the first positions, which stay visible

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("kv_window", self.window, low=1, high=MAX_COUNT)
        check_int("kv_sinks", self.sinks, low=0, high=MAX_COUNT)
        if self.sinks and self.window is None:
            raise InvalidRequestError.of(
                "kv_sinks", "goes with kv_window: without a window every position stays visible."
            )

    @classmethod
    def build(
        cls, *, bits: int | tuple[int | None, int | None] | None, window: int | None, sinks: int
    ) -> "KVOptions":
        """Build from arguments such as `kv_bits=8` or `kv_bits=(8, 4)`."""
        pair = bits if isinstance(bits, (tuple, list)) else (bits, bits)
        if len(pair) != 2 or any(
            b is not None and (type(b) is not int or b not in KV_BITS) for b in pair
        ):
            known = f"None, {', '.join(map(str, KV_BITS))} or a pair of these"
            raise wrong_value("kv_bits", bits, f"{known}, such as (8, 4): keys, then values")
        return cls(bits=(pair[0], pair[1]), window=window, sinks=sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """The folder of prefix pages that memory has no room for."""

    folder: Path
    max_bytes: int  # of all entries together, those of other models included
    identity: Callable[[float], str | None]
    """Waits at most these seconds for the identity of the weights; None: not known yet. Pages are
    valid for one model only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Servers with which pages of the prefix cache are exchanged.

    Raises:
        InvalidRequestError: an address is none.
    """

    urls: tuple[str, ...] = ()  # servers that are asked for pages
    prefill_at: str | None = None  # the server that computes long prompts
    identity: Callable[[float], str | None] = lambda timeout_s: None  # see `DiskOptions`

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.urls, *filter(None, [self.prefill_at])]))

    def __post_init__(self) -> None:
        for name, url in [*(("peers", url) for url in self.urls), ("prefill_at", self.prefill_at)]:
            if "@" in str(url):  # addresses are logged, listed, and seen by all who see processes
                raise InvalidRequestError(
                    f"{name} has an address with a user name or a password; leave them out. The "
                    "key for a peer is MLXINFER_API_KEY of the environment.",
                    param=name,
                )
            if url is not None and not re.fullmatch(r"https?://[^/?#\s]+/?", str(url)):
                raise wrong_value(name, url, "an address such as 'http://studio-2.local:8080'")


def default_disk_folder() -> Path:
    """The default folder of the pages of all models; XDG_CACHE_HOME moves it."""
    return _cache_folder() / "kv"


def default_kernel_folder() -> Path:
    return _cache_folder() / "kernels"


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "mlxinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that hold for the life of an engine."""

    page_size: int = 16  # tokens a page
    max_batch: int = 64  # sequences that may run at once
    prefill_chunk: int = 256  # prompt tokens a step at most, of all sequences; whole pages
    prefill_slice_s: float | None = None  # such steps beside others take so long; None: fixed size
    prefill_fixed: int | None = None  # that size, which a span may exceed; None: prefill_chunk
    max_context: int  # tokens of prompt and answer of one request
    kv_budget_bytes: int  # of pages and tails together
    num_pages: int | None = None  # pages of each layer group; None: as many as the budget holds
    feature_bytes: int = 1 << 28  # of pictures' features, beside that budget
    adapter_bytes: int = 0  # kept for adapters beside that budget; more come out of it
    kv: KVOptions = field(default_factory=KVOptions)
    prefix_cache: bool = True  # prompts reuse the KV of earlier requests
    disk: DiskOptions | None = None  # with prefix_cache: keeps pages that memory has no room for
    peers: PeerOptions | None = None  # with prefix_cache; None: no pages are exchanged
