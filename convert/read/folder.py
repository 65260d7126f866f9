"""A folder of safetensors as a Source: headers are checked, schemes are chosen."""

import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...models.jsonfields import read_json
from ...models.weights.files import TensorInfo as Entry
from ...models.weights.files import read_headers
from .base import DroppableFiles, LocalFiles, ReaderSource, majority_dtype
from .methods import choose_method, readers_of, without_quantization
from .origin import Origin, origin_of_folder
from .stored import StoredArray

QUANT_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
SIDE_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json"),
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "*.tiktoken", "additional_chat_templates/*.jinja"),
    # How sentence-transformers pools, and what it does behind that.
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"),
)
_NOT_THE_TOKENIZERS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)

SideFiles = Callable[[], Mapping[str, bytes | Path]]


def open_folder(folder: Path, tokenizer: SideFiles | None = None) -> ReaderSource:
    """The checkpoint in a folder, in any of the formats that methods.py knows.

    Args:
        tokenizer: files from elsewhere, instead of those in the folder.

    Raises:
        CheckpointError: a file that is broken or disagrees with another.
        ModelNotFoundError: no safetensors.
        UnsupportedModelError: a format that is not known.
    """
    config = read_json(folder / "config.json")
    headers = {path.name: entries for path, entries in read_headers(folder).items()}
    stats = {name: (folder / name).stat() for name in headers}
    starts = {name: data_start(folder / name) for name in headers}
    files = LocalFiles({name: stat.st_size for name, stat in stats.items()}, folder)
    beside = {name: read_json(folder / name) for name in QUANT_FILES if (folder / name).is_file()}
    digest = blake2b(repr((config, beside)).encode(), digest_size=20)
    for name, stat in stats.items():
        digest.update(f"{name} {file_state(stat)} {headers[name]}".encode())
    side_files = exchanged(local_side_files(folder), tokenizer)
    digest.update(digest_of(side_files))
    return assemble(
        label=str(folder),
        config=config,
        beside=beside,
        arrays=stored_arrays(headers, starts, files),
        files=files,
        side_files=lambda: side_files,
        fingerprint=digest.hexdigest(),
        is_here=True,
        origin=lambda: origin_of_folder(folder),
    )


def assemble(
    *,
    label: str,
    config: Mapping[str, Any],
    beside: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, StoredArray],
    files: DroppableFiles,
    side_files: SideFiles,
    fingerprint: str,
    is_here: bool,
    origin: Callable[[], Origin],
) -> ReaderSource:
    """A Source from the checked headers of a safetensors checkpoint.

    Raises:
        CheckpointError, UnsupportedModelError: as open_folder().
    """
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"config.json of {label} has no model_type.")
    method = choose_method(config, beside, is_here=is_here)
    readers, notes = readers_of(arrays, method.claims)
    infos = [reader.info for reader in readers.values()]
    return ReaderSource(
        label=label,
        format=method.label,
        config=without_quantization(config),
        dtype=majority_dtype(config, infos, method.dtype),
        readers=readers,
        files=files,
        side_files=side_files,
        fingerprint=fingerprint,
        notes=notes,
        origin=origin,
    )


def stored_arrays(
    headers: Mapping[str, Mapping[str, Entry]],
    starts: Mapping[str, int],
    files: DroppableFiles,
) -> dict[str, StoredArray]:
    """Every array of some safetensors files; `starts` are the bytes where their data begin."""
    return {
        name: StoredArray(name, entry.dtype, entry.shape, file, starts[file] + entry.start, files)
        for file, entries in headers.items()
        for name, entry in entries.items()
    }


def local_side_files(folder: Path) -> dict[str, bytes | Path]:
    """Tokenizer, templates and the like, by their path within the folder."""
    return {
        path.relative_to(folder).as_posix(): path
        for pattern in SIDE_FILES
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def exchanged(
    own: Mapping[str, bytes | Path], tokenizer: SideFiles | None
) -> Mapping[str, bytes | Path]:
    """A checkpoint's own side files, but for another tokenizer where one is given."""
    if tokenizer is None:
        return own
    return {name: own[name] for name in _NOT_THE_TOKENIZERS if name in own} | dict(tokenizer())


def file_state(stat: os.stat_result) -> str:
    """What changes with a file's contents: also the time and place that no program can set."""
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def digest_of(files: Mapping[str, bytes | Path]) -> bytes:
    """A digest of names and contents, of side files: small."""
    digest = blake2b(digest_size=20)
    for name, content in sorted(files.items()):
        data = content if isinstance(content, bytes) else content.read_bytes()
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.digest()


def data_start(path: Path) -> int:
    """The byte of a safetensors file, checked before, where its data begin."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
