"""An adapter's folder: its config and its tensors' headers say which matrices it changes.

Knows no model and reads no matrices: what cannot be right is refused before anything is loaded.
mlx-lm's layout is read here (`adapters.safetensors` beside an adapter_config.json of its own;
source: mlx-lm 0.32, `tuner/utils.py` (`linear_to_lora_layers`, `load_adapters`),
`tuner/lora.py`), PEFT's in peft.py.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ...errors import AdapterNotFoundError, CheckpointError, UnsupportedModelError
from ..identity import hash_files
from ..jsonfields import Fields, read_json
from ..weights.files import TensorInfo, read_header

CONFIG = "adapter_config.json"
PEFT_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"
MAX_RANK = 1024
FLOATS = ("F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.npz")


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The matrices that an adapter has for one module, or for one parameter of experts.

    Attributes:
        rank: r.
        scale: of B A.
        a, b: names of the tensors.
        magnitude: that of DoRA's lengths; None: LoRA.
        layout: of a and b: "peft" (r, in) and (out, r), "mlx" (in, r) and (r, out), "stack"
            (E, r, in) and (E, out, r), or "parameter", see `peft.py`.
    """

    path: str
    rank: int
    scale: float
    a: str
    b: str
    magnitude: str | None
    layout: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """One adapter on the disk."""

    folder: Path  # where it lies
    file: Path  # with its tensors
    kind: str  # for people: "LoRA", "rsLoRA" or "DoRA"
    base: str | None  # the name of the model that it was made for; None: it does not say
    modules: tuple[AdapterModule, ...]  # what it changes
    # whether a module of the model, by its path in a checkpoint, is to be among them; the second
    # argument is the number of the model's layers
    wants: Callable[[str, int], bool]
    identity: str  # equal for equal files, different for all others


Parts = Mapping[str, str]
"""One module's tensors: "a", "b", "magnitude" -> the name in the file."""


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def layer_of(path: str) -> int | None:
    """The number of the decoder layer that a module belongs to; None: it belongs to none."""
    match = _LAYER.search(path)
    return int(match[1]) if match else None


def in_layer(path: str) -> str:
    """The path of a module within its layer, or the whole of it where it belongs to none."""
    match = _LAYER.search(path)
    return match[2] if match else path


def find_file(folder: Path) -> tuple[Path, Fields]:
    """The tensors of an adapter and its config."""
    if not os.path.isdir(folder):  # unlike `is_dir` not an error where a path is too long
        raise AdapterNotFoundError(
            f"There is no folder {str(folder)[:200]!r}; an adapter is a folder with {CONFIG} and "
            f"{PEFT_FILE} (PEFT) or {MLX_FILE} (mlx-lm)."
        )
    files = [folder / name for name in (PEFT_FILE, MLX_FILE) if (folder / name).is_file()]
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder} has its adapter in {pickles[0]}, a pickle, which can run any code and "
                "is never opened; save it with safe_serialization=True."
            )
        raise AdapterNotFoundError(f"{folder} has no {PEFT_FILE} and no {MLX_FILE}.")
    if len(files) > 1:
        raise CheckpointError(f"{folder} has both {PEFT_FILE} and {MLX_FILE}; leave one of them.")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}, which says rank and scale.")
    return files[0], Fields(read_json(folder / CONFIG), str(folder / CONFIG))


def adapter_identity(file: Path) -> str:
    """A name for the contents of an adapter's two files."""
    try:
        digests = hash_files([file.parent / CONFIG, file])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    return blake2b(" ".join(digests).encode(), digest_size=20).hexdigest()


