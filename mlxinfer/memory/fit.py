"""Whether a model fits this machine, and at which context: from sizes alone, before a download."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..cache_specs import LatentSpec
from ..config import KVOptions
from ..errors import InsufficientMemoryError, UnsupportedModelError
from ..models import load_any_config
from ..models.config import load_config
from ..models.jsonfields import Fields, read_json
from ..models.language import LanguageConfig
from ..models.registry import family, is_encoder, is_native, language_name, layer_ahead
from ..models.towers.loading import tower_bytes
from ..models.weights.files import expert_bytes, read_headers, row_table_bytes
from ..models.weights.share import Share
from . import human_bytes, models_limit_bytes, weights_bytes

KV_GROUP = 64  # numbers that share a 16-bit scale and a 16-bit bias in a quantised KV cache
NO_OPTIONS = KVOptions()
ENOUGH_CONTEXT = 4096  # tokens: with less a model is of little use
CONVERSIONS = (8, 6, 5, 4, 3, 2)  # bits a weight, of `mlxinfer convert --bits`
TABLE_BITS = 4  # of embeddings and output projections at least
SCALE_BITS = 0.5  # a weight more, in its groups of 64
RANKS = (2, 3, 4, 6, 8, 16)
RANK_SHARE = 1.1  # a rank holds norms and more of its own beside its share


class FitVerdict(StrEnum):
    """How well a model fits."""

    FITS = "fits"  # at its whole context
    SHORT = "short"  # at a part of it
    TOO_LARGE = "too large"
    UNSUPPORTED = "unsupported"  # its architecture does not run here


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A verdict and the numbers it follows from."""

    verdict: FitVerdict
    weights_bytes: int  # of the files
    limit_bytes: int  # what models may take on this machine
    max_context: int | None = None  # of the model, in tokens; None: its config cannot be read
    needed_context: int = 0  # tokens for which there must be room
    kv_bytes: int = 0  # of the KV cache at that context, 16 bits
    contexts: dict[int, int] | None = None  # the longest context that fits, by bits of the KV cache
    # the most bits a weight that it could be converted to and fit; None: none would do, or it fits
    converted_bits: int | None = None
    converted_bytes: int | None = None  # what it would take then
    # machines of this memory that could run it together; None: it fits, or they could not
    ranks: int | None = None
    pipeline: bool = False  # each of them would have some of the layers, not a part of every layer
    # bytes that experts could have where they are read when they are needed; None: it fits, it has
    # none, or the rest alone does not fit
    expert_memory: int | None = None
    problem: str | None = None  # why it does not run here

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict), "text": self.text}

    @property
    def text(self) -> str:
        needs = f"{human_bytes(self.weights_bytes)} of {human_bytes(self.limit_bytes)} for models"
        if self.verdict is FitVerdict.UNSUPPORTED:
            return f"Does not run here: {self.problem}"
        if self.verdict is FitVerdict.TOO_LARGE:
            return (
                f"Does not fit: {human_bytes(self.weights_bytes)} of weights and "
                f"{human_bytes(self.kv_bytes)} of KV cache at {self.needed_context:,} tokens, and "
                f"{human_bytes(self.limit_bytes)} for models. {self.remedies}"
            )
        assert self.contexts is not None
        context = f"{self.contexts[16]:,} tokens of context"
        if self.verdict is FitVerdict.FITS:
            return f"Fits, with its whole {context} ({needs})"
        more = f", {self.contexts[8]:,} with an 8-bit KV cache"
        return f"Fits, with {context}{more} ({needs})"

    @property
    def remedies(self) -> str:
        remedies = list(self._remedies())
        return f"What would fit: {'; '.join(remedies)}." if remedies else "Take a smaller model."

    def _remedies(self) -> Iterator[str]:
        if self.converted_bits is not None and self.converted_bytes is not None:
            size = human_bytes(self.converted_bytes)
            plain = self.converted_bytes + self.kv_bytes <= self.limit_bytes
            kv = "" if plain else ", with --kv-bits 8"
            yield f"converted with --bits {self.converted_bits}, about {size} of weights{kv}"
        contexts = {bits: n for bits, n in (self.contexts or {}).items() if n}
        if contexts:
            listed = ", ".join(f"{n:,} at {bits} bits" for bits, n in contexts.items())
            yield f"these weights with a shorter context, by bits of the KV cache: {listed} tokens"
        if self.ranks is not None:
            how = f"--ranks {self.ranks}{' --pipeline' if self.pipeline else ''}"
            yield f"{self.ranks} machines with as much memory ({how})"
        if self.expert_memory is not None:
            size = f"{self.expert_memory / 1e9:.1f}GB"
            yield f"experts read from the disk when they are needed (--expert-memory {size})"


