"""How long a conversion says that it takes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from convert_cases import TEXT, convert, write_source

from mlxinfer.convert.calibration import estimate
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed takes a second."""

    def second(work: Callable[[], object]) -> float:
        work()
        return 1.0

    monkeypatch.setattr(estimate, "_timed", second)


def seconds(source: Path, text: str | None, recipe: str = "4bit-g32") -> float:
    options = ConversionOptions(recipe=make_recipe(recipe), calibration=text)
    return Conversion(open_source(source), source.parent / "out", options).seconds()


@pytest.mark.usefixtures("steady")
def test_a_shorter_text_takes_less(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    times = [seconds(source, TEXT * count) for count in (1, 2, 4, 4000, 40_000)]
    assert seconds(source, None) == 0 < times[0] < times[1] < times[2] < times[3] == times[4]


@pytest.mark.usefixtures("steady")
def test_codes_that_are_kept_take_no_rounding_and_no_text(tmp_path: Path) -> None:
    convert(write_source(tmp_path / "dense"), tmp_path / "source")
    kept, long = (seconds(tmp_path / "source", TEXT * count, "keep") for count in (1, 4))
    assert 0 < kept == long
    assert kept < seconds(tmp_path / "source", TEXT, "8bit-g32")


def test_a_moment_of_a_busy_machine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.25, 0.25, 0.375, 0.375, 0.75])
    clock = SimpleNamespace(process_time=lambda: next(times), perf_counter=lambda: next(times))
    monkeypatch.setattr(estimate, "time", clock)
    assert estimate._timed(lambda: None) == 0.125
