"""How a text becomes pieces, in the terms of tokenizer.json: two kinds of BPE. Knows no files.

"gpt2" is byte-level BPE with its merges; "llama" is SentencePiece, whose merges follow from the
scores: two pieces that make a third are merged the earlier, the higher that one's score is.
"""

from typing import Any

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from .pretokenizers import PRETOKENIZERS, Pretokenizer

MAX_PIECE = 256  # characters of a piece that is made by merges

Json = dict[str, Any]


def pretokenizer_of(fields: Fields) -> Pretokenizer:
    """How texts are cut into words.

    Raises:
        UnsupportedModelError: the file does not say, or says what is not known.
    """
    name = fields.text("tokenizer.ggml.pre", default="not said")
    if name not in PRETOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre in {fields.where} is {name[:40]!r}; known are "
            f"{', '.join(PRETOKENIZERS)}. Name a folder that has the model's tokenizer.json."
        )
    return PRETOKENIZERS[name]


def byte_level(fields: Fields, tokens: list[str]) -> Json:
    """Byte-level BPE: its normalizer, pre_tokenizer, decoder and model for tokenizer.json."""
    own = pretokenizer_of(fields)
    bytes_as_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cut: list[Json] = []
    if own.pattern:
        pattern = {"Regex": own.pattern}
        cut.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    cut.append({**bytes_as_letters, "use_regex": own.pattern is None})
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{fields.where} has no tokenizer.ggml.merges.")
    pairs = [merge.split(" ", 1) for merge in merges]
    if not all(len(pair) == 2 for pair in pairs):
        raise CheckpointError(f"tokenizer.ggml.merges in {fields.where} are not pairs of tokens.")
    return {
        "normalizer": {"type": "NFC"} if own.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
        "decoder": {**bytes_as_letters, "use_regex": True},
        "model": _bpe(tokens, pairs, ignore_merges=own.whole_words),
    }


def sentence_pieces(fields: Fields, tokens: list[str]) -> Json:
    """SentencePiece's BPE: the same parts."""
    prefixed = fields.boolean("tokenizer.ggml.add_space_prefix", default=True)
    space: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: Json = space
    if prefixed:
        normalizer = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, space],
        }
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None:
        raise CheckpointError(f"{fields.where} has no tokenizer.ggml.scores.")
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            tokens,
            merges_from_scores(tokens, scores.tolist()),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=token_of(fields, "unknown", tokens),
        ),
    }


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """The merges of a SentencePiece BPE model, in the order in which they are tried."""
    ids = {token: index for index, token in reversed(list(enumerate(tokens)))}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token) if len(token) <= MAX_PIECE else 1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _bpe(tokens: list[str], merges: list[list[str]], **settings: Any) -> Json:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    defaults = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **plain, **settings, "vocab": vocab, "merges": merges}


def token_id(fields: Fields, name: str, tokens: list[str]) -> int | None:
    """The id that the file gives a role ("bos"); None where it does not."""
    key = f"tokenizer.ggml.{name}_token_id"
    if fields.get(key) is None:
        return None
    return fields.integer(key, low=0, high=len(tokens) - 1)


def token_of(fields: Fields, name: str, tokens: list[str]) -> str | None:
    """The token that the file gives a role."""
    index = token_id(fields, name, tokens)
    return None if index is None else tokens[index]
