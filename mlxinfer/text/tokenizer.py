"""Text to token ids and back, for one checkpoint. Independent of chat, streams and models.

The `tokenizers` library reads tokenizer.json and encodes. Each of its failures, also a panic of its
Rust code, becomes an exception of this package.
"""

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from ..files import read_json
from .template import ChatTemplate
from .tokenizer_files import TokenizerFiles, read_tokenizer_files

MAX_TEXT_CHARS = 16_000_000
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
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|call|>")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
USUAL_CHARS = 8  # per token; shorter texts are encoded at once
EXACT_CHARS = 1_000_000  # shorter texts, too: clients compact by the true length of a prompt
PIECE_CHARS = 32_768
SLACK = 2  # a text has a few more tokens for every cut
INCOMPLETE = "\ufffd"  # as `decode` writes bytes that are no character, or not yet
_MISTRALS = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
_MENDED_IN = 5  # the version of transformers that writes the right pattern
_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OF_MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerPanicError(Exception):
    """The Rust side of `tokenizers` panicked; the message says where."""


@contextmanager
def panic_guard() -> Iterator[None]:
    """Turn a Rust panic, a BaseException without an importable class, into TokenizerPanicError."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if not _is_panic(error):
            raise
        raise TokenizerPanicError(str(error)) from None


def _is_panic(error: BaseException) -> bool:
    """Whether this comes from Rust: a panic is no Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def encoding_failures() -> Iterator[None]:
    try:
        with panic_guard():
            yield
    except (TypeError, UnicodeEncodeError):  # a str that is not text: a lone surrogate
        raise InvalidRequestError(NOT_TEXT) from None
    except TokenizerPanicError as error:
        raise InvalidRequestError(f"The tokenizer cannot encode this text: {error}") from None


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the folder's tokenizer, without truncation and padding.

    Raises:
        CheckpointError: there is no tokenizer, or tokenizer.json is broken, too large, or makes
            texts explode.
        UnsupportedModelError: there is no tokenizer.json and transformers cannot make one.
    """
    path = folder / "tokenizer.json"
    backend = _from_file(path) if path.is_file() else _from_transformers(folder)
    _mend_mistral(backend, folder)
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


def _mend_mistral(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Replace the pattern of Llama 3 that older versions of transformers wrote for Mistral's.

    It divides words and numbers where Mistral's models never saw them divided. Source: what
    transformers does with `fix_mistral_regex`.
    """
    model = read_json(folder / "config.json")
    version = re.match("[0-9]+", str(model.get("transformers_version")))
    if model.get("model_type") not in _MISTRALS or (version and int(version[0]) >= _MENDED_IN):
        return
    parts = (part_spec(backend, "pre_tokenizer") or {}).get("pretokenizers") or [{}]
    is_wrong = parts[0].get("pattern") == {"Regex": _OF_LLAMA3}
    if is_wrong and backend.token_to_id("[INST]") is not None:
        pattern = tokenizers.Regex(_OF_MISTRAL)
        backend.pre_tokenizer[0] = tokenizers.pre_tokenizers.Split(pattern, "isolated")


