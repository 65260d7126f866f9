"""Tokenizers from GGUF metadata: the ids of the tokenizer, or the algorithm, they came from."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.gguf_files import write_model
from oracles.sentencepiece import pieces_of
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mlxinfer.convert.read import SourceModel, open_source
from mlxinfer.convert.read.gguf.header import BEAT
from mlxinfer.convert.read.gguf.tokenizer import PRETOKENIZERS, merges_from_scores, tokenizer_files
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.session.pooling_rows import INSTRUCTION, JUDGE, JUDGED
from mlxinfer.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "Hello, world! It's 12345 o'clock; they'LL go.",
    "  two  spaces\n\n\tand tabs\r\n",
    "Größe café naïve — “quotes” 日本語 русский 🙂👍🏽",
    "HTTPServer camelCase snake_case x/=y//z",
    "<|im_start|>user\nhi<|im_end|>",
    "cased ﬁ Ⱥβ ＷＩＤＥ！\u3000ƻ ʔ ა ʰ K Ω 12345ab  ",
    "价格是 9999 元。カタカナと한국어 <tag>.method()\n\n\n  end ",
]
TRAINING = [*TEXTS, Path(__file__).read_text(), Path(gguf.__file__).read_text()] * 2

# As they stand in the tokenizer.json of Llama 3, Qwen 2.5 and 3.5, gpt-oss and Mistral Nemo, of
# DeepSeek V3, LLM and Coder, where several cut one after the other, and in Kimi K2's code.
EXPRESSIONS = {
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
        "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
        "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲"
        "𑢠-𑣟𞤀-𞥃]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}+",
    ),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+",
        "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}",
    ),
    "kimi-k2": (
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "smollm": (
        r"\p{N}",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "tiny_aya": (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "laguna": (
        r"[^\n]+|[\n]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}  # fmt: skip

BY_VOCABULARY = ("falcon", "default")  # llama.cpp's vocabularies try these


def expressions(name: str) -> tuple[str, ...]:
    """Those that cut a text, one after the other."""
    patterns = EXPRESSIONS[name]
    return patterns if isinstance(patterns, tuple) else (patterns,)


def with_tokenizer(folder: Path, tokenizer: dict[str, Any], case: str = "qwen3-v4") -> SourceModel:
    config = {**tiny_config(case), "vocab_size": len(tokenizer["tokens"])}
    write_model(folder / "m.gguf", config, tiny_tensors(config), tokenizer=tokenizer)
    return open_source(folder / "m.gguf")


def written(source: SourceModel, folder: Path) -> Path:
    """The source's side files beside its config."""
    folder.mkdir(exist_ok=True)
    for name, content in source.side_files().items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    return folder


@pytest.fixture(scope="module")
def trained() -> dict[str, tokenizers.Tokenizer]:
    """Byte-level BPE with each model's expression, trained on a few texts."""
    result = {}
    for name in EXPRESSIONS:
        whole = name in ("llama-bpe", "tekken", "kimi-k2")
        tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(
                    pre_tokenizers.Split(Regex(expression), "isolated")
                    for expression in expressions(name)
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(TRAINING, trainer)
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens(["snake_case"])
        result[name] = tokenizer
    return result


def as_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    spec = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(index) for index in range(size)]
    types = [NORMAL] * size
    for added in spec["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [" ".join(pair) for pair in spec["model"]["merges"]]
    ids = {"bos": size - 3, "eos": size - 2}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "types": types,
        "merges": merges,
        "ids": ids,
        "flags": {"add_bos_token": False},
        "template": "{{ messages[0].content }}",
    }


@pytest.mark.alike
@pytest.mark.parametrize("pre", EXPRESSIONS)
def test_byte_level_bpe_gives_the_same_ids(tmp_path: Path, trained: Any, pre: str) -> None:
    original = trained[pre]
    source = with_tokenizer(tmp_path, as_metadata(original, pre))
    folder = written(source, tmp_path / "out")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder).encode(TEXTS[0])) > 10
    for text in TEXTS:
        expected = original.encode(text).ids
        assert ours.encode(text).ids == expected, text
        assert original.decode(expected) == ours.decode(expected)


