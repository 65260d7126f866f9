"""Pictures on the command line: --image, the pipe, /image, and files dropped on a terminal."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from PIL import Image
from rich.console import Console
from seeing_folder import seeing_folder

from mlxinfer.cli._chat_session import ChatSession
from mlxinfer.cli._pictures import dropped
from mlxinfer.cli.chat import take_turn
from mlxinfer.cli.history import open_log
from mlxinfer.errors import PictureError, UnsupportedFieldError
from mlxinfer.images import from_data_url


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


@pytest.fixture
def seeing(fake: FakeLLM) -> FakeLLM:
    fake.model_info.sees = True
    return fake


def moving(path: Path, *colours: str) -> Path:
    """A video of frames of one colour each, two a second; its path."""
    frames = [Image.new("RGB", (40, 30), colour) for colour in colours]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)
    return path


def chat_of(llm: FakeLLM) -> ChatSession:
    return ChatSession("fake", lambda _: llm)


def say(session: ChatSession, line: str) -> str:
    screen = io.StringIO()
    take_turn(session, line, Console(file=screen, width=80))
    return screen.getvalue()


def test_run_sends_pictures(seeing: FakeLLM, outcome: Any, photo: Path) -> None:
    seen = outcome("run", "What?", "--image", str(photo), "--image", str(photo))
    assert (seen.code, seen.out) == (0, "Hello there.\n")
    assert seeing.asked[0][0] == [{"role": "user", "content": "What?"}]
    assert seeing.options[0]["images"] == [photo.read_bytes()] * 2


@pytest.mark.parametrize(
    ("given", "opened"),
    [([], "demo"), (["--image"], "demo-vision"), (["-m", "demo", "--image"], "demo")],
)
def test_without_a_model_the_demo_that_sees_answers_about_a_picture(
    seeing: FakeLLM, outcome: Any, photo: Path, given: list[str], opened: str
) -> None:
    assert outcome("run", "What?", *given, *([str(photo)] if "--image" in given else [])).code == 0
    assert [name for name, _ in seeing.opened] == [opened]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_conversation_that_goes_on_has_its_pictures(
    command: str,
    seeing: FakeLLM,
    outcome: Any,
    photo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stdin: Any,
) -> None:
    monkeypatch.setenv("MLXINFER_HISTORY", str(tmp_path / "history.db"))
    log = open_log(continued=None, keep=True)
    log.add("user", "What?", model="demo-vision", system=None, images=[photo.read_bytes()])
    log.add("assistant", "A square.", model="demo-vision", system=None)
    log.close()
    stdin(b"And now?\n")
    assert outcome(command, "-c", *(["And now?"] if command == "run" else [])).code == 0
    assert [name for name, _ in seeing.opened] == ["demo-vision"]
    asked: Any = seeing.asked[0][0]
    image, text = asked[0]["content"]
    assert from_data_url(image["image"]) == photo.read_bytes()
    assert text == {"type": "text", "text": "What?"}
    assert asked[2]["content"] == "And now?"
    seeing.model_info.sees = False
    stdin(b"And now?\n")
    assert outcome(command, "-c", *(["And now?"] if command == "run" else [])).code == 0
    asked = seeing.asked[1][0]
    assert asked[0]["content"] == "[picture: picture 1]\n\nWhat?"


def test_run_reads_a_picture_from_a_pipe(
    seeing: FakeLLM, outcome: Any, photo: Path, stdin: Any
) -> None:
    stdin(photo.read_bytes())
    assert outcome("run", "What?", "--image", "-").code == 0
    assert seeing.options[0]["images"] == [photo.read_bytes()]


def test_run_names_a_bad_picture(
    seeing: FakeLLM, outcome: Any, photo: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.png").write_text("no picture")
    (tmp_path / "half.png").write_bytes(photo.read_bytes()[:60])
    for name, said in (("notes.png", "no picture of a known"), ("half.png", "cut off")):
        seen = outcome("run", "What?", "--image", str(photo), "--image", str(tmp_path / name))
        assert name in seen.err, said
        assert said in seen.err


def test_run_takes_a_data_url(seeing: FakeLLM, outcome: Any, photo: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(photo.read_bytes()).decode()}"
    assert outcome("run", "What?", "--image", url).code == 0
    assert seeing.options[0]["images"] == [photo.read_bytes()]
    assert len(outcome("run", "What?", "--image", url[:300]).err) < 300


def test_run_sends_videos(seeing: FakeLLM, outcome: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    path = moving(tmp_path / "clip.gif", "red", "blue", "white")
    assert outcome("run", "What?", "--video", str(path)).code == 0
    assert list(seeing.options[0]["videos"]) == [str(path)]
    seen = outcome("run", "What?", "--video", str(tmp_path / "no.mp4"))
    assert (seen.code, "There is no file" in seen.err) == (1, True)
    path.write_text("no video")
    seen = outcome("run", "What?", "--video", str(path))
    assert (seen.code, "no known format" in seen.err) == (1, True)
    assert len(seeing.asked) == 1


def test_run_answers_about_a_video_with_a_real_model(outcome: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    folder, path = seeing_folder(tmp_path / "see", videos=True), tmp_path / "clip.gif"
    given = ["run", "What?", "-m", str(folder), "--max-tokens", "4", "--json", "--video", str(path)]
    answers = []
    for colours in (("red", "blue"), ("red", "white")):
        moving(path, *colours)
        answers.append(outcome(*given, "--temperature", "0"))
    assert [one.code for one in answers] == [0, 0]
    assert answers[0].out != answers[1].out


def test_run_refuses_pictures_for_a_text_model(fake: FakeLLM, outcome: Any, photo: Path) -> None:
    seen = outcome("run", "What?", "--image", str(photo))
    assert seen.code == 1
    assert "fake reads text only" in seen.err
    assert not fake.asked


def test_chat_sends_a_picture_with_the_next_message(seeing: FakeLLM, photo: Path) -> None:
    session = chat_of(seeing)
    assert say(session, f"/image {photo}") == "1 picture with the next message\n"
    say(session, "What?")
    say(session, "And now?")
    image = {"type": "image", "image": photo.read_bytes()}
    shown = {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}
    assert seeing.asked[0][0] == [shown]
    messages: Any = seeing.asked[1][0]
    assert (messages[0], messages[2]) == (shown, {"role": "user", "content": "And now?"})


def test_a_message_that_is_sent_again_keeps_its_picture(seeing: FakeLLM, photo: Path) -> None:
    session = chat_of(seeing)
    say(session, f"/image {photo}")
    say(session, "What?")
    say(session, "/regen")
    assert seeing.asked[1][0] == seeing.asked[0][0]
    say(session, "/edit Who?")
    edited: Any = seeing.asked[2][0]
    assert [part["type"] for part in edited[0]["content"]] == ["image", "text"]


def test_chat_sends_a_video_with_the_next_message(seeing: FakeLLM, tmp_path: Path) -> None:
    pytest.importorskip("av")
    path, session = moving(tmp_path / "clip.gif", "red", "blue"), chat_of(seeing)
    assert say(session, f"/video {path}") == "1 video with the next message\n"
    say(session, "What?")
    say(session, "/regen")
    say(session, "And now?")
    video = {"type": "video", "video": str(path)}
    shown = {"role": "user", "content": [video, {"type": "text", "text": "What?"}]}
    assert [asked[0][0] for asked in seeing.asked] == [shown] * 3
    assert seeing.asked[2][0][2] == {"role": "user", "content": "And now?"}
    with pytest.raises(PictureError, match="There is no file"):
        say(session, f"/video {tmp_path / 'no.mp4'}")


def test_a_dropped_file_is_a_picture(seeing: FakeLLM, photo: Path) -> None:
    session = chat_of(seeing)
    escaped = str(photo).replace(" ", "\\ ")
    assert "1 picture" in say(session, f"{escaped} ")
    say(session, f"'{photo}' Compare them.")
    asked: Any = seeing.asked[0][0]
    assert [part["type"] for part in asked[0]["content"]] == ["image", "image", "text"]
    assert asked[0]["content"][2]["text"] == "Compare them."


def test_a_model_that_does_not_see_says_so_at_once(fake: FakeLLM, photo: Path) -> None:
    session = chat_of(fake)
    for line in (f"/image {photo}", f"'{photo}'"):
        with pytest.raises(UnsupportedFieldError, match="fake reads text only"):
            say(session, line)
    say(session, f"What is '{photo}'?")
    assert fake.asked[0][0] == [{"role": "user", "content": f"What is '{photo}'?"}]


def test_paths_in_a_line_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["a.png", "b c.JPG", "d'e.webp"]
    one, two, three = (tmp_path / name for name in names)
    for path in (one, two, three):
        path.write_bytes(b"")
    assert dropped(f"{one} what?") == ([str(one)], "what?")
    assert dropped(f"see {one}\nand '{two}'") == ([str(one), str(two)], "see \nand")
    assert dropped(f'"{three}" ~/a.png') == ([str(three), str(one)], "")
    assert dropped(f"file://{tmp_path}/b%20c.JPG") == ([str(two)], "")
    for line in (
        "a.png what?",
        f"{tmp_path}/none.png",
        f"{tmp_path} what?",
        "it's a.png",
        "/set temperature 1",
        f"x{one}",
    ):
        assert dropped(line) == ([], line)