def kv_bytes(config: LanguageConfig, context: int, bits: int = 16, most: int | None = None) -> int:
    """Return the KV cache's bytes for one sequence; a window holds at most its length.

    `most`: positions that layers without a window of their own keep; None: all.
    """
    bits_each = bits if bits == 16 else bits + 32 / KV_GROUP
    stored_bits = 0.0
    for layer, window in enumerate(config.windows):
        spec = config.cache_spec(layer)
        plain = spec.index_dim if isinstance(spec, LatentSpec) else 0  # index keys stay in 16 bits
        token_bits = (spec.numbers - plain) * bits_each + plain * 16
        stored_bits += token_bits * min(context, window or most or context)
    stored_bits += 16 * context * sum(spec.numbers for spec in config.extra_specs if spec)
    return round(stored_bits / 8)


def fit_of(
    config: LanguageConfig,
    weights_bytes: int,
    limit_bytes: int,
    *,
    folder: Path | None = None,
    context: int | None = None,
    stored_bytes: int | None = None,
    most: int | None = None,
) -> Fit:
    """The verdict of a model with known config and weights.

    Args:
        folder: of its config.json, which says how many ranks can share it; None: that is left out.
        context: tokens for which there must be room; None: ENOUGH_CONTEXT, or all that it has.
        stored_bytes: of all weights, from which follows what would fit; None: all are in memory.
        most: see `kv_bytes`.
    """
    needed = min(context or ENOUGH_CONTEXT, config.max_context)
    contexts = {
        bits: longest_context(config, weights_bytes, limit_bytes, bits, most) for bits in (16, 8, 4)
    }
    fit = Fit(
        verdict=FitVerdict.TOO_LARGE,
        weights_bytes=weights_bytes,
        limit_bytes=limit_bytes,
        max_context=config.max_context,
        needed_context=needed,
        kv_bytes=kv_bytes(config, needed, most=most),
        contexts=contexts,
    )
    if contexts[16] >= config.max_context:
        return replace(fit, verdict=FitVerdict.FITS)
    if contexts[8] >= needed:
        return replace(fit, verdict=FitVerdict.SHORT)
    whole = replace(fit, weights_bytes=stored_bytes or weights_bytes)
    seeing = 0 if folder is None or not any(folder.glob("*.safetensors")) else tower_bytes(folder)
    bits, num_bytes = _conversion(config, whole, kv_bytes(config, needed, 8, most), seeing)
    ranks, pipeline = (None, False) if folder is None else _ranks(folder, whole)
    return replace(
        fit,
        converted_bits=bits,
        converted_bytes=num_bytes,
        ranks=ranks,
        pipeline=pipeline,
        expert_memory=None if folder is None else _expert_memory(config, folder, whole),
    )


def _conversion(
    config: LanguageConfig, fit: Fit, needed_bytes: int, seeing_bytes: int
) -> tuple[int, int] | tuple[None, None]:
    """The most bits a weight that leave so much room for the KV cache, and the weights' bytes.

    `seeing_bytes`: of what sees pictures, which stays as it is.
    """
    stored = config.quantization.default.bits if config.quantization is not None else 16
    for bits in CONVERSIONS:
        taken = seeing_bytes + _converted_bytes(config, fit.weights_bytes - seeing_bytes, bits)
        if bits < stored and taken + needed_bytes <= fit.limit_bytes:
            return bits, taken
    return None, None


def _converted_bytes(config: LanguageConfig, weights_bytes: int, bits: int) -> int:
    quantization = config.quantization
    stored = 16.0 if quantization is None else quantization.default.bits + SCALE_BITS
    count = 8 * weights_bytes / stored
    num_tables = 1 if config.tie_word_embeddings else 2
    of_tables = min(num_tables * config.vocab_size * config.hidden_size, count)
    of_layers = count - of_tables
    table_bits = max(bits, TABLE_BITS)
    return int((of_layers * (bits + SCALE_BITS) + of_tables * (table_bits + SCALE_BITS)) / 8)


def _expert_memory(config: LanguageConfig, folder: Path, fit: Fit) -> int | None:
    """Memory that the rest of a mixture and its KV cache leave for experts, in 100 MB.

    None: it is less than the experts that a token goes to, or all of them have room.
    """
    if not config.num_experts or not any(folder.glob("*.safetensors")):
        return None
    experts = expert_bytes(folder)
    least = experts * max(config.experts_per_token, 2) // config.num_experts
    left = fit.limit_bytes - fit.kv_bytes - (fit.weights_bytes - experts)
    whole = left // 10**8 * 10**8
    return whole if max(least, 10**8) <= whole and left < experts else None


