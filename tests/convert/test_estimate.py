"""How long a conversion says that it takes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from convert_cases import TEXT, write_source

from mlxinfer.convert.calibration import estimate
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion


def test_a_shorter_text_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(work: Callable[[], object]) -> float:
        work()
        return 1.0

    monkeypatch.setattr(estimate, "_timed", second)
    source = write_source(tmp_path / "source")

    def seconds(text: str | None) -> float:
        options = ConversionOptions(recipe=make_recipe("4bit-g32"), calibration=text)
        return Conversion(open_source(source), tmp_path / "out", options).seconds()

    times = [seconds(TEXT * count) for count in (1, 2, 4, 4000, 40_000)]
    assert seconds(None) == 0 < times[0] < times[1] < times[2] < times[3] == times[4]


def test_a_moment_of_a_busy_machine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.25, 0.25, 0.375, 0.375, 0.75])
    clock = SimpleNamespace(process_time=lambda: next(times), perf_counter=lambda: next(times))
    monkeypatch.setattr(estimate, "time", clock)
    assert estimate._timed(lambda: None) == 0.125
