"""Pictures in requests of every API: read, counted, refused, and fetched from public addresses."""

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from live_server import CHAT, LiveServer, SeveralServer
from PIL import Image
from raw_http import connect, post
from sdk_clients import anthropic_client, openai_client

from mlxinfer import LLM
from mlxinfer.errors import InvalidRequestError, PictureError
from mlxinfer.server import pictures
from mlxinfer.server.store import ResponseStore
from mlxinfer.server.workers import Workers
from mlxinfer.session.pictures import PictureReader
from tests.http_site import Reply, http_site
from tests.seeing_folder import seeing_folder
from tests.waiting import wait_until


def png(colour: str, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")
RED64 = base64.b64encode(RED).decode()
URL = f"data:image/png;base64,{RED64}"
WHAT = {"type": "text", "text": "What is it?"}
GREEDY = {"temperature": 0, "max_tokens": 6}


def seeing_server(folder: Path, **config: Any) -> SeveralServer:
    """A tiny model that sees, behind a real socket."""
    return SeveralServer({"tiny-see": folder}, **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_folder(tmp_path_factory.mktemp("see"))


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[LiveServer]:
    with seeing_server(folder) as server:
        yield server


def chat_with(url: Any, **more: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url, **more}}
    return {"messages": [{"role": "user", "content": [image, WHAT]}], **GREEDY}


def responses_with(url: str) -> dict[str, Any]:
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What is it?"},
    ]
    return {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6}


def messages_with(source: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "image", "source": source}, WHAT]
    return {"messages": [{"role": "user", "content": parts}], **GREEDY}


def ollama_with(data: str) -> dict[str, Any]:
    turn = {"role": "user", "content": "What is it?", "images": [data]}
    options = {"temperature": 0, "num_predict": 6}
    return {"model": "tiny-see", "messages": [turn], "stream": False, "options": options}


BASE64 = {"type": "base64", "media_type": "image/png", "data": RED64}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_with(URL)),
    ("/v1/responses", responses_with(URL)),
    ("/v1/messages", messages_with(BASE64)),
    ("/api/chat", ollama_with(RED64)),
]


def answer_of(path: str, reply: dict[str, Any]) -> tuple[str, int]:
    """Text of an answer, and tokens of its prompt."""
    if path == CHAT:
        return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]
    if path == "/v1/responses":
        return reply["output"][0]["content"][0]["text"], reply["usage"]["input_tokens"]
    if path == "/v1/messages":
        used = reply["usage"]
        cached = used.get("cache_read_input_tokens") or 0
        return reply["content"][0]["text"], used["input_tokens"] + cached
    return reply["message"]["content"], reply["prompt_eval_count"]


def test_every_api_shows_the_model_its_pictures(seeing: LiveServer) -> None:
    other = f"data:image/png;base64,{base64.b64encode(BLUE).decode()}"
    red, blue = (answer_of(CHAT, seeing.post(CHAT, chat_with(url)).json()) for url in (URL, other))
    assert red[0] != blue[0]
    for path, body in REQUESTS:
        assert answer_of(path, seeing.answer(path, body)) == red, path


