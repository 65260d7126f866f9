"""Text to ids and back, and what broken files and texts do."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_data import DATA, KINDS, load_tokenizer
from tokenizers import Regex, models, normalizers, pre_tokenizers

from mlxinfer.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from mlxinfer.text import Tokenizer
from mlxinfer.text.tokenizer import load_backend

TEXT = "A café, 日本 🙂 <|im_end|> end"


def make_folder(path, kind="bytelevel", **files):
    """A checkpoint folder with a test tokenizer and these JSON files; None leaves one out."""
    path.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / kind / name, path / name)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def with_spec(path, change):
    """A folder with a tokenizer.json changed by `change(spec)`."""
    folder = make_folder(path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_text_comes_back(kind, text):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_the_bytes_of_tokens_are_the_text(kind, text):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode().removeprefix(" " if kind == "sentencepiece" else "") == text
    assert tokenizer.token_bytes(tokenizer.piece_to_id("<|im_end|>")) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_tokens_that_hold_a_text_are_found_without_reading_the_vocabulary_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("\n", ":", "an"):
        wanted = text.encode()
        ids = tokenizer.ids_with(text)
        assert ids
        assert all((wanted in tokenizer.token_bytes(i)) == (i in ids) for i in range(2000))
    monkeypatch.setattr(tokenizer, "id_to_piece", None)
    assert tokenizer.ids_with("the")


def test_special_text_is_text_unless_asked_for(tokenizer):
    end = tokenizer.piece_to_id("<|im_end|>")
    assert end not in tokenizer.encode(TEXT)
    assert end in tokenizer.encode(TEXT, parse_special=True)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "</s>", " ", "a", "é"])))
def test_what_is_read_of_special_text_does_not_depend_on_what_was_asked_before(kind, pieces):
    text = "".join(pieces)
    tokenizer = load_tokenizer(kind)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for parse_special in (False, True, False):
        backend.encode_special_tokens = not parse_special
        expected = backend.encode(text, add_special_tokens=False).ids
        actual = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        assert actual == expected


def test_encoding_a_long_text_releases_the_gil():
    """A short text is encoded many times while one long text is; neither changes the other."""
    tokenizer = load_tokenizer("bytelevel")
    long, short = "A café, 日本 🙂 " * 10_000, "Hello <|im_end|>"
    alone = [tokenizer.encode(short, parse_special=p) for p in (False, True)]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(tokenizer.encode, long)
        done = 0
        while not job.done():
            assert [tokenizer.encode(short, parse_special=p) for p in (False, True)] == alone
            done += 1
            time.sleep(0.001)
        assert job.result() == tokenizer._backend.encode(long).ids
    assert done > 5


def test_a_text_with_its_bos_gets_no_second_one():
    tokenizer = load_tokenizer("sentencepiece")
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("hi")[0] == bos
    ids = tokenizer.encode("<s>hi", parse_special=True)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert bos not in tokenizer.encode("hi", add_special_tokens=False)


def test_a_bos_that_the_text_has_twice_stays_twice():
    """The tokenizer adds none here, so neither of them is its own."""
    tokenizer = load_tokenizer("bytelevel")
    token = next(iter(tokenizer.special_ids))
    other = Tokenizer(tokenizer._backend)
    other.bos_token_id = token
    text = 2 * tokenizer.id_to_piece(token)
    assert other.encode(f"{text}hi", parse_special=True)[:3].count(token) == 2


def test_ends_come_from_the_generation_config_first(tmp_path):
    folder = make_folder(
        tmp_path,
        config={"eos_token_id": 1, "bos_token_id": 0},
        generation_config={"eos_token_id": [2, 3, 10**9]},
        tokenizer_config={"eos_token": "<|endoftext|>"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {2, 3, tokenizer.piece_to_id("<|endoftext|>")}
    assert tokenizer.bos_token_id == 0


def test_ends_come_from_the_text_part_of_a_multimodal_config(tmp_path):
    folder = make_folder(tmp_path, config={"text_config": {"eos_token_id": 7}}, tokenizer_config={})
    assert Tokenizer.from_folder(folder).eos_token_ids == {7}


def test_undeclared_turn_ends_are_eos_tokens(tmp_path):
    config = {"chat_template": "{{ messages[0].content }}<|im_end|>"}
    folder = make_folder(tmp_path, tokenizer_config=config, config={"eos_token_id": 5})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {5, tokenizer.piece_to_id("<|im_end|>")}


def test_tokens_that_only_the_config_declares_are_added(tmp_path):
    entry = {"content": "<extra>", "special": True}
    config = {"added_tokens_decoder": {"9000": entry}, "pad_token": "<pad>", "mask_token": None}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, tokenizer_config=config))
    for piece in ("<extra>", "<pad>"):
        assert tokenizer.encode(piece, parse_special=True) == [tokenizer.piece_to_id(piece)]
        assert tokenizer.piece_to_id(piece) in tokenizer.special_ids
    assert tokenizer.named_tokens == {"pad_token": "<pad>"}


def test_templates_in_order_of_precedence(tmp_path):
    def sources():
        return Tokenizer.from_folder(folder).template.sources

    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert sources() == {"default": "list", "tool_use": "tools"}
    (folder / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert sources() == {"default": "legacy"}
    (folder / "chat_template.jinja").write_text("file")
    assert sources() == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert sources() == {"default": "file", "tool_use": "more"}


def test_truncation_and_padding_in_tokenizer_json_are_ignored(tmp_path):
    def change(spec):
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
        spec.update(json.loads(backend.to_str()))

    tokenizer = Tokenizer.from_folder(with_spec(tmp_path, change))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_broken_tokenizer_file_is_a_checkpoint_error(tmp_path):
    folder = make_folder(tmp_path)
    for content in ("", "{", "[]", "{}", '{"model": 1}', "\x00\xff", "null"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(folder)


@given(cut=st.integers(0, 16000))
def test_a_truncated_tokenizer_file_is_a_checkpoint_error(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    whole = (DATA / "bytelevel" / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer_config", "config", "generation_config"])
def test_a_broken_file_beside_it_is_a_checkpoint_error(tmp_path, name):
    folder = make_folder(tmp_path)
    for content in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        (folder / f"{name}.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            Tokenizer.from_folder(folder)


def test_a_file_beside_it_with_values_of_wrong_types_is_read_as_far_as_it_goes(tmp_path):
    config = {"eos_token": 5, "bos_token": ["x"], "chat_template": 1, "pad_token": {"content": 2}}
    folder = make_folder(
        tmp_path, tokenizer_config=config, generation_config={"eos_token_id": ["a", -1, True]}
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.template is None


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_file_that_makes_texts_explode_is_refused(tmp_path, part):
    step = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 100}
    steps = {"type": "Sequence", f"{part}s": [step] * 4}
    with pytest.raises(CheckpointError, match="times longer"):
        Tokenizer.from_folder(with_spec(tmp_path, lambda spec: spec.update({part: steps})))


def test_a_panic_of_the_library_is_an_invalid_request(capfd):
    backend = tokenizers.Tokenizer(models.BPE())
    pattern = tokenizers.Regex("(?=(a+)+$)b|(a|aa)+$")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer = Tokenizer(backend)
    hard = "a" * 40 + "c"
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(InvalidRequestError, match="cannot encode"):
            encode(hard)
    assert tokenizer.encode("c") == []  # it goes on working


def test_what_is_no_text_is_refused(tokenizer):
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        for bad in ("\ud800", "a\udfffb", b"bytes", None, "x" * 16_000_001):
            with pytest.raises(InvalidRequestError):
                encode(bad)
    assert tokenizer.decode(tokenizer.encode("a\x00b")) == "a\x00b"


def test_ids_that_are_no_token_ids_are_refused(tokenizer):
    for bad in ([-1], [2**32], ["1"], [None]):
        with pytest.raises(InvalidRequestError, match="token ids"):
            tokenizer.decode(bad)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.id_to_piece(tokenizer.vocab_size) is None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model; expected"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no tokenizer; add"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")  # which says things of one, and is none
    with pytest.raises(CheckpointError, match="has no tokenizer; add"):
        Tokenizer.from_folder(tmp_path)


def test_without_tokenizer_json_and_transformers(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").touch()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match="pip install transformers"):
        Tokenizer.from_folder(tmp_path)


def test_other_tokenizer_files_are_read_through_transformers(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").touch()
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.normalizer = normalizers.Lowercase()

    wrapper = SimpleNamespace(backend_tokenizer=backend)

    def from_pretrained(folder, trust_remote_code):
        assert trust_remote_code is False
        return wrapper

    auto = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    assert Tokenizer.from_folder(tmp_path).encode("B") == [1]
    wrapper.backend_tokenizer = None
    with pytest.raises(UnsupportedModelError, match="no form"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "token", "is_mended"),
    [
        ({"model_type": "mistral3", "transformers_version": "4.57.1"}, "[INST]", True),
        ({"model_type": "mistral"}, "[INST]", True),
        ({"model_type": "mistral", "transformers_version": "5.0.0"}, "[INST]", False),
        ({"model_type": "mistral"}, "<|eot_id|>", False),
        ({"model_type": "llama"}, "[INST]", False),
    ],
)
def test_the_pattern_of_mistral_is_mended(tmp_path, config, token, is_mended):
    wrong = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = load_backend(DATA / "bytelevel")
    backend.add_special_tokens([token])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(wrong), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    split = load_backend(tmp_path).pre_tokenizer.pre_tokenize_str("McDonald 2026")
    texts = [text.replace("Ġ", " ") for text, _ in split]
    mended = ["Mc", "Donald", " ", "2", "0", "2", "6"]
    assert texts == (mended if is_mended else ["McDonald", " ", "202", "6"])
