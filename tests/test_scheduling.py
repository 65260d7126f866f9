"""How the tests are given to workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENDS = """
import os
def test_1(): pass
def test_2(): os._exit(1)
def test_3(): pass
"""
DONE = range(3)  # files before and behind the one that ends its worker


@pytest.mark.ci
def test_a_test_that_ends_its_worker_is_begun_once_and_its_file_goes_on(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler")
    for number in DONE:
        (tmp_path / f"test_{number:02}.py").write_text("def test(): pass")
        (tmp_path / f"test_later_{number:02}.py").write_text("def test(): pass")
    (tmp_path / "test_ends.py").write_text(ENDS)
    options = ["-q", "-n1", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert f"1 failed, {2 + 2 * len(DONE)} passed" in done.stdout, done.stdout + done.stderr
