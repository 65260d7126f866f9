"""bench serve: the scenes run against the real server, and the client hears what it says."""

import pytest

from tests.bench.bench_parts import check
from tests.bench.serve import run


@pytest.mark.slow
@pytest.mark.skipif("not __import__('sys').platform.startswith('linux')", reason="reads /proc")
def test_every_scene_has_a_figure() -> None:
    report = run(small=True, peer=False)
    check(report)
    figures = [side for (side,) in report.data["figures"]]
    assert len(figures) == 12
    assert all(figure["value"] > 0 for figure in figures)
