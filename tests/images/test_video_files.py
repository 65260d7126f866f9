"""Video files: the frames that a model sees of them, and files that are none."""

import io
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlxinfer.errors import PictureError
from mlxinfer.images import Video, load_video
from mlxinfer.images.video import at_most, evenly, every

LAST = 12
UPRIGHT = bytes.fromhex("00010000 00000000 00000000 00000000 00010000 00000000".replace(" ", ""))
TURNED = bytes.fromhex("00000000 00010000 00000000 ffff0000 00000000 00000000".replace(" ", ""))


def clip(suffix: str = "mp4", rate: int = 8) -> bytes:
    """A video whose frame i is grey of the level 20 i, with a white corner at the upper left."""
    av, file = pytest.importorskip("av"), io.BytesIO()
    codec, pixels = {
        "mp4": ("mpeg4", "yuv420p"),
        "mov": ("mpeg4", "yuv420p"),
        "webm": ("libvpx", "yuv420p"),
        "gif": ("gif", "rgb8"),
    }[suffix]
    with av.open(file, "w", format=suffix) as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        for number in range(LAST + 1):
            levels = np.full((48, 64, 3), 20 * number, np.uint8)
            levels[:8, :16] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(levels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def levels_of(video: Video, numbers: list[int]) -> list[int]:
    """The level in the middle of each frame, in twenties."""
    return [round(np.asarray(one)[24, 32].mean() / 20) for one in video.read(numbers)]


@pytest.mark.parametrize("suffix", ["mp4", "mov", "webm", "gif"])
def test_frames_of_a_file_are_those_that_were_asked_for(suffix: str, tmp_path: Path) -> None:
    data = clip(suffix)
    path = tmp_path / f"clip.{suffix}"
    path.write_bytes(data)
    for source in (data, path, str(path), memoryview(data)):
        video = load_video(source)
        assert video.num_frames == LAST + 1
        assert video.fps == pytest.approx(8, rel=0.05)
        tolerance = 1 if suffix == "gif" else 0  # which has few colours
        for numbers in ([0, 3, 7, LAST], [5], [2, 2, 9]):
            result = levels_of(video, numbers)
            assert np.abs(np.array(result) - numbers).max() <= tolerance


def trimmed(data: bytes, count: int) -> bytes:
    """The video without its first frames, which the file still holds: as phones trim films."""
    av, file = pytest.importorskip("av"), io.BytesIO()
    as_it_is = {"avoid_negative_ts": "disabled"}
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(file, "w", format="mp4", options=as_it_is) as container,
    ):
        stream = source.streams.video[0]
        copied = container.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        step = packets[1].dts - packets[0].dts
        for packet in packets:
            packet.pts, packet.dts = packet.pts - count * step, packet.dts - count * step
            packet.stream = copied
            container.mux(packet)
    return file.getvalue()


def test_frames_that_were_trimmed_off_are_not_counted() -> None:
    for count in range(LAST + 1):
        video = load_video(trimmed(clip(), count))
        assert video.num_frames == LAST + 1 - count
        numbers = evenly(video, fps=8, least=1, most=99)
        assert numbers[-1] == LAST - count
        assert levels_of(video, numbers) == [count + number for number in numbers]


def test_a_film_of_a_phone_is_turned_as_it_says() -> None:
    data = clip()
    assert data.count(UPRIGHT) == 2  # of the film, and of its track
    at = data.rindex(UPRIGHT)
    turned = data[:at] + TURNED + data[at + len(TURNED) :]
    (upright,), (actual,) = (load_video(one).read([0]) for one in (data, turned))
    assert (upright.size, actual.size) == ((64, 48), (48, 64))
    expected = upright.transpose(Image.Transpose.ROTATE_270)  # clockwise, as the matrix says
    assert np.abs(np.asarray(actual).astype(int) - np.asarray(expected)).max() <= 2


def test_broken_files_are_refused(tmp_path: Path) -> None:
    data = clip("webm")
    with pytest.raises(PictureError, match="broken or of no known format"):
        load_video(b"no video")
    with pytest.raises(PictureError, match="no file"):
        load_video(tmp_path / "no.mp4")
    with pytest.raises(PictureError, match="expected the path"):
        load_video(3)
    video = load_video(data)
    with pytest.raises(PictureError, match="cut off: its frame 99"):
        list(video.read([1, 99]))


def test_a_frame_larger_than_its_file_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    video = load_video(clip())
    monkeypatch.setattr(f"{load_video.__module__}.MAX_FRAME_PIXELS", 64 * 48 - 1)
    with pytest.raises(PictureError, match=r"no known format|cut off"):
        list(video.read([0]))
    with pytest.raises(PictureError, match="A frame has more than 3,071 pixels"):
        load_video(clip())


def test_playlists_open_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private.mp4").write_bytes(clip())
    playlist = tmp_path / "list.mp4"
    playlist.write_bytes(b"ffconcat version 1.0\nfile private.mp4\n")
    monkeypatch.chdir(tmp_path)
    for source in (playlist, playlist.read_bytes()):
        with pytest.raises(PictureError, match="broken or of no known format"):
            load_video(source)


def test_without_the_package_files_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    frames = [Image.new("RGB", (8, 8), (i, i, i)) for i in range(3)]
    assert load_video(frames).num_frames == 3
    with pytest.raises(PictureError, match=r'pip install -e "\.\[video\]"'):
        load_video(b"file")


def of(count: int, fps: float) -> Any:
    return Video(count, fps, lambda numbers: iter(()))


def test_frames_that_processors_choose() -> None:
    limits = {"fps": 2.0, "least": 4, "most": 768}
    assert every(of(5, 2.0), **limits, step=2) == [0, 1, 2, 3, 4]
    assert every(of(240, 24.0), **limits, step=2) == [12 * i for i in range(20)]
    assert every(of(1, 30.0), **limits, step=2) == [0]
    assert len(every(of(10**6, 30.0), **limits, step=2)) == 768
    assert every(of(30, 30.0), **limits, step=2) == [0, 7, 15, 22]
    assert evenly(of(240, 24.0), **limits) == [round(i * 239 / 19) for i in range(20)]
    assert evenly(of(1, 30.0), **limits) == [0]
    assert evenly(of(10**6, 30.0), **limits)[-1] == 10**6 - 1
    assert at_most(of(64, 9.0), 32) == list(range(0, 64, 2))
    assert at_most(of(3, 9.0), 32) == [0, 1, 2]
