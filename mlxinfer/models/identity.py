"""Which weights a folder holds, told by samples of them: quick for any size. No mlx."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from .safetensors import TensorInfo, read_header

SAMPLE_BYTES = 4096  # of each tensor that is looked at, from its middle
MAX_SAMPLES = 4096  # tensors of a file that are looked at


def content_id(folder: Path) -> str:
    """A name for the weights in a checkpoint folder: the same for copies, another for any others.

    From config.json, and of each safetensors file its header and a sample of every tensor: a merged
    adapter or a finetune has the same config, sizes and names, and may change few tensors.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = blake2b(digest_size=20)
    try:
        for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
            for part in _parts(path):
                digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    yield path.name.encode()
    if path.suffix == ".json":
        yield path.read_bytes()
        return
    tensors = list(read_header(path).values())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        yield file.read(length)
        for info in tensors[:: -(-len(tensors) // MAX_SAMPLES) or 1]:
            yield _sample(file, info, 8 + length)


def _sample(file: BinaryIO, info: TensorInfo, data_start: int) -> bytes:
    count = min(SAMPLE_BYTES, info.end - info.start)
    file.seek(data_start + (info.start + info.end - count) // 2)
    return file.read(count)
