"""GGUF metadata -> tokenizer.json and what stands beside it. Knows no tensors."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from ....text.tokenizer_files import panic_guard
from .words import Json, byte_level, pretokenizer_of, sentence_pieces, token_id, token_of

MAX_TOKENS = 1 << 22
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")


def check_tokenizer(metadata: Mapping[str, Any], label: str) -> bool:
    """Whether there is a tokenizer; refused here, before anything is converted, if it is not known.

    Raises:
        CheckpointError: lists that do not go together.
        UnsupportedModelError: another kind of tokenizer.
    """
    fields = Fields(metadata, label)
    kind = fields.text("tokenizer.ggml.model", default="none")
    if kind in ("none", "no_vocab"):
        return False
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"tokenizer.ggml.model in {label} is {kind[:40]!r}; expected gpt2 or llama. Name a "
            "folder that has the model's tokenizer.json."
        )
    if kind == "gpt2":
        pretokenizer_of(fields)
    _lists(fields)
    return True


def tokenizer_files(metadata: Mapping[str, Any], label: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises:
        CheckpointError, UnsupportedModelError: as check_tokenizer(); and for a vocabulary that the
            tokenizers library does not take.
    """
    fields = Fields(metadata, label)
    tokens, kinds = _lists(fields)
    by_bytes = fields.text("tokenizer.ggml.model") == "gpt2"
    spec = byte_level(fields, tokens) if by_bytes else sentence_pieces(fields, tokens)
    spec["added_tokens"] = _added(tokens, kinds)
    spec["post_processor"] = _frame(fields, tokens, by_bytes=by_bytes)
    return {
        "tokenizer.json": _verified(spec, label),
        "tokenizer_config.json": _dump(_tokenizer_config(fields, tokens)),
        "generation_config.json": _dump(_generation_config(fields, tokens)),
    }


def _lists(fields: Fields) -> tuple[list[str], Any]:
    """The tokens, and what kind each is."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_TOKENS:
        raise CheckpointError(f"tokenizer.ggml.tokens in {fields.where} is no list of tokens.")
    kinds = fields.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = np.ones(len(tokens), np.int32)
    scores = fields.get("tokenizer.ggml.scores")
    for name, values in (("token_type", kinds), ("scores", scores)):
        if values is None:
            continue
        if not isinstance(values, np.ndarray) or values.shape != (len(tokens),):
            raise CheckpointError(
                f"tokenizer.ggml.{name} in {fields.where} is not one number for each of "
                f"{len(tokens)} tokens."
            )
    return tokens, kinds


def _added(tokens: list[str], kinds: Any) -> list[Json]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], **flags, "special": int(kinds[index]) == _CONTROL}
        for index in np.flatnonzero((kinds == _CONTROL) | (kinds == _USER_DEFINED)).tolist()
        if tokens[index]
    ]


def _frame(fields: Fields, tokens: list[str], *, by_bytes: bool) -> Json | None:
    """Tokens put before and after a text."""
    usual = pretokenizer_of(fields).adds_bos if by_bytes else True
    ends = {
        "bos": fields.boolean("tokenizer.ggml.add_bos_token", default=usual),
        "eos": fields.boolean("tokenizer.ggml.add_eos_token", default=False),
    }
    named = {name: token_of(fields, name, tokens) for name, wanted in ends.items() if wanted}
    put = {name: token for name, token in named.items() if token is not None}
    if not put:
        return None
    special = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in put.values()
    }

    def around(text: str, kind: int) -> list[Json]:
        parts: list[Json] = [{"Sequence": {"id": text, "type_id": kind}}]
        if "bos" in put:
            parts.insert(0, {"SpecialToken": {"id": put["bos"], "type_id": kind}})
        if "eos" in put:
            parts.append({"SpecialToken": {"id": put["eos"], "type_id": kind}})
        return parts

    single = around("A", 0)
    pair = [*single, *around("B", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _tokenizer_config(fields: Fields, tokens: list[str]) -> Json:
    named = {key: token_of(fields, name, tokens) for key, name in _NAMED.items()}
    config: Json = {key: token for key, token in named.items() if token is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    template = fields.text("tokenizer.chat_template", default=None)
    others = fields.get("tokenizer.chat_templates")
    named_templates = [
        {"name": name, "template": fields.text(f"tokenizer.chat_template.{name}")}
        for name in (others if isinstance(others, list) else [])
    ]
    if template is not None and named_templates:
        config["chat_template"] = [{"name": "default", "template": template}, *named_templates]
    elif template is not None:
        config["chat_template"] = template
    return config


def _generation_config(fields: Fields, tokens: list[str]) -> Json:
    """All tokens that end an answer, not only the first of them."""
    ends = [token_id(fields, name, tokens) for name in _ENDS]
    known = list(dict.fromkeys(index for index in ends if index is not None))
    config: Json = {"eos_token_id": known} if known else {}
    first = token_id(fields, "bos", tokens)
    return config if first is None else {"bos_token_id": first, **config}


def _verified(spec: Json, label: str) -> bytes:
    """tokenizer.json as the library itself writes it."""
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None, **spec})
    try:
        with panic_guard():
            made: str = tokenizers.Tokenizer.from_str(text).to_str()
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the library raises bare Exception for every broken vocabulary
        raise CheckpointError(f"The tokenizer in {label} is broken: {error}.") from None
    return made.encode()


def _dump(value: Json) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
