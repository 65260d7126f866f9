"""Pictures are decoded in processes: with a budget, for as long as somebody waits, alike."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from images.hostile import jpeg_of_many_scans, png_of_one_bit
from PIL import Image

from mlxinfer.errors import PictureError
from mlxinfer.images import ImageProcessor, Shown, image_processor, process
from mlxinfer.images.process import Budget, Source, prepare
from tests.waiting import LIMIT_S, wait_until

NEVER = jpeg_of_many_scans(4000, 3000)  # 75 KB, half a minute


@pytest.fixture
def processor(tmp_path: Path) -> ImageProcessor:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_5", "vision_config": {"patch_size": 16}, "image_token_id": 7}'
    )
    processor = image_processor(tmp_path, lambda _: None)
    assert processor is not None
    return processor


def ready(source: Any, processor: ImageProcessor, **budget: Any) -> Shown:
    return prepare(Source.of(source, "image"), processor, max_tokens=64, budget=Budget(**budget))


def running() -> list[psutil.Process]:
    """The processes that decode."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and process.__name__ in child.cmdline()
    ]


def cpu_s(child: psutil.Process) -> float:
    return float(child.cpu_times().user)


def test_a_picture_is_the_same_as_without_a_process(processor: ImageProcessor) -> None:
    image = Image.fromarray(np.random.default_rng(5).integers(0, 256, (90, 150, 3), np.uint8))
    expected = processor.prepare(image, max_tokens=64)
    for source in (image, np.asarray(image)):
        (actual,) = ready(source, processor).pictures
        for name in ("token_ids", "feature_id", "digest", "mrope_grid", "sees_itself", "times"):
            assert getattr(actual, name) == getattr(expected, name), name
        for tile, other in zip(actual.tiles, expected.tiles, strict=True):
            assert (tile.grid, tile.num_features) == (other.grid, other.num_features)
            assert np.array_equal(tile.patches, other.patches)


def test_a_slow_picture_is_refused_and_the_next_one_read(processor: ImageProcessor) -> None:
    with pytest.raises(PictureError, match="takes more than 1 s of CPU time") as caught:
        ready(NEVER, processor, seconds=1.0)
    assert caught.value.param == "image"
    assert ready(png_of_one_bit(64, 64), processor).pictures


def test_a_budget_is_for_all_pictures_of_a_request(processor: ImageProcessor) -> None:
    budget, source = Budget(), Source.of(png_of_one_bit(3000, 3000), "image")
    before = budget.seconds
    for _ in range(2):
        prepare(source, processor, max_tokens=64, budget=budget)
        assert budget.seconds < before
        before = budget.seconds


def test_a_picture_that_nobody_waits_for_ends(processor: ImageProcessor) -> None:
    has_left = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(ready, NEVER, processor, abandoned=has_left.is_set) for _ in "abcd"]
        wait_until(lambda: sum(cpu_s(child) > 0.5 for child in running()) == process.PROCESSES)
        has_left.set()
        for job in jobs:
            with pytest.raises(CancelledError):
                job.result(LIMIT_S)
    assert not running()


def test_memory_of_large_pictures_is_given_back(processor: ImageProcessor) -> None:
    """A picture of 16 KB takes 700 MB, which this process never has."""
    process = psutil.Process()
    before = process.memory_info().rss
    (result,) = ready(png_of_one_bit(11_000, 8_000), processor).pictures
    assert result.num_features <= 64
    assert process.memory_info().rss - before < 100 << 20
    assert all(child.memory_info().rss < 400 << 20 for child in running())


def test_what_takes_too_much_memory_is_refused(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = process.KillableProcess(process.__name__, None, max_bytes=600 << 20)
    monkeypatch.setattr(process, "_pool", process.KillablePool(small))
    with pytest.raises(PictureError, match="MB to decode"):
        ready(png_of_one_bit(11_000, 8_000), processor)
    small.close()


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", png_of_one_bit(8, 8)[:45]])
def test_broken_files_name_their_field(processor: ImageProcessor, data: bytes) -> None:
    with pytest.raises(PictureError, match="image is") as caught:
        ready(data, processor)
    assert caught.value.param == "image"
