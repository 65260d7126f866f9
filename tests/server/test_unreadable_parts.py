"""A note stands for what an earlier turn holds unreadably; in the newest turn it is an error.

Every API, and everything that a message may hold beside text.
"""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import CHAT, LiveServer
from test_server_pictures import RED, URL, png, seeing_server, video_url

from mlxinfer.server import pdf as reading
from tests.pdf_files import encrypted, pdf
from tests.seeing_folder import seeing_folder

pytest.importorskip("pypdf")
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
HUGE = RED[:16] + (60_000).to_bytes(4, "big") * 2 + RED[24:]  # only its header says so
PICTURES: dict[str, bytes] = {
    "picture cut off": png("red", (300, 300))[:-40],
    "picture of no format": b"junk junk junk",
    "picture with too many pixels": HUGE,
}
PDFS: dict[str, bytes] = {
    "pdf damaged": b"%PDF-1.4",
    "pdf encrypted": encrypted(pdf("x"), "?"),
    "pdf without text": pdf(""),
    "pdf with too many pages": pdf(*["x"] * (reading.MAX_PAGES + 1)),
    "pdf with too many bytes": pdf("x" * 4000),
}


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat_parts() -> Iterator[tuple[str, dict[str, Any]]]:
    pictures = {kind: f"data:image/png;base64,{coded(data)}" for kind, data in PICTURES.items()}
    pictures |= {"no base64": "data:image/png;base64,###", "url": "https://a.example/b.png"}
    pictures["path"] = "/etc/passwd"
    for kind, url in pictures.items():
        yield kind, {"type": "image_url", "image_url": {"url": url}}
    for kind, data in PDFS.items():
        url = f"data:application/pdf;base64,{coded(data)}"
        yield kind, {"type": "file", "file": {"file_data": url}}
    yield "file id", {"type": "file", "file": {"file_id": "f"}}
    yield "other file", {"type": "file", "file": {"file_data": "data:application/zip;base64,AA=="}}
    yield "audio", {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    yield "video", {"type": "video_url", "video_url": {"url": video_url(b"junk")}}
    yield "unknown", {"type": "mystery"}


def responses_parts() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, part in chat_parts():
        if part["type"] == "image_url":
            yield (
                kind,
                {"type": "input_image", **part["image_url"], "image_url": part["image_url"]["url"]},
            )
        elif part["type"] == "file":
            yield kind, {"type": "input_file", **part["file"]}
        elif part["type"] != "video_url":
            yield kind, part
    yield "picture id", {"type": "input_image", "file_id": "f"}


def messages_parts() -> Iterator[tuple[str, dict[str, Any]]]:
    for media, kind_of_part, files in (
        ("image/png", "image", PICTURES),
        ("application/pdf", "document", PDFS),
    ):
        for kind, data in files.items():
            source = {"type": "base64", "media_type": media, "data": coded(data)}
            yield kind, {"type": kind_of_part, "source": source}
        for source in (
            {"type": "file", "file_id": "f"},
            {"type": "url", "url": "https://a.example/b"},
        ):
            yield f"{kind_of_part} {source['type']}", {"type": kind_of_part, "source": source}
    yield "unknown", {"type": "mystery"}


def ollama_parts() -> Iterator[tuple[str, str]]:
    yield from ((kind, coded(data)) for kind, data in PICTURES.items())
    yield "no base64", "###"


CASES = [
    *((CHAT, *case) for case in chat_parts()),
    *((RESPONSES, *case) for case in responses_parts()),
    *((MESSAGES, *case) for case in messages_parts()),
    *((OLLAMA, *case) for case in ollama_parts()),
]


def bodies(path: str, part: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A conversation with the part in its newest turn, and one that has gone on since."""
    if path == OLLAMA:
        turn: dict[str, Any] = {"role": "user", "content": "Look.", "images": [part]}
    else:
        kind = "input_text" if path == RESPONSES else "text"
        turn = {"role": "user", "content": [{"type": kind, "text": "Look."}, part]}
    rest = [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on."}]
    fields: dict[str, Any] = {"max_tokens": 2}
    if path == RESPONSES:
        fields = {"max_output_tokens": 2}
    elif path == OLLAMA:
        fields = {"model": "tiny-see", "stream": False, "options": {"num_predict": 2}}
    name = "input" if path == RESPONSES else "messages"
    return {name: [turn], **fields}, {name: [turn, *rest], **fields}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with seeing_server(seeing_folder(tmp_path_factory.mktemp("see"))) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "kind", "part"), CASES, ids=[f"{path} {kind}" for path, kind, _ in CASES]
)
def test_what_cannot_be_read_ends_no_conversation(
    path: str, kind: str, part: Any, seeing: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "pdf with too many bytes":
        monkeypatch.setattr(reading, "MAX_BYTES", 1000)
    newest, earlier = bodies(path, part)
    refused = seeing.post(path, newest)
    assert refused.status_code == 400, refused.text
    answer = seeing.post(path, earlier)
    assert answer.status_code == 200, answer.text
    name = "input" if path == RESPONSES else "messages"
    place = f"{name}[0].{'images[0]' if path == OLLAMA else 'content[1]'}"
    (skipped,) = answer.headers.get_list("x-mlxinfer-skipped")
    assert skipped.startswith(place), skipped
    assert ", " not in skipped


def test_what_can_be_read_is_read_beside_it(seeing: LiveServer) -> None:
    """A note takes the place of the broken picture alone, also where the session finds out."""

    def num_tokens(*urls: str) -> int:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        _, earlier = bodies(CHAT, parts[0])
        earlier["messages"][0]["content"][1:] = parts
        return int(seeing.answer(CHAT, earlier)["usage"]["prompt_tokens"])

    broken = f"data:image/png;base64,{coded(PICTURES['picture cut off'])}"
    one, two = num_tokens(URL), num_tokens(URL, URL)
    assert one < num_tokens(URL, broken) == num_tokens(broken, URL)
    assert num_tokens(URL, broken, URL) - two == num_tokens(URL, broken) - one


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_a_model_that_does_not_see_goes_on(path: str, live: LiveServer) -> None:
    part: Any = {
        CHAT: {"type": "image_url", "image_url": {"url": URL}},
        RESPONSES: {"type": "input_image", "image_url": URL},
        MESSAGES: {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": coded(RED)},
        },
        OLLAMA: coded(RED),
    }[path]
    newest, earlier = bodies(path, part)
    model = {"model": "demo"} if path == OLLAMA else {}
    assert live.post(path, {**newest, **model}).status_code == 400
    answer = live.post(path, {**earlier, **model})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mlxinfer-skipped"].endswith("picture")


def test_a_turn_after_a_refused_one_goes_on(seeing: LiveServer) -> None:
    """Clients leave the refused message in their history, without an answer behind it."""
    newest, _ = bodies(CHAT, {"type": "file", "file": {"file_id": "f"}})
    again = {**newest, "messages": [*newest["messages"], {"role": "user", "content": "Go on."}]}
    assert seeing.post(CHAT, again).status_code == 200
