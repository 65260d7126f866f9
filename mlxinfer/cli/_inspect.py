"""Facts about a model folder from its JSON files and safetensors headers. Loads no weights."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .. import hub
from ..errors import CheckpointError, MlxinferError, UnsupportedModelError
from ..hub.remote import Listing, RemoteFile, read_beginning
from ..memory import weights_bytes
from ..memory.fit import Fit, FitVerdict, fit_of, held_bytes
from ..memory.roofline import Work
from ..models import load_any_config
from ..models.jsonfields import MAX_JSON_BYTES, read_json
from ..models.language import LanguageConfig
from ..models.registry import language_name, layer_ahead, predictors_read, predictors_text
from ..models.towers.loading import tower_bytes
from ..models.weights.files import (
    INDEX,
    TensorInfo,
    is_expert,
    is_row_table,
    read_headers,
    row_table_bytes,
)
from ..text import Tokenizer
from ..text.samples import thinking_levels
from ._model import has_chat_template

MAX_CONFIG_BYTES = 4 << 20
MAX_REQUESTS = 8  # to the hub at once, for headers of weight files


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Sizes of the weights, those of parts from the safetensors headers."""

    parameters: int
    num_bytes: int  # of their files
    bits_per_weight: float  # average over all tensors, scales included
    work: Work  # of one token
    expert_bytes: int = 0  # of experts that a router chooses from
    active_expert_bytes: int = 0  # of those that one token goes to
    tower_bytes: int = 0  # of what sees pictures
    table_bytes: int = 0  # of tables of n-grams, which stay in their files
    heads: str | None = None  # that predict tokens further ahead, and whether they are read


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts of `show`. `config` is None where `problem` says why the model cannot run.

    `thinking` is what a client may ask for: "off", "on" and efforts.
    """

    folder: Path
    model_type: str | None
    config: LanguageConfig | None
    weights: WeightSizes | None
    chat_template: bool
    thinking: tuple[str, ...]
    problem: MlxinferError | None

    @property
    def is_broken(self) -> bool:
        """Whether files are missing or damaged; an unsupported architecture is no damage."""
        return self.problem is not None and not isinstance(self.problem, UnsupportedModelError)


def summarise(folder: Path) -> Summary:
    """Read what can be read; a broken or unsupported part is reported in `problem`, not raised."""
    problems: list[MlxinferError] = []
    config, weights, template = None, None, False
    thinking: tuple[str, ...] = ()
    try:
        template = has_chat_template(folder)
        config = load_any_config(folder)
    except MlxinferError as error:
        problems.append(error)
    try:
        weights = count_weights(folder, config)
        thinking = thinking_levels(Tokenizer.from_folder(folder).template)
    except MlxinferError as error:
        problems.append(error)
    problem = problems[0] if problems else None
    return Summary(folder, _model_type(folder), config, weights, template, thinking, problem)


def _model_type(folder: Path) -> str | None:
    try:
        model_type = read_json(folder / "config.json").get("model_type")
    except CheckpointError:
        return None
    return model_type if isinstance(model_type, str) else None


def count_weights(folder: Path, config: LanguageConfig | None) -> WeightSizes:
    """Return parameters and bytes of the checkpoint; packed weights count unpacked."""
    parameters = num_bytes = expert_bytes = 0
    token_bytes = token_weights = 0.0
    headers = read_headers(folder)
    for tensors in headers.values():
        for name, info in tensors.items():
            size, count = info.end - info.start, _parameters(name, info, tensors, config)
            share = share_of_token(name, info.shape, config)
            num_bytes += size
            parameters += count
            expert_bytes += size if is_expert(name) else 0
            token_bytes += share * size
            token_weights += share * count
    work = Work(round(token_bytes), round(token_weights))
    chosen = 0.0
    if config is not None and config.num_experts:
        chosen = config.experts_per_token / config.num_experts
    active, seeing = round(expert_bytes * chosen), 0 if config is None else tower_bytes(folder)
    bits = round(8 * num_bytes / parameters, 2) if parameters else 0.0
    size = weights_bytes(folder)
    heads = None if config is None else _heads([n for ts in headers.values() for n in ts], config)
    tables = row_table_bytes(folder)
    return WeightSizes(parameters, size, bits, work, expert_bytes, active, seeing, tables, heads)


def _heads(names: list[str], config: LanguageConfig) -> str | None:
    """Return what is said of the heads of a checkpoint with these tensors, None if it has none."""
    count, read = predictors_read(names, config)
    return predictors_text(count, read) if count else None


def share_of_token(name: str, shape: tuple[int, ...], config: LanguageConfig | None) -> float:
    """Return the part of a tensor that one token is computed with.

    Of experts those that are chosen; of embeddings, images, sound and prediction heads nothing.
    """
    if config is None or (language := language_name(name)) is None or is_row_table(name):
        return 0.0
    if "embed_tokens" in language:
        tied = config.tie_word_embeddings and "per_layer" not in language
        return 1.0 if tied else 0.0  # else one row of it is read
    if layer_ahead(name, config.num_layers) is not None:
        return 0.0
    stacked = len(shape) == 3 and shape[0] == config.num_experts
    if config.num_experts and (stacked or ".experts." in language):
        return config.experts_per_token / config.num_experts
    return 1.0


def _parameters(
    name: str, info: TensorInfo, tensors: dict[str, TensorInfo], config: LanguageConfig | None
) -> int:
    stem, _, last = name.rpartition(".")
    packed = tensors.get(f"{stem}.weight")
    if last in ("scales", "biases") and packed is not None and packed.dtype == "U32":
        return 0
    if info.dtype == "U32" and config is not None and config.quantization is not None:
        return prod(info.shape) * 32 // config.quantization.of(stem).bits
    if name.endswith("_scales"):
        return 0
    return prod(info.shape) * (2 if name.endswith("_blocks") else 1)  # two 4-bit numbers a byte


def _write_header(listing: Listing, file: RemoteFile, folder: Path) -> None:
    """Write a weight file of a repository with its header alone: what follows is a hole."""
    length = int.from_bytes(read_beginning(listing, file.path, 8), "little")
    with (folder / Path(file.path).name).open("wb") as stub:
        stub.write(read_beginning(listing, file.path, 8 + min(length, MAX_JSON_BYTES)))
        stub.truncate(file.size)


def _write_text(plan: hub.DownloadPlan, name: str, folder: Path, limit: int) -> None:
    if any(file.path == name for file in plan.files):
        (folder / name).write_bytes(read_beginning(plan.listing, name, limit))


def fit_of_repository(name: str, limit_bytes: int) -> Fit:
    """The verdict of a repository of the hub; a folder on this disk gets the same."""
    plan = hub.plan_pull(name)
    files = [file for file in plan.files if file.path.endswith(".safetensors")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_text(plan, "config.json", folder, MAX_CONFIG_BYTES)
        try:
            config = load_any_config(folder)
        except MlxinferError as error:
            return Fit(
                verdict=FitVerdict.UNSUPPORTED,
                weights_bytes=sum(file.size for file in files),
                limit_bytes=limit_bytes,
                problem=str(error).replace(temporary, name),
            )
        _write_text(plan, INDEX, folder, MAX_JSON_BYTES)
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            list(pool.map(lambda file: _write_header(plan.listing, file, folder), files))
        return fit_of(config, held_bytes(folder), limit_bytes, folder=folder)
