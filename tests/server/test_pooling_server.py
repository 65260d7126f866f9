"""Embeddings, reranking and scores over HTTP, by the clients that people use."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from live_server import SeveralServer, chat
from pooling.tiny_pooling import pooling_folder

from mlxinfer import LLM, hub
from mlxinfer.errors import ContextLengthError, InvalidRequestError
from mlxinfer.outputs import ranked
from mlxinfer.session.inputs import EmbedInput, ScoreInput
from mlxinfer.session.pooling_session import PoolingSession
from mlxinfer.text import Tokenizer
from tests.watching import note_calls

TEXTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13", "w8"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralServer]:
    """The demo model, an embedding model and two rerankers."""
    kinds = {"embedder": "bert", "reranker": "bert-scores", "judge": "xlm-roberta-scores"}
    place = tmp_path_factory.mktemp("models")
    folders = {name: pooling_folder(place / name, kind) for name, kind in kinds.items()}
    with SeveralServer({"demo": hub.resolve("demo-draft"), **folders}) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: SeveralServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def vectors_of(session: PoolingSession, texts: Any) -> Any:
    return session.embed(EmbedInput(texts=texts))


def scores_of(session: PoolingSession, first: Any, second: Any) -> Any:
    return session.score(ScoreInput(first=first, second=second))


def own(served: SeveralServer, name: str = "embedder") -> PoolingSession:
    """The session behind a name."""
    session: Any = served.by_name[name].session
    assert isinstance(session, PoolingSession)
    return session


def refused(served: SeveralServer, path: str, body: dict[str, Any]) -> str:
    """The message of a 400."""
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_openais_client_gets_the_vectors(served: SeveralServer, client: openai.OpenAI) -> None:
    """It asks for base64, and decodes it."""
    expected = vectors_of(own(served), TEXTS)
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3 + 1 + 5 + 1 + 4 * 2
    plain = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, expected[0], atol=1e-5)
    ids = client.embeddings.create(model="embedder", input=[[1, 5, 6, 7, 2], [1, 8, 2]])
    np.testing.assert_allclose([item.embedding for item in ids.data], expected[:2], atol=1e-5)
    one = client.embeddings.create(model="embedder", input=[1, 8, 2])
    np.testing.assert_allclose(one.data[0].embedding, expected[1], atol=1e-5)


def test_dimensions_cut_and_normalise(served: SeveralServer, client: openai.OpenAI) -> None:
    whole = vectors_of(own(served), TEXTS[:1])[0]
    cut = client.embeddings.create(model="embedder", input=TEXTS[:1], dimensions=8)
    expected = whole[:8] / np.linalg.norm(whole[:8])
    np.testing.assert_allclose(cut.data[0].embedding, expected, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="from 1 to 48"):
        client.embeddings.create(model="embedder", input="w5", dimensions=49)


def test_texts_that_are_too_long_are_refused_or_truncated(served: SeveralServer) -> None:
    long = " ".join(["w7"] * 60)
    body: dict[str, Any] = {"model": "embedder", "input": ["w5", long]}
    assert "input 1 has 62 tokens" in refused(served, "/v1/embeddings", body)
    for field, tokens in (("truncate_prompt_tokens", -1), ("truncate", True)):
        answer = served.post("/v1/embeddings", {**body, field: tokens}).json()
        assert answer["usage"]["prompt_tokens"] == 3 + 40
    answer = served.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 7}).json()
    assert answer["usage"]["prompt_tokens"] == 3 + 7
    expected = vectors_of(own(served), " ".join(["w7"] * 5))[0]
    np.testing.assert_allclose(answer["data"][1]["embedding"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "1 to 2048"),
        ({"input": [""]}, ""),
        ({"input": ["w5", 5]}, "mixes"),
        ({"input": [5, 96]}, "token ids are integers from 0 to 95"),
        ({"input": "w5", "dimensions": 0}, "dimensions"),
        ({"input": "w5", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "w5", "prompt_name": "query"}, "no prompt 'query'"),
        ({"input": "w5", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "w5", "embed_dtype": "int8"}, "embed_dtype"),
        ({"input": "w5", "input_type": "poem"}, "input_type"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    served: SeveralServer, body: dict[str, object], message: str
) -> None:
    if body["input"] == [""]:  # the special tokens alone are a text
        assert served.post("/v1/embeddings", {"model": "embedder", **body}).status_code == 200
        return
    assert message in refused(served, "/v1/embeddings", {"model": "embedder", **body})


def test_rerank_orders_documents_by_the_scores_of_pairs(served: SeveralServer) -> None:
    session = own(served, "reranker")
    expected = scores_of(session, "w5 w6", TEXTS)
    assert len(set(expected.tolist())) == 3  # two texts are the same
    body = {"model": "reranker", "query": "w5 w6", "documents": [*TEXTS[:3], {"text": "w8"}]}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking"):
        answer = served.post(path, body).json()
        actual = {result["index"]: result for result in answer["results"]}
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        np.testing.assert_allclose(
            [actual[i]["relevance_score"] for i in range(4)], expected, atol=1e-5
        )
        assert [actual[i]["document"]["text"] for i in range(4)] == TEXTS
        assert answer["usage"]["total_tokens"] == sum(3 + 2 + n for n in (3, 1, 5, 1))
        assert answer["meta"]["billed_units"] == {"search_units": 1}
    short = served.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False}).json()[
        "results"
    ]
    assert [result["relevance_score"] for result in short] == scores[:2]
    assert "document" not in short[0]
    assert "1 to 4096" in refused(served, "/v1/rerank", {**body, "documents": []})
    assert "instruction" in refused(served, "/v1/rerank", {**body, "instruction": "w5"})


def test_scores_of_one_text_with_many_and_of_as_many(served: SeveralServer) -> None:
    session = own(served, "judge")
    expected = scores_of(session, ["w5 w6"] * 4, TEXTS)
    named = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
    for one, two in named:
        for texts in ("w5 w6", ["w5 w6"] * 4):
            body = {"model": "judge", one: texts, two: TEXTS}
            data = served.post("/v1/score", body).json()["data"]
            assert [item["index"] for item in data] == [0, 1, 2, 3]
            np.testing.assert_allclose([item["score"] for item in data], expected, atol=1e-5)
    assert "2 texts" in refused(
        served, "/score", {"model": "judge", "text_1": ["w5", "w6"], "text_2": TEXTS}
    )
    assert "text_2 is missing" in refused(served, "/score", {"model": "judge", "text_1": "w5"})


def test_an_embedding_model_scores_by_similarity(served: SeveralServer) -> None:
    vectors = vectors_of(own(served), ["w5 w6", *TEXTS])
    body = {"model": "embedder", "text_1": "w5 w6", "text_2": TEXTS}
    data = served.post("/v1/score", body).json()["data"]
    np.testing.assert_allclose(
        [item["score"] for item in data], vectors[1:] @ vectors[0], atol=1e-5
    )


def test_ollamas_client_gets_the_vectors(served: SeveralServer) -> None:
    client = ollama.Client(served.url)
    with closing(client._client):
        check_ollama(served, client)


def check_ollama(served: SeveralServer, client: ollama.Client) -> None:
    expected = vectors_of(own(served), TEXTS)
    answer = client.embed("embedder", TEXTS)
    np.testing.assert_allclose(answer.embeddings, expected, atol=1e-5)
    assert answer.prompt_eval_count == 18
    assert client.embed("embedder:latest", "w8", dimensions=8).embeddings[0]
    assert len(client.embed("embedder", " ".join(["w7"] * 60)).embeddings[0]) == 48
    with pytest.raises(ollama.ResponseError, match="62 tokens"):
        client.embed("embedder", " ".join(["w7"] * 60), truncate=False)
    old = client.embeddings("embedder", TEXTS[0])
    np.testing.assert_allclose(old.embedding, expected[0], atol=1e-5)
    shown = client.show("embedder")
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["bert.embedding_length"] == 48


def test_each_model_says_what_it_is_for_and_refuses_the_rest(served: SeveralServer) -> None:
    cards = {item["id"]: item for item in served.get("/v1/models").json()["data"]}
    able = {
        name: {key for key, value in card["capabilities"].items() if value}
        for name, card in cards.items()
    }
    assert able["embedder"] == {"embeddings", "rerank"}
    assert able["reranker"] == {"rerank"}
    assert not able["demo"] & {"embeddings", "rerank"}
    assert cards["embedder"]["max_model_len"] == 40
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat(model="embedder")),
        ("/v1/completions", {"model": "embedder", "prompt": "w5"}),
        ("/v1/messages", {**chat(model="embedder")}),
        ("/v1/responses", {"model": "embedder", "input": "w5"}),
    ]
    for path, body in requests:
        message = refused(served, path, body)
        assert "embedder is an embedding model" in message, (path, message)
    assert "reranker" in refused(served, "/v1/embeddings", {"model": "reranker", "input": "w5"})
    message = refused(served, "/v1/embeddings", {"model": "demo", "input": "w5"})
    assert "demo generates text" in message


def test_the_rest_of_the_server_knows_such_models(served: SeveralServer) -> None:
    assert served.get("/ready").status_code == 200
    text = served.get("/metrics").text
    assert 'vllm:prompt_tokens_total{model_name="embedder"}' in text
    body: dict[str, Any] = {"model": "embedder", "prompt": "w5 w6"}
    assert served.post("/tokenize", body).json()["tokens"] == [1, 5, 6, 2]
    body = {"model": "embedder", "tokens": [5, 6]}
    assert served.post("/detokenize", body).json()["prompt"] == "w5 w6"


def test_llm_asks_a_server_for_vectors_and_scores(served: SeveralServer) -> None:
    texts = ["w5 w6", "w7"]
    with LLM(served.url, served_model="embedder") as llm:
        np.testing.assert_allclose(llm.embed(texts), vectors_of(own(served), texts), atol=1e-5)
        assert llm.embed("w5", dimensions=8).shape == (1, 8)
        assert llm.embed(" ".join(["w7"] * 60), truncate=9).shape == (1, 48)
        with pytest.raises(ContextLengthError, match="62 tokens"):
            llm.embed(" ".join(["w7"] * 60))
        with pytest.raises(InvalidRequestError, match="is an embedding model"):
            llm.generate("w5")
    with LLM(served.url, served_model="reranker") as llm:
        session = own(served, "reranker")
        expected = ranked(texts, scores_of(session, "w5", texts))
        actual = llm.rerank("w5", texts)
        assert [item.index for item in actual] == [item.index for item in expected]
        np.testing.assert_allclose(
            llm.score("w5", texts), scores_of(session, "w5", texts), atol=1e-5
        )


def test_many_clients_are_batched_beside_a_chat(served: SeveralServer) -> None:
    """Requests of many clients share passes; a chat goes on meanwhile."""
    session = own(served)
    before = session.stats()
    expected = {text: vectors_of(session, text)[0] for text in TEXTS}

    def ask(number: int) -> bool:
        text = TEXTS[number % len(TEXTS)]
        body = {"model": "embedder", "input": [text] * 3}
        data = served.post("/v1/embeddings", body).json()["data"]
        return all(np.allclose(item["embedding"], expected[text], atol=1e-5) for item in data)

    with ThreadPoolExecutor(16) as pool:
        talk = pool.submit(served.post, "/v1/chat/completions", chat(model="demo", max_tokens=30))
        assert all(pool.map(ask, range(80)))
        assert talk.result().status_code == 200
    after = session.stats()
    assert after["rows_computed"] - before["rows_computed"] == 4 + 240
    assert after["waiting"] == after["running"] == 0


def test_documents_are_cut_aside(served: SeveralServer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = own(served, "reranker")
    loops = note_calls(
        monkeypatch, Tokenizer, "encode", lambda *_, **__: asyncio._get_running_loop()
    )
    body = {"model": "reranker", "query": "w5 w6", "documents": TEXTS, "max_tokens_per_doc": 2}
    results = served.post("/v1/rerank", body).json()["results"]
    assert loops == [None] * 4
    expected = scores_of(session, "w5 w6", ["w5 w6", "w8", "w9 w10", "w8"])
    actual = {result["index"]: result["relevance_score"] for result in results}
    np.testing.assert_allclose([actual[i] for i in range(4)], expected, atol=1e-5)
