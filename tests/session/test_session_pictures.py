"""Pictures in conversations: what the template shows, where their tokens stand, what is refused."""

import json
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from text.text_data import tokenizer_with

from mlxinfer.errors import (
    InvalidRequestError,
    PromptTooLongError,
    TemplateError,
    UnsupportedFieldError,
)
from mlxinfer.images import Picture, Shown, Tile, process
from mlxinfer.images.process import Source
from mlxinfer.killable import Packet
from mlxinfer.session.arguments import with_images
from mlxinfer.session.engine_factory import ModelInfo
from mlxinfer.session.inputs import ChatInput
from mlxinfer.session.pictures import PictureReader, PreparedKey, PreparedPictures
from mlxinfer.session.request_builder import RequestBuilder
from mlxinfer.text import Tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<|see|>", "<start_of_image>"]
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n" + PARTS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}}
GEMMA = {"model_type": "gemma3", "vision_config": {"patch_size": 14, "image_size": 896}}
RED = Image.new("RGB", (64, 32), "red")


def tiny_info(tokenizer: Tokenizer, folder: Path, max_context: int, *, sees: bool) -> ModelInfo:
    return ModelInfo(
        name="tiny-see",
        path=folder,
        architecture="tiny",
        num_layers=1,
        vocab_size=tokenizer.vocab_size,
        max_context=max_context,
        weights_bytes=0,
        kv_bytes_per_token=1,
        quantization=None,
        eos_token_ids=(),
        sees=sees,
    )


def builder(
    folder: Path, config: dict[str, Any] | None, mark: str, max_tokens: int = 100
) -> RequestBuilder:
    """Of a model with a tower and `config`, or (None) of one that reads text."""
    tokenizer = tokenizer_with(TEMPLATE.replace("PICTURE", mark), MARKS)
    info = tiny_info(tokenizer, folder, 2000, sees=config is not None)
    ids = [tokenizer.piece_to_id(item) for item in MARKS]
    named = {"image_token_id": ids[2], "boi_token_index": ids[3], "eoi_token_index": ids[1]}
    (folder / "config.json").write_text(json.dumps({**(config or {}), **named}))
    return RequestBuilder(tokenizer, info, "auto", PictureReader.of(info, tokenizer, max_tokens))


@pytest.fixture
def qwen(tmp_path: Path) -> Iterator[RequestBuilder]:
    made = builder(tmp_path, QWEN, "<|see|>")
    yield made
    made.close()


def chat(*parts: Any, role: str = "user") -> ChatInput:
    return ChatInput(messages=[{"role": role, "content": list(parts)}])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(source: Any = RED, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": source, **more}


def encode(tokenizer: Tokenizer, words: str) -> list[int]:
    return tokenizer.encode(words, add_special_tokens=False, parse_special=True)


def test_tokens_of_pictures_stand_where_the_template_has_shown_them(qwen: RequestBuilder) -> None:
    given = chat(text("one"), image(), text("two"), image(np.zeros((200, 100, 3), np.uint8)))
    prompt = qwen.conversation(given, 2000)
    see = qwen.tokenizer.piece_to_id("<|see|>")
    sizes = [len(picture.picture.token_ids) for picture in prompt.pictures]
    assert all(10 < size <= 100 for size in sizes)
    shown = "<|im_start|>user\none<|see|>two<|see|><|im_end|>\n<|im_start|>assistant\n"
    plain = encode(qwen.tokenizer, shown)
    first, second = (i for i, token in enumerate(plain) if token == see)
    want = [*plain[:first], *[see] * sizes[0], *plain[first + 1 : second], *[see] * sizes[1]]
    assert prompt.ids == [*want, *plain[second + 1 :]]
    assert [picture.start for picture in prompt.pictures] == [first, second - 1 + sizes[0]]
    for placed in prompt.pictures:
        assert prompt.ids[placed.start : placed.stop] == list(placed.picture.token_ids)


def test_a_text_cannot_spell_a_picture(qwen: RequestBuilder) -> None:
    prompt = qwen.conversation(chat(text("<|see|> and "), image()), 2000)
    (placed,) = prompt.pictures
    before = qwen.tokenizer.decode(prompt.ids[: placed.start], skip_special_tokens=False)
    assert before == "<|im_start|>user\n<|see|> and "
    assert prompt.ids.count(placed.picture.feature_id) == placed.picture.num_features


def test_low_detail_takes_fewer_tokens(tmp_path: Path) -> None:
    made = builder(tmp_path, QWEN, "<|see|>", 1000)
    large = Image.new("RGB", (2000, 2000))
    (high,) = made.conversation(chat(image(large)), None).pictures
    (low,) = made.conversation(chat(image(large, detail="low")), None).pictures
    assert 900 < high.picture.num_features <= 1000
    assert 200 < low.picture.num_features <= 256
    made.close()


def test_empty_lines_around_a_picture_join_the_text_beside(tmp_path: Path) -> None:
    """Gemma 3: the template's newline and the picture's become one token, as in transformers."""
    made = builder(tmp_path, GEMMA, "<start_of_image>")
    prompt = made.conversation(chat(image(), text("what?")), 2000)
    (placed,) = prompt.pictures
    shown = "<|im_start|>user\n\n\n<start_of_image>\n\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    begin = made.tokenizer.piece_to_id("<start_of_image>")
    plain = encode(made.tokenizer, shown)
    at = plain.index(begin)
    assert prompt.ids == [*plain[:at], *placed.picture.token_ids, *plain[at + 1 :]]
    assert placed.picture.token_ids[0] == begin
    made.close()


def test_models_that_do_not_see_name_themselves(tmp_path: Path) -> None:
    made = builder(tmp_path, None, "")
    with pytest.raises(UnsupportedFieldError, match="'tiny-see' reads text only") as caught:
        made.conversation(chat(text("a"), image("/no/such/file")), 2000)
    assert caught.value.param == "messages[0].content[1].image"
    assert made.conversation(chat(text("a")), 2000).pictures == ()
    made.close()


def test_a_template_that_shows_no_pictures_is_an_error(tmp_path: Path) -> None:
    made = builder(tmp_path, QWEN, "")
    with pytest.raises(TemplateError, match="tiny-see writes 0 places for 1 pictures"):
        made.conversation(chat(image()), 2000)
    made.close()


def test_pictures_that_cannot_fit_are_refused_before_all_are_read(qwen: RequestBuilder) -> None:
    one, last = image(Image.new("RGB", (320, 320))), image("/not/reached.png")
    for count, max_context in ((5, 450), (20, None)):  # None: for counting, up to the model's own
        with pytest.raises(PromptTooLongError):
            qwen.conversation(chat(*[one] * count, last), max_context)


def test_images_of_a_call_stand_before_the_last_text_of_the_user() -> None:
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "fo"},
    ]
    result = with_images(said, [b"1", b"2"])
    assert [result[0], result[1], result[3]] == [said[0], said[1], said[3]]
    assert result[2]["content"] == [image(b"1"), image(b"2"), text("three")]
    parts = [{"role": "user", "content": [text("three")]}]
    assert with_images(parts, (b"1",))[0]["content"] == [image(b"1"), text("three")]
    for images, messages in (("a.png", said), ([b"1"], said[1:2])):
        with pytest.raises(InvalidRequestError, match="images"):
            with_images(messages, images)


