"""The `tokenizers` library behind a guard. Knows how it fails; no requests, no templates."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError

MAX_TOKENIZER_BYTES = 512 << 20
LONG_TEXT = 20_000  # characters, from which on other threads must go on while a text is encoded
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


class TokenizerPanicError(Exception):
    """The Rust side of `tokenizers` panicked; the message says where."""


@contextmanager
def panic_guard() -> Iterator[None]:
    """Turn a Rust panic, which is a BaseException of no importable class, into an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicError(str(error)) from None


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the folder's tokenizer, without truncation and padding.

    Raises:
        CheckpointError: tokenizer.json is broken, too large, or makes texts explode; or there is
            nothing of a tokenizer.
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
        # transformers would make one without tokens
        raise CheckpointError(f"{folder} has no tokenizer; add the model's tokenizer.json.")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, we do not
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
    """Return by how much the part can lengthen a text, over all of its steps."""
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
    """Encode, with every way in which the library fails turned into InvalidRequestError."""
    try:
        with panic_guard():
            if isinstance(text, str) and len(text) > LONG_TEXT:  # `encode` holds the GIL, this not
                ids: list[int] = backend.encode_batch([text], add_special_tokens=special)[0].ids
            else:
                ids = backend.encode(text, add_special_tokens=special).ids
    except TypeError:  # a str that is not text: a lone surrogate
        raise InvalidRequestError(NOT_TEXT) from None
    except TokenizerPanicError as error:
        raise InvalidRequestError(f"The tokenizer cannot encode this text: {error}") from None
    return ids


NOT_TEXT = "The text is not valid Unicode: it holds half of a surrogate pair, or was not UTF-8."