def test_anthropics_streams_show_the_model_its_pictures(seeing: LiveServer) -> None:
    body = messages_with(BASE64)
    events = seeing.events("/v1/messages", body)
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    whole = seeing.post("/v1/messages", body).json()
    assert "".join(deltas) == whole["content"][0]["text"]
    used = whole["usage"]
    num_prompt = used["input_tokens"] + used["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == num_prompt


def test_a_client_that_leaves_ends_the_reading_of_its_pictures(
    seeing: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, read, go_on = PictureReader._shown, [], threading.Event()

    def slow(*args: Any) -> Any:
        read.append(args)
        assert go_on.wait(60)
        return shown(*args)

    monkeypatch.setattr(PictureReader, "_shown", slow)
    image = {"type": "image_url", "image_url": {"url": URL}}
    body = {"messages": [{"role": "user", "content": [image, image, image, WHAT]}]}
    with connect(seeing) as connection:
        connection.sendall(post(CHAT, json.dumps(body).encode()))
        wait_until(lambda: read)
    wait_until(lambda: not seeing.service.calls)
    go_on.set()
    seeing.service.picture_workers._pool.shutdown()  # waits for what runs
    seeing.service.picture_workers = Workers(1)
    assert len(read) == 1


def test_official_clients_send_pictures(seeing: LiveServer) -> None:
    with openai_client(seeing) as client:
        body: Any = chat_with(URL)
        answer = client.chat.completions.create(model="tiny-see", **body)
        response = client.responses.create(model="tiny-see", **responses_with(URL))
    with anthropic_client(seeing) as other:
        given: Any = {**messages_with(BASE64), "model": "tiny-see"}
        del given["temperature"]
        said = other.messages.create(**given, extra_body={"temperature": 0})
        counted = other.messages.count_tokens(model="tiny-see", messages=given["messages"])
    assert answer.choices[0].message.content == response.output_text == said.content[0].text
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.prompt_tokens


def test_token_counts_hold_pictures(seeing: LiveServer) -> None:
    _, used = answer_of(CHAT, seeing.post(CHAT, chat_with(URL)).json())
    messages = {"messages": chat_with(URL)["messages"]}
    assert seeing.post("/tokenize", messages).json()["count"] == used
    counted = seeing.post("/v1/responses/input_tokens", responses_with(URL)).json()
    assert counted["input_tokens"] == used


def test_tools_and_earlier_turns_may_show_pictures(seeing: LiveServer) -> None:
    turn = {"role": "user", "content": [{"type": "image", "source": BASE64}, WHAT]}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "image", "source": BASE64}],
    }
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = {
        "messages": [
            turn,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
        **GREEDY,
    }
    _, used = answer_of("/v1/messages", seeing.answer("/v1/messages", body))
    assert used > 40


def test_capabilities_say_who_sees(seeing: LiveServer, server: LiveServer) -> None:
    for who, sees in ((seeing, True), (server, False)):
        (card,) = who.get("/v1/models").json()["data"]
        assert card["capabilities"]["vision"] is sees
        shown = who.post("/api/show", {"model": who.model.name}).json()["capabilities"]
        assert ("vision" in shown) is sees


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat_with("https://example.com/a.png"), "started with --fetch-images"),
    (CHAT, chat_with("file:///etc/passwd"), "expected a URL that begins with data:"),
    (CHAT, chat_with("/etc/passwd"), "expected a URL that begins with data:"),
    (CHAT, chat_with("data:image/png;base64,###"), "is no base64"),
    (CHAT, chat_with("data:image/png;base64,AAAA"), "no picture of a known format"),
    (CHAT, chat_with(URL[:-40]), "broken or cut off"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]},
        "type 'image'",
    ),
    ("/v1/responses", responses_with("file:///etc/passwd"), "expected a URL"),
    ("/v1/messages", messages_with({"type": "file", "file_id": "f"}), "no picture in base64"),
    ("/v1/messages", messages_with({"type": "url", "url": "http://a/b"}), "--fetch-images"),
    ("/v1/messages", messages_with({**BASE64, "data": "/etc/passwd"}), "no picture|base64"),
    (
        "/v1/messages",
        {**messages_with(BASE64), "system": [{"type": "image", "source": BASE64}]},
        "system[0] is of type 'image'; expected a text, or where",
    ),
    ("/api/chat", ollama_with("/etc/passwd"), "no picture|base64"),
    ("/api/chat", ollama_with("http://127.0.0.1/"), "base64"),
]


def test_what_is_no_picture_is_a_400(seeing: LiveServer) -> None:
    for path, body, said in WRONG:
        reply = seeing.post(path, body)
        assert reply.status_code == 400
        assert any(item in reply.text for item in said.split("|")), (said, reply.text)


# -- videos -------------------------------------------------------------------------------------


def clip(*colours: str) -> bytes:
    """A GIF of frames of one colour each, two a second."""
    pytest.importorskip("av")
    file, frames = io.BytesIO(), [Image.new("RGB", (40, 30), colour) for colour in colours]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    return file.getvalue()


def video_with(url: Any) -> dict[str, Any]:
    video = {"type": "video_url", "video_url": url}
    return {"messages": [{"role": "user", "content": [video, WHAT]}], **GREEDY}


