"""The bundled model that sees: its files, an answer of the command line, held-out drawings."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from mlxinfer import LLM, UnsupportedFieldError, hub

sys.path.insert(0, str(Path(__file__).parents[1]))
batches = importlib.import_module("examples.demo_model.vision.batches")
drawings = importlib.import_module("examples.demo_model.vision.drawings")
evaluate = importlib.import_module("examples.demo_model.vision.evaluate")
questions = importlib.import_module("examples.demo_model.vision.questions")

MAX_BYTES = 4 << 20


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo-vision", max_batch=16) as llm:
        yield llm


@pytest.fixture
def drawing(tmp_path: Path) -> Path:
    image = Image.new("RGB", (400, 300), "white")
    ImageDraw.Draw(image).ellipse((60, 90, 170, 200), fill="red")
    image.save(tmp_path / "drawing.png")
    return tmp_path / "drawing.png"


def test_its_folder_is_small() -> None:
    files = list(hub.resolve("demo-vision").iterdir())
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    config = json.loads((hub.resolve("demo-vision") / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_vl"


def test_the_command_line_answers_about_a_drawing_without_a_model(
    drawing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlxinfer.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["run", "What is in this picture?", "--image", str(drawing)])
    assert (stop.value.code, capsys.readouterr().out) == (0, "A red circle.\n")


def test_it_refuses_in_one_sentence_what_it_cannot_see(demo: LLM, drawing: Path) -> None:
    for asked in ("Who is this?", "Where was this photo taken?"):
        assert demo.chat(asked, images=[drawing]).text == questions.REFUSAL


def test_a_video_is_refused_as_a_video(demo: LLM, drawing: Path) -> None:
    frames = [Image.open(drawing)] * 4
    with pytest.raises(UnsupportedFieldError, match="sees pictures and no videos"):
        demo.chat("What happens?", videos=[frames])


def test_a_second_picture_in_a_conversation_is_the_one_that_is_meant(demo: LLM) -> None:
    messages: list[Any] = []
    for colour in ("red", "blue"):
        image = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(image).rectangle((40, 40, 85, 85), fill=colour)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
        messages.append({"role": "user", "content": content})
        answer = demo.chat(messages).text
        assert answer == f"A {colour} square."
        messages.append({"role": "assistant", "content": answer})


def test_it_says_that_it_cannot_tell_places(demo: LLM, drawing: Path) -> None:
    for asked in ("Where is the circle?", "where's the red circle"):
        assert demo.chat(asked, images=[drawing]).text == questions.NO_PLACES


def test_training_says_of_a_shape_without_a_name_that_it_is_not_known() -> None:
    for example in evaluate.nameless_examples(6):
        assert {"know", "word"} & {*example.asked.answer.rstrip(".").split()}
    for kind in questions.KINDS:
        assert not any("know" in e.asked.answer for e in evaluate.examples(kind, 6))
    said = "A red star and the word NO."
    assert evaluate.invented(said, "A shape that I do not know.") == ["no", "redstar"]
    assert evaluate.invented(said, said) == []


def test_training_labels_shapes_and_words_without_a_name() -> None:
    word = drawings.Scene((drawings.Thing("key", "", 0.5, 0.5, 0.2),), "CAT", 0.5, 0.9, 0.4)
    labels, covers = batches.labels_of(word, (4, 4)), batches.patch_labels_of(word, (4, 4))
    named = len(drawings.SHAPES) * len(drawings.COLOURS) + len(drawings.WORDS)
    assert labels.sum(0)[named:].tolist() == [1, 1, 0]
    assert labels.sum(0)[:named].sum() == 0
    assert covers.sum(0)[:-2].sum() == 0
    assert all(covers.sum(0)[-2:] > 0)


@pytest.mark.alike
@pytest.mark.ci
@pytest.mark.parametrize("kind", questions.KINDS)
def test_most_held_out_drawings_are_answered_rightly(demo: LLM, kind: str) -> None:
    some = evaluate.examples(kind, 40)
    said = evaluate.answers(demo, some)
    wrong = [(e.asked, a) for e, a in zip(some, said, strict=True) if a != e.asked.answer]
    assert len(wrong) <= 8, wrong
