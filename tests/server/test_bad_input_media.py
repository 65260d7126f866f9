"""Bad input: pictures, sounds and files, refused by name and never fetched."""

from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, COUNT, MESSAGES, RESPONSES, TOKENIZE, expect_refusal, unharmed
from live_server import LiveServer


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    yield from unharmed(live)


URLS = [
    "http://169.254.169.254/latest/meta-data/",
    "file:///etc/passwd",
    "data:image/png;base64," + "A" * 100_000,
    "https://user:secret@evil.example\\@localhost/x.png",
]
PARTS: list[dict[str, Any]] = [
    *({"type": "image_url", "image_url": {"url": url}} for url in URLS),
    {"type": "image_url", "image_url": "not an object"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": URLS[0]}},
    {"type": "video_url", "video_url": {"url": URLS[0]}},
    {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "prompt_embeds", "data": "AAAA"},
    {"type": "x" * 10_000},
]


@pytest.mark.parametrize("part", PARTS, ids=lambda p: f"{p!r:.40}")
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_parts(live: LiveServer, path: str, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    body = {"messages": [{"role": "user", "content": content}]}
    error = expect_refusal(live, path, body, param="messages[0].content[1].type")
    assert part["type"][:50] in error["message"]
    assert error["code"] == "unsupported_parameter"


BLOCKS: list[dict[str, Any]] = [
    *({"type": "image", "source": {"type": "url", "url": url}} for url in URLS),
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "source": None},
    {"type": "document", "source": {"type": "file", "file_id": "x"}},
    {"type": "container_upload", "file_id": "x"},
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b!r:.60}")
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_blocks(live: LiveServer, path: str, block: dict[str, Any]) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    for content in ([block], [result]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        assert block["type"] in expect_refusal(live, path, body)["message"]


ITEM_PARTS = [
    *({"type": "input_image", "image_url": url} for url in URLS),
    {"type": "input_image", "file_id": "x"},
    {"type": "input_file", "file_url": URLS[1]},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
]


@pytest.mark.parametrize("part", ITEM_PARTS, ids=lambda p: f"{p!r:.60}")
def test_items(live: LiveServer, part: dict[str, Any]) -> None:
    said = {"role": "user", "content": [part]}
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    for item, where in ((said, "content"), (output, "output")):
        error = expect_refusal(
            live, RESPONSES, {"input": [item]}, param=f"input[0].{where}[0].type"
        )
        assert part["type"] in error["message"]


@pytest.mark.parametrize(
    "fields",
    [{"modalities": ["audio"]}, {"audio": {"voice": "x"}}, {"web_search_options": {}}],
)
def test_answers_of_other_kinds(live: LiveServer, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    expect_refusal(live, CHAT, body, param=next(iter(fields)))