def video_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def test_a_video_in_a_request_is_seen(tmp_path: Path) -> None:
    folder = seeing_folder(tmp_path, videos=True)
    given: Any = {"temperature": 0.0, "max_tokens": 6}
    with seeing_server(folder) as server, LLM(server.url) as there, LLM(folder) as here:
        said = []
        for data in (clip("red", "blue"), clip("red", "white")):
            near = here.chat("What is it?", videos=[data], **given)
            far = there.chat("What is it?", videos=[data], **given)
            whole: list[Any] = [{"url": video_url(data)}, video_url(data)]
            for url in whole:
                reply = server.post(CHAT, video_with(url))
                said.append(answer_of(CHAT, reply.json()))
                assert said[-1] == (near.text, near.prompt_tokens)
            assert (far.token_ids, far.prompt_tokens) == (near.token_ids, near.prompt_tokens)
        assert said[0] != said[2]
        counted = server.post("/tokenize", {"messages": video_with(video_url(data))["messages"]})
        assert counted.json()["count"] == near.prompt_tokens
        with pytest.raises(InvalidRequestError, match="frames does not go over HTTP"):
            there.chat("What is it?", videos=[[Image.new("RGB", (40, 30))]], **given)
        for url, expected in (
            (video_url(b"junk"), "no known format"),
            (video_url(b"ffconcat version 1.0\nfile clip.mp4\n"), "no known format"),
            ("https://example.com/a.mp4", "send data:video/mp4;base64, and the video"),
            ("file:///etc/passwd", "send data:video/mp4;base64, and the video"),
            (None, "send data:video/mp4;base64, and the video"),
        ):
            refused = server.post(CHAT, video_with(url))
            assert (refused.status_code, expected in refused.text) == (400, True), refused.text


def test_models_that_see_no_videos_refuse_them(seeing: LiveServer, server: LiveServer) -> None:
    for one, expected in (
        (seeing, "The model 'tiny-see' sees pictures and no videos"),
        (server, "The model 'demo' reads text only"),
    ):
        refused = one.post(CHAT, video_with(video_url(clip("red", "blue"))))
        assert (refused.status_code, expected in refused.text) == (400, True), refused.text


# -- pictures behind URLs -----------------------------------------------------------------------


PRIVATE = [
    "127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "::127.0.0.1", "::ffff:0:10.0.0.1", "64:ff9b:1::7f00:1", "fec0::1",
]  # fmt: skip
PUBLIC = ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"]


def test_only_public_addresses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a name stands for have to be public."""

    def taken(*addresses: str) -> str:
        result = [(0, 0, 0, "", (address, 80)) for address in addresses]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: result)
        return pictures.public_address("name.example", 80, time.monotonic() + 9, "here")

    for address in PUBLIC:
        assert taken(address) == address
    for address in PRIVATE:
        with pytest.raises(PictureError, match="not public"):
            taken(PUBLIC[0], address)


def drip(data: bytes) -> Iterator[bytes]:
    for byte in data:
        yield bytes([byte])
        time.sleep(0.05)


def reply_of(path: str) -> Reply:
    """A web site with a picture, and with what is none."""
    if path.startswith("/to?"):
        return 302, {"location": path.removeprefix("/to?")}, ()
    kind = "text/html" if path == "/page" else "image/png"
    data = bytes(5000) if path == "/large" else RED
    headers = {"content-type": kind, "content-length": str(len(data))}
    return 404 if path == "/missing" else 200, headers, drip(data) if path == "/slow" else [data]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the site, which counts as public here."""
    whole = pictures.public_address

    def address(host: str, port: int, deadline: float, place: str) -> str:
        return host if url.endswith(f":{port}") else whole(host, port, deadline, place)

    monkeypatch.setattr(pictures, "public_address", address)
    with http_site(reply_of) as url:
        yield url


def test_a_picture_is_fetched_also_behind_a_redirect(site: str) -> None:
    assert pictures.fetch_picture(f"{site}/red.png", "here") == RED
    assert pictures.fetch_picture(f"{site}/to?/red.png", "here") == RED
    assert pictures.fetch_picture(f"{site}/to?{site}/red.png", "here") == RED


