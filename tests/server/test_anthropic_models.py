"""The models as Anthropic's own client lists them; OpenAI's clients are answered as ever."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from live_server import LiveServer
from sdk_clients import anthropic_client

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.models import Entry, Models
from mlxinfer.server.served import ServedModel

NAMES = ["one", "two", "three"]
VERSION = {"anthropic-version": "2023-06-01"}


class ThreeModels(LiveServer):
    """None of them can be loaded, and none is asked to be."""

    def __init__(self) -> None:
        entries = [Entry(name=name, load=self.refuse) for name in NAMES]
        self.listen(Models(entries, limit_bytes=10**9))

    def refuse(self, room_bytes: int) -> ServedModel:
        raise AssertionError("no answer was asked for")


@pytest.fixture(scope="module")
def lazy() -> Iterator[LiveServer]:
    with ThreeModels() as server:
        yield server


@pytest.fixture
def client(lazy: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(lazy) as client:
        yield client


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [model.id for model in page.data] == NAMES
    assert (page.first_id, page.last_id, page.has_more) == ("one", "three", False)
    assert {model.lifecycle for model in page.data} == {"active"}
    assert {model.type for model in page.data} == {"model"}
    assert [model.display_name for model in page.data] == NAMES


def test_a_model_is_shown(live: LiveServer) -> None:
    with anthropic_client(live) as client:
        model = client.models.retrieve("demo")
    assert model.created_at.timestamp() == 1
    assert (model.max_input_tokens, model.max_tokens) == (live.model.max_context,) * 2


def test_beta_clients_are_answered_too(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.beta.models.list().data] == NAMES


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_add_up(client: anthropic.Anthropic, limit: int) -> None:
    assert [model.id for model in client.models.list(limit=limit)] == NAMES


def test_pages_before(client: anthropic.Anthropic) -> None:
    page = client.models.list(before_id="three", limit=1)
    assert ([model.id for model in page.data], page.has_more) == (["two"], True)
    assert [model.id for model in page.get_next_page().data] == ["one"]
    assert client.models.list(before_id="one").data == []


def test_none_is_retired(client: anthropic.Anthropic) -> None:
    assert client.models.list(lifecycle=["retired"]).data == []
    assert len(client.models.list(lifecycle=["active", "retired"]).data) == len(NAMES)


def test_an_unknown_model_is_an_error_of_theirs(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("no/such")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "after_id=x", "after_id=one&before_id=two"]
)
def test_pages_that_are_none(lazy: LiveServer, query: str) -> None:
    answer = lazy.get(f"/v1/models?{query}", headers=VERSION)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert lazy.get(f"/v1/models?{query}").status_code == 200  # OpenAI's has no pages


def test_openai_clients_are_answered_as_ever(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        assert [model.object for model in client.models.list()] == ["model"]
        assert client.models.retrieve("demo").owned_by == "mlxinfer"


def test_without_a_key_the_error_is_theirs_too() -> None:
    with LiveServer(keys=ApiKeys.from_plain(["sk-test-1"])) as server:
        answer = server.get("/v1/models", headers=VERSION)
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
        assert "type" not in server.get("/v1/models").json()
        with anthropic_client(server).with_options(api_key="sk-test-1") as client:
            assert client.models.retrieve("demo").id == "demo"