def test_smollm_cuts_as_its_own_tokenizer_does() -> None:
    """Which is digits one by one, and then GPT-2's expression."""
    parts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    cuts = (
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions("smollm")
    )
    ours = [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    for text in TEXTS:
        result, theirs = (
            pre_tokenizers.Sequence(expression).pre_tokenize_str(text)
            for expression in (ours, parts)
        )
        assert [word for word, _ in result] == [word for word, _ in theirs]


TEXT = "Hello  WORLD 1234567 12 don't, 你好…。 \n\n  x\tİstanbul'da 한국어 ไทย"
PIECES = {  # of TEXT; "·" stands between
    "minicpm5": (
        "Hello· · WORLD· ·123·456·7· ·12· don·'t·,· 你好·…。· \n\n· "
        "· x·\tİstanbul·'d·a· 한국어· ไทย"
    ),
    "jais-2": (
        "Hello· · WORLD· ·123·456·7· ·12· don·'t·,· 你好·…。· \n\n· "
        "· x·\tİstanbul·'d·a· 한국어· ไทย"
    ),
    "youtu": (
        "Hello· · WORLD· ·1·2·3·4·5·6·7· ·1·2· don't·,· ·你好·…。· \n\n"
        "· · x·\tİstanbul'd·a· ·한국어· ไทย"
    ),
    "spark2_5": (
        "Hello· · WORLD· ·1·2·3·4·5·6·7· ·1·2· don·'t·,· ·你好·…。· \n\n "
        "· x·\tİstanbul·'da· 한국어· ไทย"
    ),
    "afmoe": (
        "Hello· · WORLD· ·1·234·567· ·12· don·'t·,· ·你好·…。· \n\n"
        "· · x·\tİstanbul·'da· ·한국어· ·ไทย"
    ),
    "ufakzeka": (
        "Hello· · WORLD· ·1·2·3·4·5·6·7· ·1·2· don·'t·,· 你好·…。· \n\n"
        "· · x·\tİstanbul·'da· 한국어· ไทย"
    ),
    "chameleon": (
        "Hello·  ·WORLD· ·1·2·3·4·5·6·7· ·1·2· don·'·t·,· 你好·…·。"
        "· ·\n·\n·  ·x·\t·İstanbul·'·da· 한국어· ไทย"
    ),
    "superbpe": ("Hello  WORLD ·1·234·567· ·12· don't, 你好…。 \n\n  x\tİstanbul'da 한국어 ไทย"),
    "bloom": (
        "Hello· · WORLD· 1234567· 12· don't·,· 你好·…。 \n\n · x·\t·İstanbul'da· 한국어· ไทย"
    ),
    "viking": (
        "Hello· · WORLD· ·1·2·3·4·5·6·7· ·1·2· don't·,· 你好·…。 \n\n "
        "· x·\t·İstanbul'da· 한국어· ไทย"
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_text_is_cut_as_the_table_of_llama_cpp_says(name: str) -> None:
    cuts = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRETOKENIZERS[name].patterns
    ]
    pieces = pre_tokenizers.Sequence(cuts).pre_tokenize_str(TEXT)
    assert "·".join(piece for piece, _ in pieces) == PIECES[name]


def test_every_expression_is_tried() -> None:
    """GPT-2's own, which is the tokenizers library's, is the one without an expression."""
    patterns = {
        pretokenizer.patterns
        for name, pretokenizer in PRETOKENIZERS.items()
        if name not in BY_VOCABULARY
    } - {PRETOKENIZERS[name].patterns for name in PIECES}
    assert {PRETOKENIZERS[name].patterns for name in (*EXPRESSIONS, "gpt-2")} == patterns


def test_what_stands_beside_the_vocabulary(tmp_path: Path, trained: Any) -> None:
    metadata = as_metadata(trained["llama-bpe"], "llama-bpe")
    size = len(metadata["tokens"])
    metadata["ids"]["eot"] = size - 1
    metadata["flags"] = {}
    source = with_tokenizer(tmp_path, metadata)
    files = source.side_files()
    config = json.loads(files["tokenizer_config.json"])
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [size - 2, size - 1]
    assert source.config["eos_token_id"] == size - 2
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert made.encode("x").ids[0] == size - 3  # Llama 3 begins with bos where a file is silent
    assert made.token_to_id("snake_case") == size - 1


def test_the_question_of_a_reranker_is_its_template() -> None:
    """As llama.cpp's converter writes it; an instruction stands in the place of its own."""
    body = f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}"
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_templates": ["rerank"],
        "tokenizer.chat_template.rerank": f"{JUDGE}{body}{JUDGED}",
    }
    config = json.loads(tokenizer_files(metadata, "x.gguf")["tokenizer_config.json"])
    template = jinja2.Template(config["chat_template"], keep_trailing_newline=True)
    pair = [{"role": "query", "content": "{a}\n"}, {"role": "document", "content": "{{ b }}"}]
    for said in (None, "x"):
        messages = pair if said is None else [{"role": "system", "content": said}, *pair]
        asked = f"<Instruct>: {said or INSTRUCTION}\n<Query>: {{a}}\n\n<Document>: {{{{ b }}}}"
        assert template.render(messages=messages) == f"{JUDGE}{asked}{JUDGED}"