def _ranks(folder: Path, fit: Fit) -> tuple[int | None, bool]:
    """How few ranks have room for their parts of a model, and whether these are whole layers.

    A part of every layer is preferred: then all ranks compute each token together.
    """
    whole = fit.weights_bytes + fit.kv_bytes
    for count in RANKS:
        if RANK_SHARE * whole / count <= fit.limit_bytes and _can_share(folder, count):
            return count, False
        num_groups = _groups_of_layers(folder)
        # The largest stage has one group more than an even share at most.
        if count <= num_groups and whole / count + whole / num_groups <= fit.limit_bytes:
            return count, True
    return None, False


def _can_share(folder: Path, count: int) -> bool:
    """Whether every layer of a model can be divided among `count` ranks."""
    try:
        load_config(folder, Share(0, count))
    except UnsupportedModelError:
        return False
    return True


def _groups_of_layers(folder: Path) -> int:
    """How many groups of layers a model has, if all are like its largest that stays together."""
    try:
        config = load_config(folder)
    except UnsupportedModelError:
        return 0
    bound = family(config.model_type).between_stages(config).bound
    starts = [index for index in range(config.num_layers) if index not in bound]
    longest = max(stop - start for start, stop in pairwise([*starts, config.num_layers]))
    return config.num_layers // longest


def held_bytes(folder: Path, expert_memory: int | None = None, *, head: bool = False) -> int:
    """Bytes of a checkpoint's weights in memory.

    Args:
        expert_memory: bytes of experts that stay in memory; None: all of them do.
        head: with the head that predicts tokens further ahead, which `speculate="mtp"` loads.
    """
    weights = weights_bytes(folder) - row_table_bytes(folder) - _unread_bytes(folder, head=head)
    left_out = 0 if expert_memory is None else max(expert_bytes(folder) - expert_memory, 0)
    return weights - left_out


def _unread_bytes(folder: Path, *, head: bool) -> int:
    """Bytes of what is not loaded: heads, but the first with `head`, and senses without a tower."""
    path = folder / "config.json"
    raw = read_json(path) if path.is_file() else {}
    if not raw or not is_native(raw) or is_encoder(Fields(raw, "config.json")):
        return 0
    config = load_config(folder)
    kind = family(config.model_type)
    num_read = max(len(kind.mtp_blocks(config)), 1) if kind.mtp and head else 0  # layers

    def is_unread(name: str) -> bool:
        layer = layer_ahead(name, config.num_layers)
        return language_name(name) is None if layer is None else layer >= num_read

    headers = [header for tensors in read_headers(folder).values() for header in tensors.items()]
    unread = sum(info.end - info.start for name, info in headers if is_unread(name))
    return max(unread - tower_bytes(folder), 0)


def require_fit(
    name: str,
    folder: Path,
    *,
    weights_bytes: int,
    limit_bytes: int | None = None,
    context: int | None = None,
    kv: KVOptions = NO_OPTIONS,
) -> None:
    """Refuse a model that this machine has no room for, before its weights are read.

    Weights of less than a tenth of the limit are let through unseen.

    Args:
        weights_bytes: that are to be in memory, see `held_bytes`.
        limit_bytes: of weights and KV cache; None: what models may take here.
        context: tokens of a sequence at most; None: as many as the model has.

    Raises:
        InsufficientMemoryError: it says what would fit.
        ModelError: config.json is broken or not supported.
    """
    limit = models_limit_bytes() if limit_bytes is None else limit_bytes
    if 10 * weights_bytes < limit:
        return
    config = load_any_config(folder)
    needed = min(context or ENOUGH_CONTEXT, ENOUGH_CONTEXT)
    stored = held_bytes(folder)
    sizes = {"context": needed, "stored_bytes": stored, "most": kv.window and kv.window + kv.sinks}
    fit = fit_of(config, weights_bytes, limit, folder=folder, **sizes)
    assert fit.contexts is not None
    bits = min(8, max(16 if layer_bits is None else layer_bits for layer_bits in kv.bits))
    if fit.verdict is FitVerdict.TOO_LARGE and fit.contexts[bits] < fit.needed_context:
        raise InsufficientMemoryError(f"{name} d{fit.text[1:]}", param="model")


def longest_context(
    config: LanguageConfig, weights_bytes: int, limit_bytes: int, bits: int, most: int | None = None
) -> int:
    """The most tokens of one sequence, up to the model's own, that fit beside the weights.

    `most`: see `kv_bytes`.
    """
    room = limit_bytes - weights_bytes
    lengths = range(1, config.max_context + 1)
    return bisect_right(lengths, room, key=lambda length: kv_bytes(config, length, bits, most))