def test_wrong_urls_are_not_fetched(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_fetched = {
        "/page": "of type 'text/html'",
        "/missing": "status 404",
        "/large": "more than 1,000 bytes",
        "/to?/to?/to?/to?/red.png": "redirects more than 3 times",
        "/to?http://127.0.0.1:1/red.png": "not public",
        "/to?http://localhost:1/red.png": "not public",
        "/to?http://[::1]:1/red.png": "not public",
        "/to?file:///etc/passwd": "is no http URL",
        "/to?ftp://example.com/": "is no http URL",
        "/to?http://a:b@example.com/": "is no http URL",
        "/to?http://x:99999999/": "cannot be fetched",
    }
    monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
    for path, said in not_fetched.items():
        with pytest.raises(PictureError, match=said):
            pictures.fetch_picture(site + path, "here")


def test_a_server_that_drips_bytes_is_left(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "TIMEOUT_S", 0.4)
    begun = time.monotonic()
    with pytest.raises(PictureError, match=r"more than 0\.4 seconds"):
        pictures.fetch_picture(f"{site}/slow", "here")
    assert time.monotonic() - begun < 20


def test_a_name_that_is_not_found_in_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(pictures, "TIMEOUT_S", 0.2)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    begun = time.monotonic()
    with pytest.raises(PictureError, match="cannot be fetched"):
        pictures.fetch_picture("http://name.example/a.png", "here")
    assert time.monotonic() - begun < 20
    answered.set()


def test_a_request_has_the_port_and_the_host_of_its_url() -> None:
    for url, port, host in (
        ("http://[2606:2800::1]/a", 80, "[2606:2800::1]"),
        ("https://name.example/a", 443, "name.example"),
        ("https://name.example:8443/a", 8443, "name.example:8443"),
        ("https://name.example:80/a", 80, "name.example:80"),
    ):
        sent = bytearray()
        connection = pictures._PinnedConnection(urlsplit(url), "192.0.2.1", time.monotonic() + 9)
        connection.connect = lambda: None  # type: ignore[method-assign]
        connection.send = sent.extend  # type: ignore[method-assign, assignment]
        connection.request("GET", "/a")
        assert connection.port == port
        assert f"Host: {host}\r\n".encode() in sent


def test_pictures_of_a_request_have_limits(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "REQUEST_BYTES", 3 * len(RED))
    fetches = pictures.PictureFetches()
    for _ in range(9):
        assert fetches.fetch(f"{site}/same", "here") == RED
    for number in range(2):
        fetches.fetch(f"{site}/{number}", "here")
    with pytest.raises(PictureError, match=r"all may have \d+ bytes"):
        fetches.fetch(f"{site}/2", "here")
    monkeypatch.setattr(pictures, "REQUEST_S", -1.0)
    with pytest.raises(PictureError, match="too late"):
        pictures.PictureFetches().fetch(f"{site}/same", "here")


def test_slow_hosts_delay_no_text(site: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "TIMEOUT_S", 1.5)
    with seeing_server(folder, fetch_images=True, image_fetchers=1, text_workers=1) as server:
        body = chat_with(f"{site}/slow")
        threads = [threading.Thread(target=server.post, args=(CHAT, body)) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.fetchers.num_pending == 2)
        text = {"messages": [{"role": "user", "content": "Hi"}], **GREEDY}
        assert server.post(CHAT, text).status_code == 200
        assert server.service.fetchers.num_pending, "the slow pictures are still fetched"
        for thread in threads:
            thread.join()


def test_a_server_that_may_fetch_shows_pictures_behind_urls(site: str, folder: Path) -> None:
    with seeing_server(folder, fetch_images=True) as server:
        (text, used), same = (
            answer_of(CHAT, server.post(CHAT, chat_with(url)).json())
            for url in (f"{site}/red.png", URL)
        )
        assert (text, used) == same
        refused = server.post(CHAT, chat_with("http://127.0.0.1:1/red.png"))
        assert refused.status_code == 400
        assert "not public" in json.dumps(refused.json())
        counted = server.post("/tokenize", {"messages": chat_with(f"{site}/a")["messages"]})
        assert counted.json()["count"] == used


def test_a_stored_response_keeps_its_picture(folder: Path) -> None:
    with seeing_server(folder, store=ResponseStore(None)) as server:
        first = server.post("/v1/responses", responses_with(URL)).json()
        items = server.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        assert items[0]["content"][0]["image_url"] == URL
        more = {"input": "And now?", "temperature": 0, "max_output_tokens": 4}
        alone = server.post("/v1/responses", more).json()
        after = server.post("/v1/responses", {**more, "previous_response_id": first["id"]}).json()
        assert after["usage"]["input_tokens"] > alone["usage"]["input_tokens"] + 20


def test_llm_of_a_server_sends_pictures(seeing: LiveServer, folder: Path) -> None:
    given: Any = {"temperature": 0.0, "max_tokens": 6}
    with LLM(seeing.url) as there, LLM(folder) as here:
        for images in ([RED], [Image.open(io.BytesIO(BLUE))], [RED, BLUE]):
            far = there.chat("What is it?", images=images, **given)
            near = here.chat("What is it?", images=images, **given)
            assert (far.token_ids, far.prompt_tokens) == (near.token_ids, near.prompt_tokens)
        with pytest.raises(PictureError):
            there.chat("What is it?", images=[b"junk"], **given)