def checked_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of the file, all of them floats."""
    headers = read_header(file)
    if not headers:
        raise CheckpointError(f"{file} has no tensors.")
    for name, info in headers.items():
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"Tensor {name[:200]!r} of {file} is {info.dtype}; expected {', '.join(FLOATS)}."
            )
    return headers


def complete(parts: Parts, path: str, file: Path) -> tuple[str, str]:
    """The names of A and B; raises CheckpointError where one is missing."""
    for part, word in (("a", "A"), ("b", "B")):
        if part not in parts:
            raise CheckpointError(f"{file} has no matrix {word} for {path[:200]!r}.")
    return parts["a"], parts["b"]


def check_rank(rank: int, stated: int, path: str, file: Path) -> None:
    """Raise CheckpointError unless a matrix has the rank that the config states, and a sane one."""
    if rank != stated:
        raise CheckpointError(
            f"The matrices for {path[:200]!r} in {file} have rank {rank}; {CONFIG} says {stated}."
        )
    if not 0 < rank <= MAX_RANK:
        raise CheckpointError(
            f"The rank for {path[:200]!r} in {file} is {rank}; expected 1 to {MAX_RANK}."
        )


_LEAVES = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}


def read_mlx_lm(file: Path, config: Fields) -> AdapterFolder:
    """The adapter of a folder."""
    kind = _kind(config)
    stated = config.fields("lora_parameters")
    if stated is None:
        raise CheckpointError(f"{config.where} has no lora_parameters, which say rank and scale.")
    rank = stated.integer("rank", high=2**20)
    scale = stated.number("scale", low=-1e6, high=1e6)
    keys = stated.items("keys")
    num_layers = config.integer("num_layers", low=-1)
    headers, tensors = checked_headers(file), dict[str, dict[str, str]]()
    for name in headers:
        path, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES or not path:
            raise CheckpointError(
                f"{file} has a tensor {name[:200]!r}; expected lora_a, lora_b and m of modules."
            )
        tensors.setdefault(path, {})[_LEAVES[leaf]] = name
    modules = [
        _module(path, parts, headers, rank, scale, dora=kind == "dora", file=file)
        for path, parts in tensors.items()
    ]
    stated_keys = None if keys is None else frozenset(map(str, keys))
    kinds = stated_keys or frozenset(map(in_layer, tensors))  # what it has in one layer, in all

    def wants(path: str, count: int) -> bool:
        layer = layer_of(path)
        first = count - num_layers if num_layers > 0 else 0
        return in_layer(path) in kinds and (layer is None or layer >= first)

    return AdapterFolder(
        folder=file.parent,
        file=file,
        kind="DoRA" if kind == "dora" else "LoRA",
        base=config.text("model", default=None),
        modules=tuple(modules),
        wants=wants,
        identity=adapter_identity(file),
    )


def _kind(config: Fields) -> str:
    kind = config.text("fine_tune_type", default="lora")
    if kind == "full":
        raise UnsupportedModelError(
            f"fine_tune_type in {config.where} is 'full': whole matrices, not an adapter; "
            "fuse them with mlx_lm.fuse and serve the result."
        )
    if kind not in ("lora", "dora"):
        raise UnsupportedModelError(
            f"fine_tune_type in {config.where} is {kind[:40]!r}; supported are 'lora' and 'dora'."
        )
    return kind


def _module(
    path: str,
    parts: dict[str, str],
    headers: dict[str, TensorInfo],
    rank: int,
    scale: float,
    *,
    dora: bool,
    file: Path,
) -> AdapterModule:
    a, b = complete(parts, path, file)
    shapes = headers[a].shape, headers[b].shape
    stacked = len(shapes[0]) == 3
    if len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (2, 3):
        raise CheckpointError(f"The matrices for {path[:200]!r} in {file} are {shapes}.")
    has_rank = shapes[0][1], shapes[1][2 if stacked else 0]
    for rank_rows in has_rank:
        check_rank(rank_rows, rank, path, file)
    magnitude = parts.get("magnitude")
    if dora != (magnitude is not None):
        raise CheckpointError(
            f"{file} {'lacks' if dora else 'has'} lengths of DoRA (m) for {path[:200]!r}, and "
            f"fine_tune_type in {CONFIG} is {'dora' if dora else 'lora'!r}."
        )
    return AdapterModule(path, rank, scale, a, b, magnitude, "stack" if stacked else "mlx", shapes)