def part_spec(backend: tokenizers.Tokenizer, part: str) -> dict[str, Any] | None:
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
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder} holds no model; expected config.json, tokenizer.json and safetensors."
            )
        raise CheckpointError(f"{folder} has no tokenizer; add the model's tokenizer.json.")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns: PyTorch is missing
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
    ids: list[int]
    with encoding_failures():
        if isinstance(text, str) and len(text) > LONG_TEXT:
            # `encode` would hold the GIL, and offsets hold it while they are freed.
            ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        else:
            ids = backend.encode(text, add_special_tokens=special).ids
    return ids


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads at once, without waiting.

    The library's tokenizer has a setting: whether special tokens are matched in a text. It is set
    once, because other threads may be encoding. A text that spells such tokens and must stay text
    goes to a second copy of the tokenizer with the opposite setting.

    Attributes:
        vocab_size: one more than the largest id.
        eos_token_ids: tokens that end an answer. They are the ids of generation_config.json (or
            config.json), the tokenizer's own eos_token, and the usual ends of a turn if the chat
            template writes them: many checkpoints do not declare these.
        bos_token_id: the token that begins a text, None without one.
        special_ids: control tokens, which `decode` leaves out.
        template: the chat template, None without one.
        id_to_piece: gives the token of an id as the vocabulary spells it (`Ġthe`, `▁the`,
            `<0x0A>`), or None. The library's own function, as it is called for every token.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    special_ids: frozenset[int]
    template: ChatTemplate | None
    id_to_piece: Callable[[int], str | None]

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles | None = None) -> None:
        files = files or TokenizerFiles()
        self._backend = backend
        self.id_to_piece = backend.id_to_token
        self._literal: tokenizers.Tokenizer | None = None  # matches no special tokens; made late
        self._lock = threading.Lock()  # held while it is made
        _add_missing_tokens(backend, files)
        backend.encode_special_tokens = False
        self.added_tokens: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        special = {i: token for i, token in self.added_tokens.items() if token.special}
        self.special_ids = frozenset(special)
        self._special_texts = tuple(token.content for token in special.values())
        # such tokens are matched in normalised text, to which other spellings lead
        self._special_anywhere = any(token.normalized for token in special.values())
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.named_tokens = dict(files.named)
        self.decoder_spec: dict[str, Any] | None = part_spec(backend, "decoder")
        self.template = (
            ChatTemplate(files.templates, variables=self.named_tokens) if files.templates else None
        )
        self._resolve_ends(files)

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | Path | None = None) -> "Tokenizer":
        """Load a checkpoint's tokenizer and chat template.

        Args:
            chat_template: a file with the jinja source to use instead of the checkpoint's own.

        Raises:
            InvalidRequestError: there is no such file.
            CheckpointError: a file is broken, truncated or hostile.
            UnsupportedModelError: there is no tokenizer.json, and transformers cannot make one.
        """
        return cls(load_backend(folder), read_tokenizer_files(folder, chat_template))

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens)"

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of `text`.

        Args:
            text: any valid Unicode up to MAX_TEXT_CHARS characters.
            add_special_tokens: add the tokens that the tokenizer puts around a text, such as BOS. A
                text that already begins with BOS (under `parse_special`) gets no second one.
            parse_special: read special-token text (`<|im_end|>`) as control tokens; otherwise it is
                plain text like any other.

        Raises:
            InvalidRequestError: the text is too long, not valid Unicode, or the tokenizer fails.
        """
        check_text(text)
        backend = self._backend if parse_special else self.literal_backend(text)
        ids = encode_guarded(backend, text, special=add_special_tokens)
        doubled = self._adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled and add_special_tokens and parse_special else ids

    @cached_property
    def _adds_bos(self) -> bool:
        ids = encode_guarded(self._backend, "", special=True)
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]

    def literal_backend(self, text: str) -> tokenizers.Tokenizer:
        """Return the library's tokenizer in the setting that matches no special token in `text`."""
        if not self._special_anywhere and not any(s in text for s in self._special_texts):
            return self._backend
        with self._lock:
            if self._literal is None:
                self._literal = tokenizers.Tokenizer.from_str(self.to_json())
                self._literal.encode_special_tokens = True
            return self._literal

    def finder(self, tokens: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
        """Return a tokenizer that finds these tokens in a text, as ids from 1 on; 0 is the rest."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        if self._backend.normalizer is not None:
            finder.normalizer = self._backend.normalizer
        finder.add_tokens(list(tokens))
        return finder

    def num_special_tokens(self, *, pair: bool) -> int:
        return int(self._backend.num_special_tokens_to_add(pair))

    def with_special_tokens(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding | None = None
    ) -> tokenizers.Encoding:
        return self._backend.post_process(first, second, True)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` as text only: no added token is matched, special or not."""
        check_text(text)
        backend = self._backend
        with encoding_failures():
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            splits = [text]
            if backend.pre_tokenizer is not None:
                splits = [s for s, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
            return [token.id for split in splits for token in backend.model.tokenize(split)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids without a token are left out.

        Raises:
            InvalidRequestError: an id is negative or exceeds 32 bits, or the tokenizer fails.
        """
        try:  # no panic_guard: this is called for every token
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(f"These are not token ids: {error}") from None
        except BaseException as error:  # as panic_guard
            if not _is_panic(error):
                raise
            raise InvalidRequestError(f"The tokenizer cannot decode these ids: {error}") from None
        return text

    def ids_with(self, text: str) -> frozenset[int]:
        """Return the tokens whose bytes contain `text`. Looks at the whole vocabulary."""
        wanted = text.encode()
        return frozenset(i for i, held in enumerate(self._all_bytes) if wanted in held)

    @cached_property
    def _all_bytes(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id: a second for a large vocabulary, so it is made once."""
        return tuple(self.token_bytes(i) for i in range(self.vocab_size))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for within a text, b"" for an id without a token.

        A character may be spread over several tokens, so the bytes need not be valid UTF-8. Control
        tokens give their own text.
        """
        piece = self.id_to_piece(token_id)
        if piece is None:
            return b""
        if token_id in self.added_tokens:
            return piece.encode()
        return piece_bytes(piece, self.decoder_spec)

    def difference(self, other: "Tokenizer") -> str | None:
        """Return the first token, by id, that differs in `other`; None where all are the same."""
        ours, theirs = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        if ours == theirs:
            return None
        differing = sorted({(i, piece) for piece, i in ours.items() ^ theirs.items()})
        number = differing[0][0]
        return f"token {number} is {self.id_to_piece(number)!r} and {other.id_to_piece(number)!r}"

    def piece_to_id(self, piece: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(piece)
        return token_id

    def to_json(self) -> str:
        return str(self._backend.to_str())

    def _resolve_ends(self, files: TokenizerFiles) -> None:
        self.bos_token_id = self.piece_to_id(self.named_tokens.get("bos_token", ""))
        if self.bos_token_id is None and files.bos_id is not None:
            self.bos_token_id = files.bos_id if files.bos_id < self.vocab_size else None
        eos = self.piece_to_id(self.named_tokens.get("eos_token", ""))
        declared = {i for i in files.eos_ids if i < self.vocab_size}
        sources = files.templates.values()
        turns = [end for end in TURN_ENDS if any(end in source for source in sources)]
        end_ids = (eos, *map(self.piece_to_id, turns))
        self.eos_token_ids = frozenset(declared.union(i for i in end_ids if i is not None))


def _add_missing_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add the tokens that only tokenizer_config.json declares, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for entry, special in files.added:
        if entry["content"] in known:
            continue
        flags = {k: bool(entry[k]) for k in _TOKEN_FLAGS if k in entry}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], special=special, **flags)])
        known.add(entry["content"])
    missing = [text for text in files.named.values() if text and text not in known]
    backend.add_special_tokens(list(dict.fromkeys(missing)))


def check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"Expected text, got {type(text).__name__}.")
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"The text has {len(text)} characters; at most {MAX_TEXT_CHARS} are accepted."
        )


def exceeds_tokens(
    encode: Callable[[str], Sequence[int]], texts: Sequence[str], num_tokens: int
) -> int:
    """A lower bound of the tokens of `texts`, where they are certain to be more than `num_tokens`.

    0 promises nothing: only encoding all texts tells. That takes a second per million characters,
    and cannot be interrupted. So texts of more than `EXACT_CHARS` are encoded in pieces, until
    these have twice `num_tokens` tokens; shorter ones are left to be counted exactly.

    Args:
        encode: turns one text into ids.
    """
    if sum(map(len, texts)) <= max(USUAL_CHARS * num_tokens, EXACT_CHARS):
        return 0
    count = 0
    for piece in _pieces(texts):
        count += len(encode(piece))
        if count > SLACK * num_tokens:
            return count // SLACK  # a text has a few more tokens for every cut
    return 0


def _pieces(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            yield text[start : start + PIECE_CHARS]


def piece_bytes(piece: str, decoder: dict[str, Any] | None) -> bytes:
    """Return the bytes of a token within a text, for a decoder with this JSON description."""
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    kinds = {part.get("type"): part for part in parts}
    if "ByteLevel" in kinds and all(char in BYTE_OF for char in piece):
        return bytes(BYTE_OF[char] for char in piece)
    if "ByteFallback" in kinds and (match := _FALLBACK.fullmatch(piece)):
        return bytes.fromhex(match[1])
    if "Metaspace" in kinds:
        piece = piece.replace(kinds["Metaspace"]["replacement"], " ")
    for part in parts:
        if part.get("type") == "Replace" and "String" in part["pattern"]:
            piece = piece.replace(part["pattern"]["String"], part["content"])
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's {character: byte}; bytes that are not printable stand at U+0100 and up.

    Source: Radford et al. 2019, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(unprintable)}


BYTE_OF = _byte_alphabet()
