"""Which files of a folder hold the weights, and that they may be trusted. No mlx.

Nothing in a checkpoint is ever run: pickles are refused, `auto_map` and `model_file` are ignored.
"""

from pathlib import Path

from ..errors import CheckpointError, ModelNotFoundError
from .jsonfields import read_json
from .safetensors import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_headers(folder: Path) -> dict[Path, dict[str, TensorInfo]]:
    """The weight files of a checkpoint and what each holds, every header checked.

    Raises:
        ModelNotFoundError: the folder has no safetensors.
        CheckpointError: a broken file, a tensor in two files, or an index that is wrong.
    """
    paths = _weight_files(folder)
    headers = {path: read_header(path) for path in paths}
    owners: dict[str, Path] = {}
    for path, tensors in headers.items():
        for name in tensors:
            if name in owners:
                raise CheckpointError(f"Tensor {name!r} is in {owners[name]} and in {path}.")
            owners[name] = path
    return headers


def _weight_files(folder: Path) -> list[Path]:
    """One file, or what the index lists, or shards without an index: in this order."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _indexed(index)
    paths = sorted(folder.glob("model*.safetensors"))
    if paths:
        return paths
    pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code and is "
            "never opened; use a safetensors version of this model."
        )
    raise ModelNotFoundError(f"{folder} has no model.safetensors.")


def _indexed(index: Path) -> list[Path]:
    """The shards that the index names: plain file names in the index's own folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    names = list(dict.fromkeys(str(name) for name in weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name:
            raise CheckpointError(
                f"{index} names the file {name[:200]!r}; expected the name of a .safetensors file "
                "in the same folder."
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name!r}, which is missing; download it again.")
    return [index.parent / name for name in names]
