"""GGUF metadata -> tokenizer.json, tokenizer_config.json and generation_config.json.

"gpt2" is byte-level BPE with its merges; llama.cpp names the expression that splits a text into
words, and the expressions here are those of the models' own tokenizer.json. An unknown name is
refused: a wrong expression changes the tokens without a sign. "llama" is SentencePiece with merges
that follow from the scores: of two merges, the one with the result of the higher score is applied
first. "gemma4" is the same with its merges in the file.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields


def _ranges(bounds: str) -> str:
    pairs = [pair.split("-") for pair in bounds.split()]
    return "".join(rf"\x{{{first}}}-\x{{{last}}}" for first, last in pairs)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}&&[^\p{{Han}}]]{one}"
            rf"[{lower}&&[^\p{{Han}}]]{two}{_CONTRACTIONS}?"
            for upper, lower in [(_UPPER[1:-1], _LOWER[1:-1])]
            for one, two in ("*+", "+*")
        ),
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ]
)
# Space before the end of a text is one piece, which GPT-2's own expression cuts.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_EXAONE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, r"[0-9][0-9][0-9]")
_OLD = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPARK = (
    *_DEEPSEEK3[:2],
    _DEEPSEEK3[2].replace(rf"[\r\n]*|{_SPACES}", r"|[\r\n]|\s+(?!\S)|\s+"),
    r"\p{N}",
)
_YOUTU = (
    f"[{_ranges('AC00-D7A3 3131-318E')}]+"
    f"|[{_ranges('FF01-FF01 2026-2026 201C-201D 2018-2019 2014-2014 FF1A-FF1B FF0C-FF0C')}"
    f"{_ranges('3001-303F FE30-FE4F')}]+|[{_ranges('3105-312F')}]+"
    f"|[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+",
    _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_TURKISH = _QWEN2.removeprefix(f"{_CONTRACTIONS}|")
_NOT_STOPS = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LONG_SPACES = "|".join([*(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)|\s"])
_JAIS2 = _LLAMA3.replace(r"\s+(?!\S)|\s+", _LONG_SPACES)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_ASIAN_SCRIPTS = _ranges(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF 0E00-0E7F 0E80-0EFF "
    "1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_AFMOE = (  # digits by three from the right
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    f"[{_ASIAN_SCRIPTS}]+",
    _DEEPSEEK3[2],
)
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# First and last code points of letters with case, as DeepSeek LLM and V2 list them; source:
# llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_DEEPSEEK_LLM.
_CASED = (
    "41-5A 61-7A B5-B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F-37F "
    "386-386 388-38A 38C-38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D "
    "1F50-1F57 1F59-1F59 1F5B-1F5B 1F5D-1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE-1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102-2102 2107-2107 210A-2113 "
    "2115-2115 2119-211D 2124-2124 2126-2126 2128-2128 212A-212D 212F-2134 2139-2139 213C-213F "
    "2145-2149 214E-214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B "
    "A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_ranges(_CASED)}]+",
    rf"\s?[{_ranges('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """The parts of tokenizer.json beside vocabulary and merges."""

    patterns: tuple[str, ...]  # each cuts what those before it have left; (): GPT-2's own
    whole_words: bool = False  # a word that is a token needs no merges
    normal_form: bool = False  # NFC first
    adds_bos: bool = False  # where the file does not say
    adds_sep: bool = False


_LLAMA = Pretokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_PLAIN = Pretokenizer(())
_WITH_SEP = Pretokenizer((), adds_sep=True)
_DIGITS = Pretokenizer((r"\p{N}", _GPT2))
_TRIPLES = Pretokenizer((_LLAMA3,))
_OPENAI = Pretokenizer((_GPT4O,))
_ANY = Pretokenizer((_QWEN2,))
_QWEN = Pretokenizer((_QWEN2,), normal_form=True)

PRETOKENIZERS = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        _LLAMA,
    ),
    "jina-v5-nano": _LLAMA,
    "minicpm5": Pretokenizer(_MINICPM5, whole_words=True),
    "jais-2": Pretokenizer((_JAIS2,)),
    "youtu": Pretokenizer(_YOUTU, whole_words=True),
    "spark2_5": Pretokenizer(_SPARK),
    "afmoe": Pretokenizer(_AFMOE),
    "ufakzeka": Pretokenizer((_TURKISH,)),
    "chameleon": Pretokenizer(_CHAMELEON, adds_bos=True),
    "superbpe": Pretokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "granite-embed-multi-97m": Pretokenizer((_GPT4O,), whole_words=True),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Pretokenizer((_NOT_STOPS,))),
    "viking": Pretokenizer((_NOT_STOPS, r"\p{N}")),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), _WITH_SEP),
    "glm4": Pretokenizer((_LLAMA3,), whole_words=True),
    "glm5": Pretokenizer((_LLAMA3,), whole_words=True),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), _TRIPLES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _ANY),
    "qwen35": Pretokenizer((_QWEN35,), normal_form=True),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Pretokenizer(_DEEPSEEK3)
    ),
    "deepseek-llm": Pretokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": Pretokenizer(_CODER),
    "kimi-k2": Pretokenizer((_KIMI,), whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _OPENAI),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Pretokenizer(_AYA)),
    "tekken": Pretokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "mellum", "modern-bert", "trillion"), _PLAIN
    ),
    **dict.fromkeys(
        ("jais", "granite-docling", "gigachat", "a.x-4.0", "jina-v2-es", "jina-v2-de"), _PLAIN
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    "mellum2": _DIGITS,
    "exaone-moe": Pretokenizer((_EXAONE,)),
    "seed-coder": Pretokenizer((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Pretokenizer((_BAILING,))),
    "laguna": Pretokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "falcon": Pretokenizer(_FALCON),
    "default": Pretokenizer(_OLD),  # files from before there were names
}


MAX_PIECE = 256  # characters of a piece that is made by merges

Json = dict[str, Any]
Merges = list[tuple[str, str]]


def pretokenizer_of(fields: Fields) -> Pretokenizer:
    name = fields.text("tokenizer.ggml.pre", default="")
    if not name:
        warnings.warn(
            f"{fields.where} does not say how its tokenizer cuts text (tokenizer.ggml.pre): it is "
            "cut as llama.cpp cuts it, which may not be as the model was trained.",
            stacklevel=2,
        )
        name = "default"
    if name not in PRETOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre in {fields.where} is {name[:40]!r}; known are "
            f"{', '.join(PRETOKENIZERS)}. Name a folder that has the model's tokenizer.json."
        )
    return PRETOKENIZERS[name]


def _byte_level(fields: Fields, tokens: list[str]) -> tuple[tokenizers.Tokenizer, Merges]:
    pretokenizer = pretokenizer_of(fields)
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pretokenizer.whole_words))
    if pretokenizer.normal_form:
        made.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pretokenizer.patterns)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    made.decoder = decoders.ByteLevel()
    return made, _merges(fields, tokens)


def _merges(fields: Fields, tokens: list[str]) -> Merges:
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{fields.where} has no tokenizer.ggml.merges.")
    if not all(" " in merge for merge in merges):
        raise CheckpointError(f"tokenizer.ggml.merges in {fields.where} are not pairs of tokens.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    known = set(tokens)
    for left, right in pairs:
        if not (left in known and right in known and left + right in known):
            raise CheckpointError(
                f"The tokenizer in {fields.where} is broken: it merges {left[:40]!r} and "
                f"{right[:40]!r}, which are no tokens, or make none."
            )
    return pairs


def _sentence_pieces(fields: Fields, tokens: list[str]) -> tuple[tokenizers.Tokenizer, Merges]:
    merged = _kind(fields) == GEMMA4
    unknown = token_of(fields, "unknown", tokens)
    named: Json = {} if unknown is None else {"unk_token": unknown}
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, **named))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.normalizer = normalizers.Replace(" ", "▁")
    if fields.boolean("tokenizer.ggml.add_space_prefix", default=not merged):
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), made.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    return made, _merges(fields, tokens) if merged else _merges_from_scores(fields, tokens)


def _word_pieces(fields: Fields, tokens: list[str], kinds: Any) -> tuple[Any, list[str]]:
    """A tokenizer of WordPiece without its vocabulary, and that: llama.cpp marks where words begin.

    An uncased one, as llama.cpp has it where the file does not say otherwise.
    """
    lower = fields.boolean("tokenizer.ggml.normalizer.lowercase", default=True)
    accents = fields.boolean("tokenizer.ggml.normalizer.strip_accents", default=lower)
    unknown = token_of(fields, "unknown", tokens) or "[UNK]"
    made = tokenizers.Tokenizer(models.WordPiece(unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    marked = [
        token if kind == _CONTROL else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(tokens, kinds.tolist(), strict=True)
    ]
    return made, marked


def _merges_from_scores(fields: Fields, tokens: list[str]) -> Merges:
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None:
        raise CheckpointError(f"{fields.where} has no tokenizer.ggml.scores.")
    return merges_from_scores(tokens, scores)


def merges_from_scores(tokens: list[str], scores: NDArray[np.floating]) -> Merges:
    """The merges of a SentencePiece BPE model, in the order in which they are tried."""
    ids = {token: index for index, token in reversed(list(enumerate(tokens)))}
    merges: list[int] = []  # ids of each: of the token that it makes, and of both parts
    starts: list[str] = []  # tokens that a token begins with, which stand before it when sorted
    for token in sorted(token for token in ids if 0 < len(token) <= MAX_PIECE):
        while starts and not token.startswith(starts[-1]):
            starts.pop()
        for start in starts:
            if (rest := ids.get(token[len(start) :])) is not None:
                merges += ids[token], ids[start], rest
        starts.append(token)
    made, left, right = np.array(merges, np.int64).reshape(-1, 3).T
    order = np.lexsort((right, left, -scores[made].astype(float)))
    pairs = zip(left[order].tolist(), right[order].tolist(), strict=True)
    return [(tokens[first], tokens[second]) for first, second in pairs]


def token_id(fields: Fields, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if fields.get(key) is None:
        return None
    return fields.integer(key, low=0, high=len(tokens) - 1)


def token_of(fields: Fields, name: str, tokens: list[str]) -> str | None:
    index = token_id(fields, name, tokens)
    return None if index is None else tokens[index]


GEMMA4, BERT = "gemma4", "bert"
RAW = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")  # no letters of bytes, though "gpt2"
KINDS = ("gpt2", "llama", GEMMA4, BERT)
MAX_TOKENS = 1 << 22
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "sep_token": "seperator",  # as GGUF has it
    "mask_token": "mask",
}
_SPELT = {"sep": "seperator"}  # as GGUF has it
_ENDS = ("eos", "eot", "eom")


def check_tokenizer(metadata: Mapping[str, Any], label: str) -> bool:
    """Whether there is a tokenizer. One of an unknown kind is refused, before any work."""
    fields = Fields(metadata, label)
    kind = _kind(fields)
    if kind in ("none", "no_vocab"):
        return False
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model in {label} is {kind[:40]!r}; expected {', '.join(KINDS)}. Name "
            "a folder that has the model's tokenizer.json."
        )
    if kind == "gpt2":
        pretokenizer_of(fields)
    _lists(fields)
    return True


def _kind(fields: Fields) -> str:
    kind = fields.text("tokenizer.ggml.model", default="none")
    pieces = kind == "gpt2" and fields.text("tokenizer.ggml.pre", default="") in RAW
    return GEMMA4 if pieces else kind


def tokenizer_files(metadata: Mapping[str, Any], label: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    fields = Fields(metadata, label)
    tokens, kinds = _lists(fields)
    return {
        "tokenizer.json": _tokenizer_json(fields, tokens, kinds),
        "tokenizer_config.json": _dump(_tokenizer_config(fields, tokens)),
        "generation_config.json": _dump(_generation_config(fields, tokens)),
    }


def _tokenizer_json(fields: Fields, tokens: list[str], kinds: Any) -> bytes:
    """The library makes all but the lists, which are put into its JSON: it would hold them thrice.

    No tokenizer is made here: whoever loads the files makes it.
    """
    by_bytes = _kind(fields) == "gpt2"
    merges: Merges = []
    if _kind(fields) == BERT:
        made, tokens = _word_pieces(fields, tokens, kinds)
    else:
        made, merges = (_byte_level if by_bytes else _sentence_pieces)(fields, tokens)
    vocab = {token: index for index, token in reversed(list(enumerate(tokens)))}  # the first counts
    usual = pretokenizer_of(fields) if by_bytes else _LLAMA
    if _kind(fields) == BERT:
        usual = Pretokenizer((), adds_bos=True, adds_sep=True)
    _frame(made, fields, tokens, {"bos": usual.adds_bos, "eos": False, "sep": usual.adds_sep})
    tokenizer_json: Json = json.loads(made.to_str())
    tokenizer_json["model"] |= {"vocab": vocab} | ({"merges": merges} if merges else {})
    tokenizer_json["added_tokens"] = [
        _added(int(index), tokens[index], special=int(kinds[index]) == _CONTROL)
        for index in np.flatnonzero((kinds == _CONTROL) | (kinds == _USER_DEFINED))
        if tokens[index] and vocab[tokens[index]] == index
    ]
    return json.dumps(tokenizer_json, ensure_ascii=False).encode()


def _added(index: int, token: str, *, special: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def _lists(fields: Fields) -> tuple[list[str], Any]:
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


def _frame(
    made: tokenizers.Tokenizer, fields: Fields, tokens: list[str], usual: Mapping[str, bool]
) -> None:
    """Put tokens before and after a text; `usual`: which, where the file does not say."""
    put = {}
    for name, default in usual.items():
        token = token_of(fields, _SPELT.get(name, name), tokens)
        if token is None and name == "bos":
            token = token_of(fields, "cls", tokens)
        stated = fields.boolean(f"tokenizer.ggml.add_{name}_token", default=default)
        if stated and token is not None:
            put[name] = {"id": name, "ids": [tokens.index(token)], "tokens": [token]}

    def around(text: str) -> list[str]:
        kind = text.partition(":")[2] or "0"
        ends = {name: [f"{name}:{kind}"] for name in put}
        behind = ends.get("eos", ends.get("sep", []))  # never both
        return [*ends.get("bos", ()), text, *behind]

    if put:
        made.post_processor = processors.TemplateProcessing(
            single=around("$A"),
            pair=[*around("$A"), *around("$B:1")],
            special_tokens=list(put.values()),
        )


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
    if question := next((t["template"] for t in named_templates if t["name"] == "rerank"), ""):
        config["chat_template"] = _of_pairs(question)
    elif template is not None and named_templates:
        config["chat_template"] = [{"name": "default", "template": template}, *named_templates]
    elif template is not None:
        config["chat_template"] = template
    return config


def _of_pairs(text: str) -> str:
    """llama.cpp's template of a reranker, "{query}" and "{document}" in a text, as Jinja's."""
    text = re.sub(r"(?<=<Instruct>: )([^\n{}]+)(?=\n)", r"{system:\1}", text)
    made = ""
    for part in re.split(r"(\{(?:query|document|system:[^{}]+)\})", text):
        role, _, default = part[1:-1].partition(":")
        if part.startswith("{") and part.endswith("}"):
            said = f"messages | selectattr('role', 'equalto', '{role}') | map(attribute='content')"
            made += f"{{{{ {said} | first | default({json.dumps(default)}, true) }}}}"
        elif part:
            made += f"{{{{ {json.dumps(part)} }}}}"
    return made


def _generation_config(fields: Fields, tokens: list[str]) -> Json:
    ends = [token_id(fields, name, tokens) for name in _ENDS]
    known = list(dict.fromkeys(index for index in ends if index is not None))
    config: Json = {"eos_token_id": known} if known else {}
    first = token_id(fields, "bos", tokens)
    return config if first is None else {"bos_token_id": first, **config}


def _dump(value: Json) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
