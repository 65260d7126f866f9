"""Whether a model fits this machine, and at which context: from sizes alone, before a download."""

import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from . import hub
from .errors import MlxinferError
from .hub.remote import Listing, RemoteFile, read_range
from .memory import MODELS_SHARE, human_bytes, total_memory_bytes
from .models import load_any_config
from .models.decoder import LanguageConfig

KV_GROUP = 64  # numbers that share a 16-bit scale and a 16-bit bias in a quantised KV cache
ENOUGH_CONTEXT = 4096  # tokens: with less a model is of little use
CONVERTED_BITS = 4.5  # a weight, of the recipe 4bit
MAX_CONFIG_BYTES = 4 << 20


class Verdict(StrEnum):
    """How well a model fits."""

    FITS = "fits"  # at its whole context
    SHORT = "short"  # at a part of it
    TOO_LARGE = "too large"
    UNSUPPORTED = "unsupported"  # its architecture does not run here


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A verdict and the numbers it follows from.

    Attributes:
        weights_bytes: of the files.
        limit_bytes: what models may take on this machine.
        max_context: of the model, in tokens; None: its config cannot be read.
        contexts: the longest context that fits, by bits of the KV cache.
        converted_bytes: what it would take at 4 bits a weight; None: it is quantised already.
        problem: why it does not run here.
    """

    verdict: Verdict
    weights_bytes: int
    limit_bytes: int
    max_context: int | None = None
    contexts: dict[int, int] | None = None
    converted_bytes: int | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "verdict": str(self.verdict), "text": self.text}

    @property
    def text(self) -> str:
        """The verdict in a sentence."""
        needs = f"{human_bytes(self.weights_bytes)} of {human_bytes(self.limit_bytes)} for models"
        if self.verdict is Verdict.UNSUPPORTED:
            return f"Does not run here: {self.problem}"
        if self.verdict is Verdict.TOO_LARGE:
            said = f"Does not fit: {needs}"
            small = self.converted_bytes
            if small is not None and small < self.limit_bytes:
                said += f"; converted to 4 bits it takes about {human_bytes(small)}"
            return said
        assert self.contexts is not None
        context = f"{self.contexts[16]:,} tokens of context"
        if self.verdict is Verdict.FITS:
            return f"Fits, with its whole {context} ({needs})"
        more = f", {self.contexts[8]:,} with an 8-bit KV cache"
        return f"Fits, with {context}{more} ({needs})"


def models_limit_bytes() -> int:
    """What a server gives to models on this machine by default."""
    return int(MODELS_SHARE * total_memory_bytes())


def kv_bytes(config: LanguageConfig, context: int, bits: int = 16) -> int:
    """Return the KV cache's bytes for one sequence; a window holds at most its length."""
    bits_each = bits if bits == 16 else bits + 32 / KV_GROUP
    numbers = sum(
        config.cache_spec(layer).numbers * min(context, window or context)
        for layer, window in enumerate(config.windows)
    )
    return round(numbers * bits_each / 8)


def fit_of(config: LanguageConfig, weights_bytes: int, limit_bytes: int) -> Fit:
    """The verdict of a model with known config and weights."""
    contexts = {bits: longest_context(config, weights_bytes, limit_bytes, bits) for bits in (16, 8)}
    if contexts[16] >= config.max_context:
        verdict = Verdict.FITS
    elif contexts[8] >= min(ENOUGH_CONTEXT, config.max_context):
        verdict = Verdict.SHORT
    else:
        verdict = Verdict.TOO_LARGE
    return Fit(
        verdict=verdict,
        weights_bytes=weights_bytes,
        limit_bytes=limit_bytes,
        max_context=config.max_context,
        contexts=contexts,
        converted_bytes=(
            int(weights_bytes * CONVERTED_BITS / 16) if config.quantization is None else None
        ),
    )


def fit_of_repository(name: str, limit_bytes: int) -> Fit:
    """The verdict of a repository of the hub; only its list of files and its config are read.

    Raises:
        ModelNotFoundError, DownloadError: those of `hub.plan_pull`.
    """
    plan = hub.plan_pull(name)
    weights = sum(file.size for file in plan.files if file.path.endswith(".safetensors"))
    files = tuple(RemoteFile(file.path, file.size, file.sha256) for file in plan.files)
    listing = Listing(plan.repo, plan.commit, files)
    with tempfile.TemporaryDirectory() as folder:
        if any(file.path == "config.json" for file in files):
            text = read_range(listing, "config.json", 0, MAX_CONFIG_BYTES)
            (Path(folder) / "config.json").write_bytes(text)
        try:
            config = load_any_config(Path(folder))
        except MlxinferError as error:
            problem = str(error).replace(folder, name)
            return Fit(
                verdict=Verdict.UNSUPPORTED,
                weights_bytes=weights,
                limit_bytes=limit_bytes,
                problem=problem,
            )
    return fit_of(config, weights, limit_bytes)


def longest_context(config: LanguageConfig, weights_bytes: int, limit_bytes: int, bits: int) -> int:
    """The most tokens of one sequence, up to the model's own, that fit beside the weights."""
    low, high = 0, config.max_context
    while low < high:
        middle = (low + high + 1) // 2
        if weights_bytes + kv_bytes(config, middle, bits) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low
