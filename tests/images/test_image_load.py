"""Pictures come out upright, opaque and in RGB from every source; broken ones are an error."""

import base64
import io
import os
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mlxinfer.errors import PictureError
from mlxinfer.images import data_url, from_base64, load_image

RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def heic(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    pytest.importorskip("pillow_heif").from_pillow(image).save(file, quality=90, **options)
    return file.getvalue()


def to_turn(orientation: int) -> Image.Exif:
    """EXIF data that say how a picture is to be turned; 6: by 90 degrees clockwise."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def mean_difference(image: Image.Image, expected: Image.Image) -> float:
    return np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean()


def slope(width: int = 20, height: int = 10) -> Image.Image:
    levels = np.zeros((height, width, 3), np.uint8)
    levels[..., 0] = np.linspace(0, 255, width)
    levels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(levels)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_is_read(form: str, tmp_path: Path) -> None:
    data = encoded(slope(), form)
    path = tmp_path / "picture"
    path.write_bytes(data)
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    for source in (data, bytearray(data), memoryview(data), path, str(path), url):
        image = load_image(source)
        assert (image.mode, image.size) == ("RGB", (20, 10))
        assert mean_difference(image, slope()) < 8


def test_heic_is_read_through_the_extra_and_turned_once() -> None:
    plain, turned = slope(64, 32), slope(64, 32).transpose(Image.Transpose.ROTATE_270)
    for options, expected in (({}, plain), ({"exif": to_turn(6).tobytes()}, turned)):
        image = load_image(heic(plain, **options))
        assert (image.mode, image.size) == ("RGB", expected.size)
        assert mean_difference(image, expected) < 8


def test_heic_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    with pytest.raises(PictureError, match=r"\.\[heif\]"):
        load_image(b"\0\0\0\x18ftypheic" + bytes(20))


def test_exif_turns_files_and_objects_alike() -> None:
    data = encoded(slope(), "PNG", exif=to_turn(6))
    upright = np.asarray(slope().transpose(Image.Transpose.ROTATE_270))
    for source in (data, Image.open(io.BytesIO(data))):
        assert np.array_equal(np.asarray(load_image(source)), upright)


def test_odd_metadata_keep_no_picture_from_being_turned() -> None:
    exif = to_turn(6)
    exif[0x0100] = 20
    data = bytearray(encoded(slope(), "JPEG", exif=exif))
    data[data.index(b"Exif") + 19] = 2  # the width becomes a text, which Pillow cannot write again
    assert load_image(data).size == (10, 20)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_are_those_of_pillow(orientation: int) -> None:
    data = encoded(slope(), "PNG", exif=to_turn(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(load_image(data)), np.asarray(upright))


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (4, 4), (*RED, 0))
    half = Image.new("LA", (4, 4), (0, 128))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, *RED])
    data = encoded(palette, "PNG", transparency=1)
    assert load_image(clear).getpixel((0, 0)) == WHITE
    assert load_image(half).getpixel((0, 0)) == (127, 127, 127)
    assert load_image(data).getpixel((0, 0)) == WHITE
    assert load_image(palette).getpixel((0, 0)) == RED


def test_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, WHITE)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load_image(data).getpixel((0, 0)) == RED


def test_arrays_are_levels_or_parts_of_one() -> None:
    levels = np.asarray(slope())
    for array in (levels, levels.astype(np.int64), (levels / 255).astype(np.float32)):
        assert np.array_equal(np.asarray(load_image(array)), levels)
    grey = levels[..., 0]
    for array in (grey, grey[..., None]):
        assert np.array_equal(np.asarray(load_image(array))[..., 2], grey)
    clear = np.zeros((3, 3, 4), np.uint8)
    assert load_image(clear).getpixel((1, 1)) == WHITE


def test_sixteen_bits_keep_their_shades() -> None:
    deep = Image.fromarray((np.arange(256, dtype=np.uint16) * 257)[None])
    assert np.array_equal(np.asarray(load_image(deep))[0, :, 0], np.arange(256))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        *((data, "no picture of a known format") for data in (b"", b"hello", b"%PDF-1.7")),
        ("/nowhere/a.png", "no file"),
        (Path(__file__).parent, "no file"),
        ("https://example.com/a.png", "not fetched"),
        ("data:text/plain,hello", "expected data:image/png;base64"),
        ("data:image/png;base64,$$$", "no base64"),
        *((source, "expected a path") for source in (None, 3, {"url": "x"})),
        (np.zeros((2, 2, 2), np.uint8), r"\(2, 2, 2\)"),
        (np.zeros((0, 2), np.uint8), r"\(0, 2\)"),
        *((np.full((2, 2), level), "outside of its range") for level in (2.0, np.nan, 300)),
        (np.array([["a", "b"]]), "expected numbers"),
    ],
)
def test_what_is_no_picture_is_refused(source: Any, said: str) -> None:
    with pytest.raises(PictureError, match=said) as caught:
        load_image(source, place="images[0]")
    assert (caught.value.param, caught.value.code) == ("images[0]", "invalid_image")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_cut_off_or_damaged_file_is_an_error_or_a_picture(form: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), np.uint8)
    data = encoded(Image.fromarray(noise), form)
    with pytest.raises(PictureError):
        load_image(data[: len(data) // 2])
    draw = random.Random(20261126)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(data))] = draw.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata
            try:
                image = load_image(damaged[: draw.randint(1, len(data))])
            except PictureError:
                continue
        assert image.mode == "RGB"


def test_a_picture_from_a_pipe_is_read_and_a_locked_file_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = encoded(slope(), "PNG")
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    assert load_image(pipe).size == (20, 10)
    writer.join()
    for name in ("~nobody_of_this_name/a.png", "a" * 300):
        with pytest.raises(PictureError, match=r"cannot be read|no file"):
            load_image(name)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = encoded(Image.new("1", (20_000, 20_000)), "PNG")
    large = encoded(Image.new("1", (9_001, 10_000)), "PNG")
    assert len(bomb) < 100_000
    for data in (bomb, large):
        with pytest.raises(PictureError, match=r"large|89,000,000"):
            load_image(data)


def test_compressed_text_in_a_file_does_not_fill_the_memory() -> None:
    info = PngImagePlugin.PngInfo()
    for number in range(80):
        info.add_text(f"text {number}", "a" * 1_000_000, zip=True)
    with pytest.raises(PictureError, match="broken"):
        load_image(encoded(slope(), "PNG", pnginfo=info))


def test_base64_may_have_line_breaks_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_base64("aGVs\nbG8=") == b"hello"
    monkeypatch.setattr("mlxinfer.images.load.MAX_FILE_BYTES", 100)
    with pytest.raises(PictureError, match="at most 100"):
        from_base64("A" * 200)
    with pytest.raises(PictureError, match="at most 100"):
        load_image(bytes(101))


def test_a_data_url_is_the_file_or_a_png(tmp_path: Path) -> None:
    data = encoded(slope(), "JPEG")
    (tmp_path / "a.jpg").write_bytes(data)
    for source in (data, tmp_path / "a.jpg"):
        assert data_url(source) == f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    for source in (slope(), np.asarray(slope())):
        assert data_url(source).startswith("data:image/png;base64,")
        assert np.array_equal(np.asarray(load_image(data_url(source))), np.asarray(slope()))
    with pytest.raises(PictureError):
        data_url(b"junk")