def key_of(source: Any, limit: int = 50, cache_salt: str | None = None) -> PreparedKey:
    return PreparedKey(cache_salt, Source.of(source, "image").digest(), limit)


def test_pictures_of_earlier_turns_are_not_made_ready_again() -> None:
    """By what they are, not by which object they came in; the last ones, within a limit."""
    kept, made = PreparedPictures(max_bytes=2 * 40 * 64), []

    def prepare(key: PreparedKey) -> Shown:
        def make() -> Shown:
            made.append(key)
            patches = np.zeros((10, 64), np.float32)
            return Shown((Picture((Tile(patches, (1, 2, 5), 10),), (7,) * 10, 7, b""),))

        return kept.prepare(key, make)

    red, blue = key_of(RED), key_of(Image.new("RGB", (64, 32), "blue"))
    first = prepare(red)
    assert prepare(key_of(RED.copy())) is first
    assert prepare(key_of(np.asarray(RED))) is first
    prepare(key_of(RED, 20))
    prepare(red)  # used last, so that the other one goes
    prepare(blue)
    assert prepare(red) is first
    prepare(key_of(RED, 20))
    assert made == [red, key_of(RED, 20), blue, key_of(RED, 20)]
    turned = key_of(Image.new("RGB", (32, 64), "red"))
    assert turned != red, "as many pixels, of another shape"


def test_what_one_key_has_shown_is_made_ready_for_another_again(qwen: RequestBuilder) -> None:
    """Its time would tell that somebody has shown the picture."""
    digests = set()
    for cache_salt in ("a", "b", "a", None):
        given = ChatInput(messages=chat(image(RED)).messages, cache_salt=cache_salt)
        digests.update({one.picture.digest for one in qwen.conversation(given, None).pictures})
    assert len(digests) == 1
    assert [key.cache_salt for key in qwen.pictures._prepared._kept] == ["b", "a", None]


def test_large_pictures_come_singly(qwen: RequestBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files may hold them, and each takes up to 20 bytes per pixel."""
    large, asked = Image.new("RGB", (4001, 4000)), []
    ask = process._pool.ask

    def watched(job: Packet, abandoned: Any) -> Packet:
        if job.value["is_alone"]:
            assert process._one_large.locked()
        asked.append(job.value["is_alone"])
        return ask(job, abandoned)

    monkeypatch.setattr(process._pool, "ask", watched)
    qwen.conversation(chat(image(large)), None)
    assert asked == [False, True]
    qwen.conversation(chat(image(RED)), None)
    assert asked == [False, True, False]
    with process._one_large:
        left = ChatInput(messages=chat(image(large.rotate(1))).messages, abandoned=lambda: True)
        with pytest.raises(CancelledError):
            qwen.conversation(left, None)
