"""Reads a checkpoint's tokenizer.json and the small files beside it.

Those are tokenizer_config.json, generation_config.json and the chat templates. The `tokenizers`
library reads the first; each of its failures, Rust panics included, becomes an exception of this
package.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError

MAX_TOKENIZER_BYTES = 512 << 20
LONG_TEXT = 20_000  # characters; longer texts are encoded without the GIL
TOKENIZER_FILES = (
    "tokenizer.*",
    "tokenizer-*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "*.spm",
)
MAX_GROWTH = 64  # how many times longer a normalizer or decoder may make a text


NOT_TEXT = "The text is not valid Unicode: it holds half of a surrogate pair, or was not UTF-8."
MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20  # the longest in use have some tens of kilobytes
NAMED_TOKENS = tuple(f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])


class TokenizerPanicError(Exception):
    """The Rust side of `tokenizers` panicked; the message says where."""


@contextmanager
def panic_guard() -> Iterator[None]:
    """Turn a Rust panic, a BaseException without an importable class, into TokenizerPanicError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicError(str(error)) from None


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the folder's tokenizer, without truncation and padding.

    Raises:
        CheckpointError: there is no tokenizer, or tokenizer.json is broken, too large, or makes
            texts explode.
        UnsupportedModelError: there is no tokenizer.json and transformers cannot make one.
    """
    path = folder / "tokenizer.json"
    backend = _from_file(path) if path.is_file() else _from_transformers(folder)
    backend.no_truncation()
    backend.no_padding()
    for part in ("normalizer", "decoder"):
        growth = _growth(part_spec(backend, part))
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{path}: its {part} can make a text {growth:.0f} times longer; "
                f"at most {MAX_GROWTH} times is accepted."
            )
    return backend


def part_spec(backend: tokenizers.Tokenizer, part: str) -> dict[str, Any] | None:
    """Return the JSON description of the backend's "normalizer" or "decoder", None without one."""
    value = getattr(backend, part)
    if value is None:
        return None
    try:
        spec: dict[str, Any] = json.loads(value.__getstate__())
    except (ValueError, TypeError, RecursionError):  # a part written in Python has no JSON
        return {"type": "Custom"}
    return spec


def _from_file(path: Path) -> tokenizers.Tokenizer:
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; at most {MAX_TOKENIZER_BYTES} are read.")
    try:
        with panic_guard():
            return tokenizers.Tokenizer.from_file(str(path))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the library raises bare Exception for every broken file
        raise CheckpointError(
            f"{path} is not a tokenizer that this version of tokenizers reads ({error}); "
            "download it again, or check where it was made."
        ) from None


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        # transformers would make a tokenizer without tokens
        raise CheckpointError(f"{folder} has no tokenizer; add the model's tokenizer.json.")
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # else it warns that PyTorch is missing
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json. Other tokenizer files are read through transformers, "
            "which is not installed: `pip install transformers sentencepiece`, or add the file."
        ) from None
    try:
        with panic_guard():
            wrapper = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # foreign code over foreign files: it raises nearly anything
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: transformers finds no tokenizer here: {reason}"
        ) from error
    backend = getattr(wrapper, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"{folder}: {type(wrapper).__name__} has no form that `tokenizers` runs; "
            "a model with tokenizer.json is needed."
        )
    return backend


def _growth(spec: dict[str, Any] | None) -> float:
    """Return the factor by which a normalizer or decoder can lengthen a text."""
    if spec is None:
        return 1.0
    steps = spec.get("normalizers") or spec.get("decoders")
    if isinstance(steps, list):
        return math.prod(_growth(step) for step in steps)
    if spec.get("type") == "Replace":
        pattern = spec.get("pattern", {})
        # a regular expression may match a single character, or none at all
        shortest = len(pattern.get("String", "")) or 1
        return max(1.0, len(spec.get("content", "")) / shortest)
    return 1.0


def encode_guarded(backend: tokenizers.Tokenizer, text: str, *, special: bool) -> list[int]:
    """Return the ids of a text; every failure of the library becomes InvalidRequestError."""
    try:
        with panic_guard():
            if isinstance(text, str) and len(text) > LONG_TEXT:  # `encode` would hold the GIL
                ids: list[int] = backend.encode_batch([text], add_special_tokens=special)[0].ids
            else:
                ids = backend.encode(text, add_special_tokens=special).ids
    except TypeError:  # a str that is not text: a lone surrogate
        raise InvalidRequestError(NOT_TEXT) from None
    except TokenizerPanicError as error:
        raise InvalidRequestError(f"The tokenizer cannot encode this text: {error}") from None
    return ids


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of the files beside tokenizer.json, in one form.

    Attributes:
        named: {"bos_token": text, "eos_token": ...}, the names that templates use.
        added: (token as JSON, is special) in the order of their ids.
        eos_ids: of generation_config.json, else of config.json.
        bos_id: of generation_config.json, else of config.json.
        templates: {name: jinja source} of the chat templates.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    added: tuple[tuple[dict[str, Any], bool], ...] = ()
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    templates: Mapping[str, str] = field(default_factory=dict)


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files beside tokenizer.json; a missing file counts as empty.

    Raises:
        CheckpointError: a file is not JSON, not an object, too large, or not UTF-8.
    """
    config = read_json(folder / "tokenizer_config.json")
    model = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read_json(folder / "special_tokens_map.json")}
    return TokenizerFiles(
        named=_named_tokens(config),
        added=_added_tokens(config, folder),
        eos_ids=_eos_ids(generation) or _eos_ids(model),
        bos_id=_bos_id({**model, **generation}),
        templates=_templates(folder, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def read_text(path: Path, max_bytes: int) -> str:
    """Return the content of a UTF-8 file of at most `max_bytes`."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are accepted.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def _token_text(value: object) -> str | None:
    """Return the text of a token that is spelled as a string or as {"content": ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added_tokens(config: dict[str, Any], folder: Path) -> tuple[tuple[dict[str, Any], bool], ...]:
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder}: added_tokens_decoder is not a JSON object.")
    sound = [
        (int(index), entry)
        for index, entry in entries.items()
        if index.isdecimal() and isinstance(entry, dict) and _token_text(entry)
    ]
    return tuple(
        (entry, bool(entry.get("special"))) for _, entry in sorted(sound, key=lambda pair: pair[0])
    )


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if type(v) is int and v >= 0)


def _bos_id(config: dict[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    return value if type(value) is int and value >= 0 else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return {name: source} with the precedence of transformers' tokenizer and processor classes.

    Template files come first, then chat_template.json, then tokenizer_config.json.
    """
    found = {
        path.name.removesuffix(".jinja"): read_text(path, MAX_TEMPLATE_BYTES)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    single = folder / "chat_template.jinja"
    if single.is_file():
        found = {"default": read_text(single, MAX_TEMPLATE_BYTES), **found}
    if found:
        return found
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    return _as_templates(legacy) or _as_templates(config.get("chat_template"))


def _as_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if isinstance(v, str)}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
        return {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}
    return {}