def test_unknown_tokenizers_are_refused_before_reading(tmp_path: Path, trained: Any) -> None:
    metadata = as_metadata(trained["qwen2"], "qwen2")
    for change, message in (({"pre": "klingon"}, "klingon"), ({"model": "rwkv"}, "rwkv")):
        with pytest.raises(UnsupportedModelError, match=message):
            with_tokenizer(tmp_path, {**metadata, **change})
    without = {key: value for key, value in metadata.items() if key != "pre"}
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre.*as llama\.cpp cuts it"):
        with_tokenizer(tmp_path, without)
    with pytest.raises(CheckpointError, match="token_type"):
        with_tokenizer(tmp_path, {**metadata, "types": metadata["types"][:-1]})


def test_a_vocabulary_that_makes_no_tokenizer(tmp_path: Path, trained: Any) -> None:
    metadata = as_metadata(trained["qwen2"], "qwen2")
    source = with_tokenizer(tmp_path, {**metadata, "merges": ["not-there either"]})
    with pytest.raises(CheckpointError, match="broken"):
        source.side_files()
    source = with_tokenizer(tmp_path, {**metadata, "merges": ["alone"]})
    with pytest.raises(CheckpointError, match="pairs"):
        source.side_files()
    source = with_tokenizer(tmp_path, {**metadata, "ids": {"bos": 10_000}})
    with pytest.raises(CheckpointError, match="bos_token_id"):
        source.side_files()


def sentence_pieces(prefix: bool) -> dict[str, Any]:
    """A vocabulary with control tokens, all bytes, letters, and pieces with scores as trained."""
    words = [*"▁etahsniordlwuc.,12"]
    pieces = ["he", "▁t", "in", "▁a", "er", "▁the", "the", "on", "re", "▁w", "or", "▁wor", "ld"]
    pieces += ["▁world", "and", "▁and", "ll", "ell", "ello", "hello", "▁hello", "▁▁", "12", "an"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(words))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(words))]
    return {
        "model": "llama",
        "tokens": [*tokens, "<mark>"],
        "types": [*types, USER_DEFINED],
        "scores": [*scores, -1000.0],
        "ids": {"bos": 1, "eos": 2, "unknown": 0},
        "flags": {"add_bos_token": True, "add_space_prefix": prefix},
    }


