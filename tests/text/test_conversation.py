"""What LLM.chat takes for a conversation: text in one piece or in parts, and pictures."""

from typing import Any

import pytest

from mlxinfer.errors import InvalidRequestError
from mlxinfer.text import read_messages

HELLO = {"role": "user", "content": "Hello"}


def part(text: Any, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_parts_of_a_text_are_joined() -> None:
    parts = [part("Hello"), part("you", "input_text")]
    assert read_messages([{"role": "user", "content": parts}]) == (
        [{"role": "user", "content": "Hello\nyou"}],
        [],
    )


def test_what_is_text_already_stays_as_it_is() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert read_messages(tuple(said)) == (said, [])


def test_pictures_are_taken_out_in_their_order() -> None:
    url = "data:image/png;base64,AAAA"
    parts = [
        {"type": "image", "image": b"1"},
        part("Hello"),
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url, "detail": "high"},
    ]
    messages, images = read_messages([HELLO, {"role": "user", "content": parts}])
    place = {"type": "image"}
    assert messages == [HELLO, {"role": "user", "content": [place, part("Hello"), place, place]}]
    assert [image[:3] for image in images] == [
        (b"1", False, "messages[1].content[0].image"),
        (url, True, "messages[1].content[2].image_url"),
        (url, False, "messages[1].content[3].image_url"),
    ]


WRONG = [
    ("Hello", r"messages is 'Hello'; expected a list such as \[\{"),
    (HELLO, r"messages is \{'role'"),
    ([], r"messages is \[\]"),
    (["Hello"], r"messages\[0\] is 'Hello'; expected one such as"),
    ([{"content": "Hello"}], r"messages\[0\] is \{'content'"),
    ([HELLO, {"role": "user"}], r"messages\[1\] has no content"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content is 3; expected a text"),
    ([{"role": "user", "content": ["Hello"]}], r"content\[0\] is 'Hello'; expected \{\"type\""),
    (
        [{"role": "user", "content": [part("see"), {"type": "image_url", "image_url": "x"}]}],
        r"messages\[0\].content\[1\].image_url is 'x'; expected a data: URL",
    ),
    ([{"role": "user", "content": [part("a", "audio")]}], r"content\[0\] is of type 'audio'"),
    ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\].image is missing"),
    ([{"role": "user", "content": [part(None)]}], r"content\[0\].text is None"),
    ([{"role": "user", "content": b"x" * 100}], r"content is b'x+…; expected a text"),
]


def test_anything_else_is_named() -> None:
    for messages, problem in WRONG:
        with pytest.raises(InvalidRequestError, match=problem) as caught:
            read_messages(messages)
        assert caught.value.param == "messages"


def test_videos_are_taken_out_with_the_rate_of_their_frames() -> None:
    frames = {"type": "video", "frames": [b"1", b"2"], "fps": 3.0, "detail": "low"}
    parts = [frames, {"type": "text", "text": "x"}, {"type": "video", "video": "a.mp4"}]
    messages, result = read_messages([{"role": "user", "content": parts}])
    shown = [{"type": "video"}, {"type": "text", "text": "x"}, {"type": "video"}]
    assert messages == [{"role": "user", "content": shown}]
    assert result == [
        ([b"1", b"2"], True, "messages[0].content[0].frames", True, 3.0, False),
        ("a.mp4", False, "messages[0].content[2].video", True, None, False),
    ]
