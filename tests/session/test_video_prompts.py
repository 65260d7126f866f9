"""Conversations with videos are what transformers makes of them: tokens, pixels, logits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeing_folder import seeing_folder
from session.video_chats import CLIPS, NAMES, SAME_SIZE, chat, some, some_frames

from mlxinfer import LLM, SamplingParams
from mlxinfer.errors import InvalidRequestError, PictureError, UnsupportedFieldError
from mlxinfer.remote.request import RemoteRequests
from mlxinfer.session.inputs import ChatInput, EncodedPrompt, TextInput

REFERENCES = Path(__file__).parents[1] / "data" / "videos" / "references.npz"


@pytest.fixture(scope="module", params=NAMES)
def seeing(request: Any, tmp_path_factory: Any) -> Iterator[tuple[str, LLM]]:
    folder = tmp_path_factory.mktemp("video")
    with LLM(seeing_folder(folder, request.param, videos=True), dtype="float32") as llm:
        yield request.param, llm


def encoded(llm: LLM, messages: Any) -> EncodedPrompt:
    given = ChatInput(messages=messages)
    return llm._session.builder.conversation(given, 4096)


def references() -> Any:
    return np.load(REFERENCES)


@pytest.mark.alike
@pytest.mark.parametrize("title", CLIPS)
def test_tokens_and_pixels_are_those_of_transformers(seeing: tuple[str, LLM], title: str) -> None:
    name, llm = seeing
    prompt = encoded(llm, chat(CLIPS[title]))
    with references() as stored:
        ids, shape, pixels = (stored[f"{name}.{title}.{k}"] for k in ("ids", "shape", "pixels"))
    assert prompt.ids == ids.tolist()
    tiles = [tile for placed in prompt.pictures for tile in placed.picture.tiles]
    patches = np.concatenate([tile.patches for tile in tiles])
    assert patches.shape == tuple(shape[:2])
    if name.startswith("qwen"):
        assert [len(tiles), *tiles[0].grid[1:]] == shape[2:].tolist()
    apart = np.abs(some(patches.reshape(-1)) - pixels)
    # transformers resizes frames with torchvision: a level may differ by one
    assert apart.max() <= (1e-6 if title in SAME_SIZE[name] else 1.01 * 2 / 255)
    assert (apart > 1e-6).mean() < 0.05


def test_logits_are_those_of_transformers(seeing: tuple[str, LLM]) -> None:
    name, llm = seeing
    for title in SAME_SIZE[name]:
        prompt = encoded(llm, chat(CLIPS[title]))
        with references() as stored:
            expected = stored[f"{name}.{title}.logits"]
        given = TextInput(
            prompt=prompt.ids,
            pictures=prompt.pictures,
            params=SamplingParams(max_tokens=1),
            logits=True,
        )
        answers = llm._session.start(given)
        answers.results()
        logits = np.concatenate(answers.answers[0].prompt_logits)[-8:]
        assert np.abs(logits - expected).max() <= 1e-4 * expected.std(), title


@pytest.mark.alike
def test_answers_in_chunks_and_behind_a_prefix_are_the_same(seeing: tuple[str, LLM]) -> None:
    name, llm = seeing
    options = {"temperature": 0, "max_tokens": 6}
    messages = chat(CLIPS["slow"])
    plain = llm.chat(messages, **options)
    again = llm.chat(messages, **options)
    assert again.token_ids == plain.token_ids
    assert again.cached_tokens > 0
    if name.startswith("qwen"):  # spans of Gemma 4 are never cut
        with LLM(llm.model_info.path, dtype="float32", prefill_chunk=16) as chunked:
            assert chunked.chat(messages, **options).token_ids == plain.token_ids


def test_the_time_between_frames_counts(seeing: tuple[str, LLM]) -> None:
    name, llm = seeing
    if name == "qwen2_vl":
        pytest.skip("its tokens do not say the time")
    result = [
        encoded(llm, chat(CLIPS["slow"]._replace(fps=fps))) for fps in (CLIPS["slow"].fps, 0.002)
    ]
    said = [(one.ids, [placed.picture.times for placed in one.pictures]) for one in result]
    assert said[0] != said[1]


@pytest.mark.alike
def test_videos_argument_puts_frames_before_the_text(seeing: tuple[str, LLM]) -> None:
    _, llm = seeing
    frames = CLIPS["exact"].part["frames"]
    parts = [{"type": "video", "frames": frames}, {"type": "text", "text": "What?"}]
    options = {"temperature": 0, "max_tokens": 3}
    actual = llm.chat("What?", videos=[frames], **options)
    expected = llm.chat([{"role": "user", "content": parts}], **options)
    assert actual.token_ids == expected.token_ids
    assert actual.prompt_tokens == expected.prompt_tokens > 40
    with llm.program() as program:
        program.user("What?", videos=[frames])
        assert program.gen("seen", **options).token_ids == expected.token_ids
    branches = llm.program().fork(2)
    branches.user("What?", videos=[frames])
    assert [one.token_ids for one in branches.gen("seen", **options)] == [expected.token_ids] * 2


def test_text_of_a_message_takes_no_videos_place(seeing: tuple[str, LLM]) -> None:
    """A placeholder that somebody typed is text."""
    _, llm = seeing
    typed, video = "<|video_pad|><|video|>", CLIPS["exact"].part
    parts = [{"type": "text", "text": typed}, video, {"type": "text", "text": typed}]
    prompt = encoded(llm, [{"role": "user", "content": parts}])
    assert len(prompt.pictures) == len(encoded(llm, chat(CLIPS["exact"])).pictures)
    for picture, start in prompt.pictures:
        assert tuple(prompt.ids[start : start + len(picture.token_ids)]) == picture.token_ids


def test_wrong_videos_are_refused(seeing: tuple[str, LLM]) -> None:
    wrong = [
        ({"frames": []}, PictureError, "no frames"),
        ({}, InvalidRequestError, "no video"),
        ({"frames": [b"x"]}, PictureError, "known format"),
        ({"frames": "a.mp4"}, InvalidRequestError, "a list of pictures"),
        ({"video": [b"x"]}, InvalidRequestError, "a path or bytes"),
        ({"video": "/no/such.mp4"}, PictureError, "There is no file"),
        ({"video": "/no/such.mp4", "fps": 3}, PictureError, "its own fps"),
        ({"frames": some_frames(2), "fps": 0}, PictureError, "fps is 0"),
        ({"frames": some_frames(1) + some_frames(1, 8, 8)}, PictureError, "one size"),
    ]
    for part, error, said in wrong:
        with pytest.raises(error, match=said):
            encoded(seeing[1], [{"role": "user", "content": [{"type": "video", **part}]}])


def test_models_without_videos_refuse_them(tmp_path: Path) -> None:
    with LLM(seeing_folder(tmp_path), dtype="float32") as llm:
        with pytest.raises(UnsupportedFieldError, match="no videos"):
            llm.chat("What?", videos=[some_frames(2)])
        with pytest.raises(InvalidRequestError, match="videos is 3"):
            llm.chat("What?", videos=3)


def test_videos_do_not_go_over_http() -> None:
    given = ChatInput(messages=chat(CLIPS["exact"]))
    with pytest.raises(InvalidRequestError, match="does not go over HTTP"):
        given.read_by(RemoteRequests("m"))