SPM_TEXTS = [
    "hello world",
    "  hello   and hello",
    "the other 1212 wor",
    "ünïcödé 日本 and\nlines",
    "and, the. wellhello",
    "",
]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_the_ids_of_its_algorithm(tmp_path: Path, prefix: bool) -> None:
    metadata = sentence_pieces(prefix)
    source = with_tokenizer(tmp_path, metadata, "llama-v4" if prefix else "gemma3_text-v4")
    ours = tokenizers.Tokenizer.from_str(source.side_files()["tokenizer.json"].decode())
    for text in SPM_TEXTS:
        expected = pieces_of(
            text, metadata["tokens"], metadata["scores"], prefix=prefix and text != ""
        )
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected) == text
    assert ours.encode("a").ids[0] == 1
    assert (
        ours.encode("a<mark>a", add_special_tokens=False).ids.count(len(metadata["tokens"]) - 1)
        == 1
    )


def gemma(tokens: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """As transformers builds Gemma's tokenizer (models/gemma/tokenization_gemma.py)."""
    vocab = {token: index for index, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


def test_gemma_4_merges_as_its_file_says(tmp_path: Path) -> None:
    """Spaces become ▁ anywhere, words are not cut, what is unknown becomes bytes."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁*[^▁\n]+"), "isolated")
    learner.train_from_iterator(
        [*SPM_TEXTS, *TRAINING], trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    spec = json.loads(learner.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *octets, *sorted(spec["vocab"], key=spec["vocab"].__getitem__)]
    merges = [tuple(pair) for pair in spec["merges"]]
    metadata = {
        "model": "gemma4",
        "tokens": tokens,
        "types": [*[CONTROL] * 3, UNKNOWN, *[BYTE] * 256, *[NORMAL] * len(spec["vocab"])],
        "scores": [0.0] * len(tokens),
        "merges": [" ".join(pair) for pair in merges],
        "ids": {"bos": 2, "eos": 1, "unknown": 3},
        "flags": {},
    }
    source = with_tokenizer(tmp_path, metadata, "gemma3_text-v4")
    ours = tokenizers.Tokenizer.from_str(source.side_files()["tokenizer.json"].decode())
    theirs = gemma(tokens, merges)
    for text in (*TEXTS, *SPM_TEXTS, "\n\n\n two\n\n", "emoji 🥲🩵"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.encode(text).ids == [2, *expected]
        assert ours.decode(expected) == text
    del metadata["merges"]
    with pytest.raises(CheckpointError, match="merges"):
        with_tokenizer(tmp_path, metadata, "gemma3_text-v4").side_files()


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=4, max_size=12, unique=True),
    st.data(),
)
def test_merges_follow_from_scores(words: list[str], data: st.DataObject) -> None:
    """Any vocabulary over three letters, any distinct scores: the same pieces."""
    tokens = [*"abc", *(word for word in words if len(word) > 1)]
    order = data.draw(st.permutations(range(len(tokens))))
    scores = [-float(place) for place in order]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges_from_scores(tokens, np.array(scores))))
    text = data.draw(st.text("abc", max_size=12))
    assert made.encode(text).ids == pieces_of(text, tokens, scores, prefix=False)


def test_scores_are_needed(tmp_path: Path) -> None:
    metadata = sentence_pieces(True)
    del metadata["scores"]
    source = with_tokenizer(tmp_path, metadata)
    with pytest.raises(CheckpointError, match="scores"):
        source.side_files()


def test_reading_a_large_vocabulary_is_reported_while_it_goes_on(tmp_path: Path) -> None:
    metadata = sentence_pieces(True)
    more = [f"word {index}" for index in range(3 * BEAT)]
    metadata["tokens"] += more
    metadata["types"] += [NORMAL] * len(more)
    metadata["scores"] += [-1000.0] * len(more)
    with_tokenizer(tmp_path, metadata)
    seen: list[tuple[int, int]] = []
    open_source(tmp_path / "m.gguf", reading=lambda done, total: seen.append((done, total)))
    ((total, _),) = Counter(total for _, total in seen).most_common()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {done for done, _ in seen} == set(range(total))
    assert max(Counter(done for done, _ in seen).values()) > 3  # inside of the vocabulary


def test_a_long_piece_takes_no_time_and_an_empty_one_is_no_part() -> None:
    tokens = ["a" * 100_000, "", "a", "aa"]
    assert merges_from_scores(tokens, np.zeros(4)) == [("a", "a")]
