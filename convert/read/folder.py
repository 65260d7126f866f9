"""A folder of safetensors as a Source: headers are checked, schemes are chosen."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path

from ...errors import CheckpointError
from ...models.jsonfields import read_json
from ...models.weights.files import INDEX, read_headers
from ...models.weights.files import TensorInfo as Entry
from .methods import choose_method, readers_of, without_quantization
from .source import SourceModel, majority_dtype, origin_of_folder
from .stored import StoredArray

QUANT_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "*.tiktoken",
    "chat_templates/*.jinja", "additional_chat_templates/*.jinja",
    # The terms, which a copy has to carry.
    "[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*", "NOTICE*", "Notice*", "COPYING*", "USE_POLICY*",
    # How sentence-transformers pools, and what it does behind that.
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "[0-9]*_*/config.json", "[0-9]*_*/model.safetensors",
)  # fmt: skip
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "*.tiktoken", "chat_templates/*", "additional_chat_templates/*",
)  # fmt: skip
_MADE_ANEW = ("config.json", INDEX, "README.md", *QUANT_FILES, "report.json", "tensors.svg")


def open_folder(folder: Path, tokenizer: Mapping[str, bytes | Path] | None = None) -> SourceModel:
    """The checkpoint in a folder, in any of the formats that methods.py knows.

    Args:
        tokenizer: files from elsewhere, instead of those in the folder.
    """
    config = read_json(folder / "config.json")
    headers = read_headers(folder)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"config.json of {folder} has no model_type.")
    beside = {name: read_json(folder / name) for name in QUANT_FILES if (folder / name).is_file()}
    side_files = exchanged(local_side_files(folder), tokenizer)
    digest = blake2b(repr((config, beside)).encode(), digest_size=20)
    for path, entries in headers.items():
        digest.update(f"{path.name} {file_state(path)} {entries}".encode())
    digest.update(digest_of(side_files))
    method = choose_method(config, beside)
    arrays = {array.name: array for path in headers for array in arrays_of(path, headers[path])}
    readers, notes = readers_of(arrays, method.claims)
    infos = [reader.info for reader in readers.values()]
    if left := left_out(folder, side_files):
        notes = (*notes, f"Not copied from {folder.name}: {', '.join(left)}.")
    if method.label == "FP8" and not any(info.stored.startswith("fp8") for info in infos):
        notes = (*notes, "config.json says that weights are fp8; all of them are plain floats.")
    return SourceModel(
        label=str(folder),
        format=method.label,
        config=without_quantization(config),
        dtype=majority_dtype(config, infos, method.dtype),
        readers=readers,
        side_files=lambda: side_files,
        fingerprint=digest.hexdigest(),
        notes=notes,
        origin=origin_of_folder(folder),
    )


def arrays_of(path: Path, entries: Mapping[str, Entry]) -> Iterator[StoredArray]:
    """The arrays of a safetensors file; the header was checked before."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    for name, entry in entries.items():
        yield StoredArray(name, entry.dtype, entry.shape, path, start + entry.start, size)


def local_side_files(folder: Path) -> dict[str, bytes | Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for pattern in SIDE_FILES
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def exchanged(
    files: Mapping[str, bytes | Path], tokenizer: Mapping[str, bytes | Path] | None
) -> Mapping[str, bytes | Path]:
    """A checkpoint's side files, with another tokenizer if one is given."""
    if tokenizer is None:
        return files
    model_files = {n: content for n, content in files.items() if not _is_tokenizer_file(n)}
    tokenizer_files = {n: content for n, content in tokenizer.items() if _is_tokenizer_file(n)}
    return model_files | tokenizer_files


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _TOKENIZER_FILES)


def left_out(folder: Path, kept: Iterable[str]) -> list[str]:
    """Files of a folder that a conversion neither copies nor makes anew; a folder as "name/"."""
    known = {*kept, *_MADE_ANEW}
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name in known or any(part.startswith(".") for part in name.split("/")):
            continue
        top, slash, _ = name.partition("/")
        if slash or not path.name.endswith(".safetensors"):
            names.add(top + slash)
    return sorted(names)


def file_state(path: Path) -> str:
    """A text that changes with a file's contents; no program can set its last two parts."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def digest_of(files: Mapping[str, bytes | Path]) -> bytes:
    digest = blake2b(digest_size=20)
    for name, content in sorted(files.items()):
        data = content if isinstance(content, bytes) else content.read_bytes()
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.digest()
